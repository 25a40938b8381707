"""The cost of Medusa heads on a device that is not here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.device.operators import Op, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD
from draftwood.compiler.device.table import DraftCost
from draftwood.compiler.drafters.medusa.network import MedusaConfig
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaCost(DraftCost):
    """The cost of heads on a device: one graph for all levels, with an output matrix each or the teacher's."""

    kind: ClassVar[str] = "medusa"
    levels: int
    blocks: int = 1
    tied: bool = False
    width: int = 16
    # Tokens that can be proposed; None for the teacher's vocabulary.
    vocabulary: int | None = None

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, V, heads = config.hidden, self.vocabulary or config.vocabulary, self.levels
        int8 = HEAD in config.quantised
        blocks = products("block", 1, H, H, int8, count=heads * self.blocks)
        blocks += [elementwise("silu and residual", H, 3, count=2 * heads * self.blocks)]
        out = [matmul("head", heads, H, V)] if self.tied else products("head", 1, H, V, int8, count=heads)
        yield self.levels, self.width, [*blocks, *out, *ranking(heads, V)]

    @classmethod
    def of_sizes(cls, sizes: Sequence[str], teacher: TeacherConfig) -> MedusaCost | None:
        match sizes:
            case [heads] | [heads, "tied"] if heads.isdecimal() and int(heads):
                return MedusaCost(levels=int(heads), tied="tied" in sizes)
        return None

    @classmethod
    def of_config(cls, config: MedusaConfig) -> MedusaCost:
        return MedusaCost(levels=config.heads, blocks=config.blocks, tied=config.tied, vocabulary=config.vocabulary)
