"""DSpark as a drafter: one pass over a block of rows, then the heads on a tree's nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Parts
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dspark.checkpoint import is_dspark, read_dspark
from draftwood.compiler.drafters.dspark.export import check_block, deepspec, speculators
from draftwood.compiler.drafters.dspark.network import DSpark, DSparkConfig
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True)
class DSparkModel(CachedModel):
    """A block of rows that see each other, and a head that sees the path."""

    kind: ClassVar[str] = "dspark"
    called: ClassVar[str] = "DSpark"
    layouts = {"speculators": speculators, "deepspec": deepspec}  # noqa: RUF012 (declared by DraftModel)
    training: ClassVar[str | None] = "draftwood.compiler.drafters.dspark.training"
    follows_nodes: ClassVar[bool] = True
    config: DSparkConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return is_dspark(fields)

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[DSparkConfig, Vocabulary, Parts]:
        return read_dspark(fields, teacher, stored)

    @classmethod
    def check_layout(cls, checkpoint: CachedCheckpoint[DSparkConfig], layout: str) -> None:  # type: ignore[override]
        check_block(checkpoint, layout)

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> DSpark:
        return DSpark(self.config, positions)
