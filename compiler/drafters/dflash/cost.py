"""What a DFlash drafter costs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashCost:
    """One pass of the block through all layers; each layer also makes keys and values of the accepted rows."""

    levels: int
    layers: int
    vocabulary: int
    states: int = 5
    width: int = 16

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "dflash", **asdict(self)}

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
