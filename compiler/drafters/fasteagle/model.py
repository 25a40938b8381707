"""FastEagle as a draft model: a cascade of blocks, one a level, whose one draft step serves all trees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from draftwood import manifest as m
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.ranked import candidates, check_levels
from draftwood.compiler.drafters.fasteagle.cost import FastEagleCost
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.drafters.fasteagle.steps import fasteagle_step
from draftwood.compiler.drafters.model import Trees
from draftwood.compiler.drafters.widening import Widening
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.trees import Topology
from draftwood.trees.spec import Budget


@dataclass(frozen=True)
class FastEagleModel(CachedModel):
    """A cascade of blocks, one a level."""

    kind: ClassVar[str] = "fasteagle"

    def module(self, teacher: TeacherConfig, positions: int) -> FastEagle:
        return FastEagle(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_levels(name, tree, self.config.block.layers, "levels", self.config.draft_vocabulary)

    def draft_name(self, tree: str) -> str:
        return "draft"

    def draft_steps(
        self, drafter: Any, decoder: Decoder, trees: Trees, rows: int, slots: int, dtype: str
    ) -> Iterable[Step]:
        yield fasteagle_step(drafter, decoder, candidates(trees, self.config.draft_vocabulary), rows, slots, dtype)

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        return self.entry(digest, self.config.block.layers, candidates(trees, self.config.draft_vocabulary))

    def widening(self) -> Widening:
        return self.grown({"proj.weight": ("hidden", "pair")})

    def cost(self) -> FastEagleCost:
        block = self.config.block
        return FastEagleCost(
            layers=block.layers,
            vocabulary=self.config.draft_vocabulary,
            heads=block.heads,
            kv_heads=block.kv_heads,
            intermediate=block.intermediate,
        )
