"""EAGLE-3 as a drafter: run once a level of the tree; every tree has a draft step of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import Parts
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.ranked import check_rank
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.checkpoint import UNUSED, eagle3_parts, read_eagle3_config
from draftwood.compiler.drafters.eagle3.export import specforge, speculators
from draftwood.compiler.drafters.eagle3.layouts import OTHERS, WRITERS, Spelling, read_writer
from draftwood.compiler.drafters.eagle3.network import Eagle3, Eagle3Config
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget


@dataclass(frozen=True)
class Eagle3Model(CachedModel):
    """One block or several, run once a level."""

    kind: ClassVar[str] = "eagle3"
    called: ClassVar[str] = "EAGLE-3"
    unused: ClassVar[tuple[str, ...]] = UNUSED
    layouts = {"speculators": speculators, "specforge": specforge}  # noqa: RUF012 (declared by DraftModel)
    training: ClassVar[str | None] = "draftwood.compiler.drafters.eagle3.training"
    follows_nodes: ClassVar[bool] = True
    config: Eagle3Config

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        # Unsupported architectures are recognised here, and refused later by name.
        return fields.get("architectures") in [[name] for name in (*WRITERS, *OTHERS)]

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[Eagle3Config, Vocabulary, Parts]:
        config, vocabulary = read_eagle3_config(fields, read_writer(fields), teacher, stored)
        return config, vocabulary, eagle3_parts(config, vocabulary, Spelling.of(stored))

    def module(self, teacher: TeacherConfig, positions: int) -> Eagle3:
        return Eagle3(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_rank(name, tree, self.config.draft_vocabulary)
        if self.config.window is not None and tree.depth >= self.config.window:
            raise TreeError(
                f"tree {name}: {tree.depth} levels deep; expected less than the drafter's window of"
                f" {self.config.window}; choose a shallower tree"
            )
