"""DFlash as a drafter: one pass over a block of rows, whose one draft step serves all trees."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.device.table import DraftCost
from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Parts
from draftwood.compiler.drafters.common.export import refuse
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.dflash.checkpoint import dflash_parts, is_dflash, read_dflash_config
from draftwood.compiler.drafters.dflash.export import check_block, dflash_speculators, specforge
from draftwood.compiler.drafters.dflash.network import DFlash, DFlashConfig
from draftwood.compiler.drafters.model import whole_sizes
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashCost(DraftCost):
    """One pass of the block through all layers; each layer also makes keys and values of the accepted rows."""

    kind: ClassVar[str] = "dflash"
    levels: int
    layers: int
    vocabulary: int
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


@dataclass(frozen=True)
class DFlashModel(CachedModel):
    """A block of rows that see each other."""

    kind: ClassVar[str] = "dflash"
    called: ClassVar[str] = "DFlash"
    layouts = {"speculators": dflash_speculators, "specforge": specforge}  # noqa: RUF012 (declared by DraftModel)
    config: DFlashConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return is_dflash(fields)

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[DFlashConfig, Vocabulary, Parts]:
        config, vocabulary = read_dflash_config(fields, teacher, stored)
        return config, vocabulary, dflash_parts(config, vocabulary)

    @classmethod
    def cost_of(cls, sizes: Sequence[str], teacher: TeacherConfig) -> DFlashCost | None:
        if (numbers := whole_sizes(sizes, (1, teacher.vocabulary))) is None:
            return None
        return DFlashCost(levels=numbers[0], layers=numbers[1], vocabulary=numbers[2])

    @classmethod
    def check_layout(cls, checkpoint: CachedCheckpoint[DFlashConfig], layout: str) -> None:  # type: ignore[override]
        check_block(checkpoint, layout)
        # vLLM and SGLang always draft from the first mask row on.
        refuse(layout, {"a first draft by the root's row, which no server reads": checkpoint.config.from_root})

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> DFlash:
        return DFlash(self.config, positions)

    def cost(self) -> DFlashCost:
        config = self.config
        return DFlashCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            states=len(config.aux_layers),
        )
