"""DSpark as a drafter: one pass over a block of rows, then the heads on a tree's nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.device.operators import Op, copy, elementwise, products, ranking
from draftwood.compiler.device.steps import HEAD
from draftwood.compiler.device.table import DraftCost
from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Parts
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.export import check_block
from draftwood.compiler.drafters.dflash.model import DFlashCost
from draftwood.compiler.drafters.dspark.checkpoint import is_dspark, read_dspark
from draftwood.compiler.drafters.dspark.export import deepspec, dspark_speculators
from draftwood.compiler.drafters.dspark.network import DSpark, DSparkConfig
from draftwood.compiler.drafters.model import whole_sizes
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkCost(DraftCost):
    """DFlash's pass, then a product of ``rank`` with the vocabulary for the ``widths`` best nodes of every level."""

    kind: ClassVar[str] = "dspark"
    levels: int
    layers: int
    vocabulary: int
    rank: int = 256
    states: int = 5
    widths: tuple[int, ...] = (1, 4, 8, 16)

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        block = DFlashCost(levels=self.levels, layers=self.layers, vocabulary=self.vocabulary, states=self.states)
        ((_, _, ops),) = block.drafts(config, slots)
        int8 = HEAD in config.quantised
        for width in self.widths:
            for depth in range(1, self.levels + 1):
                yield depth, width, [*ops, *self._head(1, int8), *(depth - 1) * self._head(width, int8)]

    def _head(self, rows: int, int8: bool) -> list[Op]:
        V = self.vocabulary
        return [
            copy("token", rows * self.rank),
            *products("bias", rows, self.rank, V, int8),
            elementwise("add bias", rows * V, 3),
            *ranking(rows, V),
        ]


@dataclass(frozen=True)
class DSparkModel(CachedModel):
    """A block of rows that see each other, and a head that sees the path."""

    kind: ClassVar[str] = "dspark"
    called: ClassVar[str] = "DSpark"
    layouts = {"speculators": dspark_speculators, "deepspec": deepspec}  # noqa: RUF012 (declared by DraftModel)
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
    def cost_of(cls, sizes: Sequence[str], teacher: TeacherConfig) -> DSparkCost | None:
        if (numbers := whole_sizes(sizes, (1, teacher.vocabulary, 256))) is None:
            return None
        levels, layers, vocabulary, rank = numbers
        return DSparkCost(levels=levels, layers=layers, vocabulary=vocabulary, rank=rank)

    @classmethod
    def check_layout(cls, checkpoint: CachedCheckpoint[DSparkConfig], layout: str) -> None:  # type: ignore[override]
        check_block(checkpoint, layout)

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> DSpark:
        return DSpark(self.config, positions)

    def cost(self) -> DSparkCost:
        config = self.config
        return DSparkCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            rank=config.markov_rank,
            states=len(config.aux_layers),
        )
