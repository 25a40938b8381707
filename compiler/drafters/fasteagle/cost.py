"""What a FastEagle cascade costs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, ranking
from draftwood.compiler.device.steps import layer_ops
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FastEagleCost:
    """A cascade of layers that drafts all its levels in one pass; one draft head serves every level.

    None makes the layers as wide as the teacher's.
    """

    layers: int
    vocabulary: int
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    width: int = 16

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "fasteagle", **asdict(self)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        own = {name: getattr(self, name) for name in ("heads", "kv_heads", "intermediate")}
        config = replace(config, **{name: size for name, size in own.items() if size is not None})
        H, rows = config.hidden, self.layers + 1
        ops = [matmul("features", rows, 3 * H, H), copy("embedding", rows * H), matmul("entry", rows, 2 * H, H)]
        for _ in range(self.layers):
            ops += layer_ops(config, rows, slots, flat=True)
        ops += [elementwise("last norm", self.layers * H, 4), matmul("head", self.layers, H, self.vocabulary)]
        yield self.layers, self.width, [*ops, *ranking(self.layers, self.vocabulary)]
