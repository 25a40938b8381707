"""P-EAGLE as a drafter: one pass, whose one draft step serves all trees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.model import Folder, OpenedDrafter, whole_sizes
from draftwood.compiler.drafters.peagle.checkpoint import exported, is_peagle, open_peagle
from draftwood.compiler.drafters.peagle.network import PEagle, PEagleConfig
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleCost:
    """A pass over the accepted rows and one over the mask rows, both through all layers; one head serves all levels."""

    levels: int
    layers: int
    vocabulary: int
    states: int = 3
    width: int = 16

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "peagle", **asdict(self)}

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H, masks = config.hidden, self.levels - 1
        ops = [matmul("features", self.levels + 1, self.states * H, H)]
        for rows in (self.levels + 1, *([masks] if masks else [])):
            ops += [copy("embedding", rows * H), *layer_ops(config, rows, slots, wide=2)]
            ops += (self.layers - 1) * layer_ops(config, rows, slots)
        ops.append(elementwise("last norm", self.levels * H, 4))
        ops += products("head", self.levels, H, self.vocabulary, HEAD in config.quantised)
        yield self.levels, self.width, [*ops, *ranking(self.levels, self.vocabulary)]


@dataclass(frozen=True)
class PEagleModel(CachedModel):
    """EAGLE-3's network with a mask row a level."""

    kind: ClassVar[str] = "peagle"
    config: PEagleConfig

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        return is_peagle(fields)

    @classmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        opened = open_peagle(path, teacher)
        return OpenedDrafter(cls(opened.config), opened)

    @classmethod
    def cost_of(cls, sizes: Sequence[str], teacher: TeacherConfig) -> PEagleCost | None:
        if (found := whole_sizes(sizes, (1, teacher.vocabulary))) is None:
            return None
        return PEagleCost(levels=found[0], layers=found[1], vocabulary=found[2])

    @classmethod
    def exported(cls, checkpoint: Any, teacher: Checkpoint, layout: str, verifier: str) -> Folder:
        return exported(checkpoint, layout, verifier)

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> PEagle:
        return PEagle(self.config, positions)

    def cost(self) -> PEagleCost:
        config = self.config
        return PEagleCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            states=len(config.aux_layers),
        )
