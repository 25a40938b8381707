"""The cost of FastEagle on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.device.table import DraftCost, whole_sizes
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.teachers.config import TeacherConfig

# The sizes in which a layer may differ from the teacher's.
_WIDTHS = ("heads", "kv_heads", "intermediate")


@dataclass(frozen=True, slots=True, kw_only=True)
class FastEagleCost(DraftCost):
    """A cascade of layers that drafts all its levels in one pass; one draft head serves every level.

    None makes the layers as wide as the teacher's.
    """

    kind: ClassVar[str] = "fasteagle"
    layers: int
    vocabulary: int
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    states: int = 3
    width: int = 16

    def block(self, config: TeacherConfig) -> TeacherConfig:
        sizes = {name: getattr(self, name) for name in _WIDTHS}
        return replace(config, **{name: size for name, size in sizes.items() if size is not None})

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, rows = config.hidden, self.layers + 1
        ops = [matmul("features", rows, self.states * H, H), copy("embedding", rows * H)]
        ops.append(matmul("entry", rows, 2 * H, H))
        for _ in range(self.layers):
            ops += layer_ops(config, rows, slots, flat=True)
        ops.append(elementwise("last norm", self.layers * H, 4))
        ops += products("head", self.layers, H, self.vocabulary, HEAD in config.quantised)
        yield self.layers, self.width, [*ops, *ranking(self.layers, self.vocabulary)]

    @classmethod
    def of_sizes(cls, sizes: Sequence[str], teacher: TeacherConfig) -> FastEagleCost | None:
        widths = len(sizes) > 2  # of the layers: three more sizes, or the teacher's
        numbers = whole_sizes(sizes, () if widths else (teacher.vocabulary,), required=5 if widths else 1)
        if numbers is None:
            return None
        return FastEagleCost(**dict(zip(("layers", "vocabulary", *_WIDTHS), numbers, strict=False)))

    @classmethod
    def of_config(cls, config: CachedConfig) -> FastEagleCost:
        block = config.block
        return FastEagleCost(
            layers=block.layers,
            vocabulary=config.draft_vocabulary,
            heads=block.heads,
            kv_heads=block.kv_heads,
            intermediate=block.intermediate,
            states=len(config.aux_layers),
        )
