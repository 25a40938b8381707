"""The cost of DFlash on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.drafters.common.cost import BlockCost
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashCost(BlockCost):
    """One pass of the block through all layers; each layer also makes keys and values of the accepted rows."""

    kind: ClassVar[str] = "dflash"
    states: int = 5
    width: int = 16

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, rows = config.hidden, self.levels + 1
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        ops = [matmul("features", rows, self.states * H, H), copy("embedding", rows * H)]
        for _ in range(self.layers):
            known = products("known rows", rows, H, width, HEAD in config.quantised)
            ops += [*known, *layer_ops(config, rows, slots)]
        ops.append(elementwise("last norm", rows * H, 4))
        ops += products("head", self.levels, H, self.vocabulary, HEAD in config.quantised)
        yield self.levels, self.width, [*ops, *ranking(self.levels, self.vocabulary)]
