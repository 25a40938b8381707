"""What a DSpark drafter costs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.compiler.device.operators import Op, copy, elementwise, products, ranking
from draftwood.compiler.device.steps import HEAD
from draftwood.compiler.drafters.dflash.cost import DFlashCost
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkCost:
    """DFlash's pass, then a product of ``rank`` with the vocabulary for the ``widths`` best nodes of every level."""

    levels: int
    layers: int
    vocabulary: int
    rank: int = 256
    states: int = 5
    widths: tuple[int, ...] = (1, 4, 8, 16)

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "dspark", **asdict(self), "widths": list(self.widths)}

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
