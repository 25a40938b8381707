"""What a FastEagle cascade costs on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FastEagleCost:
    """A cascade of layers that drafts all its levels in one pass; one draft head serves every level.

    None makes the layers as wide as the teacher's. A ``cell`` of so many units is run once a level behind the first, on
    the ``widths`` best nodes of a level, and ranks a shortlist.
    """

    layers: int
    vocabulary: int
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    width: int = 16
    cell: int = 0
    shortlist: int = 0
    widths: tuple[int, ...] = (1, 4, 8, 16)

    @property
    def facts(self) -> dict[str, Any]:
        facts = {"kind": "fasteagle", **asdict(self), "widths": list(self.widths)}
        unused = ("width",) if self.cell else ("cell", "shortlist", "widths")
        return {name: value for name, value in facts.items() if name not in unused}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        ops = self._cascade(config, slots)
        if not self.cell:
            yield self.layers, self.width, ops
            return
        shortlist = elementwise("shortlist", self.layers * self.vocabulary, 1)
        ops = [*ops, matmul("level", self.layers, config.hidden, 3 * self.cell), shortlist]
        for width in self.widths:
            for depth in range(1, self.layers + 1):
                yield depth, width, [*ops, *(depth - 1) * self._cell(config.hidden, width)]

    def _cascade(self, config: TeacherConfig, slots: int) -> list[Op]:
        own = {name: getattr(self, name) for name in ("heads", "kv_heads", "intermediate")}
        config = replace(config, **{name: size for name, size in own.items() if size is not None})
        H, rows = config.hidden, self.layers + 1
        ops = [matmul("features", rows, 3 * H, H), copy("embedding", rows * H), matmul("entry", rows, 2 * H, H)]
        for _ in range(self.layers):
            ops += layer_ops(config, rows, slots, flat=True)
        ops.append(elementwise("last norm", self.layers * H, 4))
        ops += products("head", self.layers, H, self.vocabulary, HEAD in config.quantised)
        return [*ops, *ranking(self.layers, self.vocabulary)]

    def _cell(self, H: int, rows: int) -> list[Op]:
        """The cell on the nodes of a level, and their children's ranks."""
        R, S = self.cell, self.shortlist
        return [
            copy("embedding", rows * H),
            matmul("state", rows, R, 3 * R),
            matmul("token", rows, H, 3 * R),
            elementwise("gates", rows * 3 * R, 2, count=4),
            matmul("gain", rows, R, H),
            copy("shortlist rows", S * H),
            matmul("ranked", rows, H, S),
            *ranking(rows, S),
        ]
