"""DFlash as a draft model: one pass over a block of rows, whose one draft step serves all trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from draftwood.compiler.drafters.common.model import LevelModel
from draftwood.compiler.drafters.dflash.config import DFlashConfig
from draftwood.compiler.drafters.dflash.cost import DFlashCost
from draftwood.compiler.drafters.dflash.network import DFlash
from draftwood.compiler.drafters.dflash.steps import dflash_step
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder


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

    def level_step(self, drafter: Any, decoder: Decoder, ranked: int, rows: int, slots: int, dtype: str) -> Step:
        return dflash_step(drafter, decoder, ranked, rows, slots, dtype)

    def cost(self) -> DFlashCost:
        config = self.config
        return DFlashCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            states=len(config.aux_layers),
        )
