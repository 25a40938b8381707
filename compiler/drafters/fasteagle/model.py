"""FastEagle as a draft model: a cascade of blocks, one a level, whose one draft step serves all trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.drafters.common.model import LevelModel
from draftwood.compiler.drafters.fasteagle.cost import FastEagleCost
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.drafters.widening import Widening
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True)
class FastEagleModel(LevelModel):
    """A cascade of blocks, one a level."""

    kind: ClassVar[str] = "fasteagle"

    @property
    def levels(self) -> int:
        return self.config.block.layers

    def module(self, teacher: TeacherConfig, positions: int) -> FastEagle:
        return FastEagle(self.config, positions)

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
