"""FastEagle as a drafter: a cascade of blocks, one a level, in one pass; one draft step serves all trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.fasteagle.checkpoint import open_fasteagle
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.drafters.model import OpenedDrafter
from draftwood.compiler.drafters.widening import Widening, cached_widening
from draftwood.compiler.teachers.checkpoint import Checkpoint
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
        ops.append(elementwise("last norm", self.layers * H, 4))
        ops += products("head", self.layers, H, self.vocabulary, HEAD in config.quantised)
        yield self.layers, self.width, [*ops, *ranking(self.layers, self.vocabulary)]


@dataclass(frozen=True)
class FastEagleModel(CachedModel):
    """A cascade of blocks, one a level."""

    kind: ClassVar[str] = "fasteagle"
    training: ClassVar[str | None] = "draftwood.compiler.drafters.fasteagle.training"
    config: CachedConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return fields.get("architectures") == ["FastEagleDrafter"]

    @classmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        opened = open_fasteagle(path, teacher)
        return OpenedDrafter(cls(opened.config), opened)

    @classmethod
    def cost_of(cls, sizes: Sequence[str], teacher: TeacherConfig) -> FastEagleCost | None:
        found = [int(size) for size in sizes if size.isdecimal() and int(size)]
        if len(found) != len(sizes):
            return None
        match found:
            case [layers] | [layers, _]:
                return FastEagleCost(layers=layers, vocabulary=(*found[1:], teacher.vocabulary)[0])
            case [layers, vocabulary, heads, kv_heads, intermediate]:
                return FastEagleCost(
                    layers=layers, vocabulary=vocabulary, heads=heads, kv_heads=kv_heads, intermediate=intermediate
                )
        return None

    @property
    def levels(self) -> int:
        return self.config.block.layers

    def module(self, teacher: TeacherConfig, positions: int) -> FastEagle:
        return FastEagle(self.config, positions)

    def widening(self) -> Widening:
        return cached_widening(self.config, {"proj.weight": ("hidden", "pair")})

    def cost(self) -> FastEagleCost:
        block = self.config.block
        return FastEagleCost(
            layers=block.layers,
            vocabulary=self.config.draft_vocabulary,
            heads=block.heads,
            kv_heads=block.kv_heads,
            intermediate=block.intermediate,
        )
