"""The cost of EAGLE-3 on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.device.table import DraftCost, whole_sizes
from draftwood.compiler.drafters.eagle3.network import Eagle3Config
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Cost(DraftCost):
    """As many passes, one after the other, as levels; `vocabulary` is the draft head's.

    The first pass takes the accepted rows through the feature projection; every further one expands the best
    `width` nodes of a level. (The reference implementation's depth counts the passes after the first.)
    """

    kind: ClassVar[str] = "eagle3"
    vocabulary: int
    layers: int = 1
    states: int = 3
    levels: int = 8
    widths: tuple[int, ...] = (1, 4, 8, 16)

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

    @classmethod
    def of_sizes(cls, sizes: Sequence[str], teacher: TeacherConfig) -> Eagle3Cost | None:
        numbers = whole_sizes(sizes, (teacher.vocabulary,), required=0)
        return None if numbers is None else Eagle3Cost(vocabulary=numbers[0])

    @classmethod
    def of_config(cls, config: Eagle3Config) -> Eagle3Cost:
        return Eagle3Cost(vocabulary=config.draft_vocabulary, layers=config.block.layers, states=len(config.aux_layers))
