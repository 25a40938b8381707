"""DFlash as a drafter: one pass over a block of rows, whose one draft step serves all trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.dflash.checkpoint import is_dflash, open_dflash
from draftwood.compiler.drafters.dflash.export import exported
from draftwood.compiler.drafters.dflash.network import DFlash, DFlashConfig
from draftwood.compiler.drafters.model import Folder, OpenedDrafter, whole_sizes
from draftwood.compiler.teachers.checkpoint import Checkpoint
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


@dataclass(frozen=True)
class DFlashModel(CachedModel):
    """A block of rows that see each other."""

    kind: ClassVar[str] = "dflash"
    config: DFlashConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return is_dflash(fields)

    @classmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        opened = open_dflash(path, teacher)
        return OpenedDrafter(cls(opened.config), opened)

    @classmethod
    def cost_of(cls, sizes: Sequence[str], teacher: TeacherConfig) -> DFlashCost | None:
        if (found := whole_sizes(sizes, (1, teacher.vocabulary))) is None:
            return None
        return DFlashCost(levels=found[0], layers=found[1], vocabulary=found[2])

    @classmethod
    def exported(cls, checkpoint: Any, teacher: Checkpoint, layout: str, verifier: str) -> Folder:
        return exported(checkpoint, layout, verifier)

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
