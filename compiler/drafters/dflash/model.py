"""DFlash as a draft model: one pass over a block of rows, whose one draft step serves all trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.drafters.common.model import LevelModel
from draftwood.compiler.drafters.dflash.config import DFlashConfig
from draftwood.compiler.drafters.dflash.cost import DFlashCost
from draftwood.compiler.drafters.dflash.network import DFlash
from draftwood.compiler.teachers.config import TeacherConfig


@dataclass(frozen=True)
class DFlashModel(LevelModel):
    """A block of rows that see each other."""

    kind: ClassVar[str] = "dflash"
    config: DFlashConfig

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
