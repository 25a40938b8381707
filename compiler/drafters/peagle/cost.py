"""The cost of P-EAGLE on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.drafters.common.cost import BlockCost
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleCost(BlockCost):
    """A pass over the accepted rows and one over the mask rows, both through all layers; one head serves all levels."""

    kind: ClassVar[str] = "peagle"
    states: int = 3
    width: int = 16

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, masks = config.hidden, self.levels - 1
        ops = [matmul("features", self.levels + 1, self.states * H, H)]
        for rows in (self.levels + 1, *([masks] if masks else [])):
            ops += [copy("embedding", rows * H), *layer_ops(config, rows, slots, wide=2)]
            ops += (self.layers - 1) * layer_ops(config, rows, slots)
        ops.append(elementwise("last norm", self.levels * H, 4))
        ops += products("head", self.levels, H, self.vocabulary, HEAD in config.quantised)
        yield self.levels, self.width, [*ops, *ranking(self.levels, self.vocabulary)]
