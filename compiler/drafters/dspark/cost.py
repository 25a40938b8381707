"""The cost of DSpark on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, products, ranking
from draftwood.compiler.device.steps import HEAD
from draftwood.compiler.device.table import whole_sizes
from draftwood.compiler.drafters.common.cost import BlockCost
from draftwood.compiler.drafters.dflash.cost import DFlashCost
from draftwood.compiler.drafters.dspark.network import DSparkConfig
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkCost(BlockCost):
    """DFlash's pass, then a product of ``rank`` with the vocabulary for the ``widths`` best nodes of every level."""

    kind: ClassVar[str] = "dspark"
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

    @classmethod
    def of_sizes(cls, sizes: Sequence[str], teacher: TeacherConfig) -> DSparkCost | None:
        if (numbers := whole_sizes(sizes, (1, teacher.vocabulary, 256))) is None:
            return None
        levels, layers, vocabulary, rank = numbers
        return DSparkCost(levels=levels, layers=layers, vocabulary=vocabulary, rank=rank)

    @classmethod
    def more(cls, config: DSparkConfig) -> dict[str, int]:
        return {"rank": config.markov_rank}
