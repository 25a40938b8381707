"""What an EAGLE-3 layer costs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Cost:
    """As many passes, one after the other, as levels; `vocabulary` is the draft head's.

    The first pass takes the accepted rows through the feature projection; every further one expands the best
    `width` nodes of a level. (The reference implementation's depth counts the passes after the first.)
    """

    vocabulary: int
    layers: int = 1
    states: int = 3
    levels: int = 8
    widths: tuple[int, ...] = (1, 4, 8, 16)

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "eagle3", **asdict(self), "widths": list(self.widths)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H = config.hidden
        for width in self.widths:
            first = [
                matmul("features", self.levels + 1, self.states * H, H),
                *self._pass(config, self.levels + 1, 1, slots),
            ]
            for depth in range(1, self.levels + 1):
                yield depth, width, [*first, *(depth - 1) * self._pass(config, width, width, slots)]

    def _pass(self, config: TeacherConfig, rows: int, scored: int, slots: int) -> list[Op]:
        H, V = config.hidden, self.vocabulary
        return [
            copy("embedding", rows * H),
            *layer_ops(config, rows, slots, wide=2, flat=True),
            *(self.layers - 1) * layer_ops(config, rows, slots, flat=True),
            elementwise("last norm", scored * H, 4),
            *products("head", scored, H, V, HEAD in config.quantised),
            *ranking(scored, V),
        ]
