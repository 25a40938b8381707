"""What Medusa heads cost on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.compiler.device.operators import Op, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaCost:
    """One graph for all levels: residual blocks, then an output matrix each or the teacher's."""

    levels: int
    blocks: int = 1
    tied: bool = False
    width: int = 16

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "medusa", **asdict(self)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, V, heads = config.hidden, config.vocabulary, self.levels
        int8 = HEAD in config.quantised
        blocks = products("block", 1, H, H, int8, count=heads * self.blocks)
        blocks += [elementwise("silu and residual", H, 3, count=2 * heads * self.blocks)]
        out = [matmul("head", heads, H, V)] if self.tied else products("head", 1, H, V, int8, count=heads)
        yield self.levels, self.width, [*blocks, *out, *ranking(heads, V)]
