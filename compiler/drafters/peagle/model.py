"""P-EAGLE as a draft model: one pass, whose one draft step serves all trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from draftwood.compiler.drafters.common.model import LevelModel
from draftwood.compiler.drafters.peagle.config import PEagleConfig
from draftwood.compiler.drafters.peagle.cost import PEagleCost
from draftwood.compiler.drafters.peagle.network import PEagle
from draftwood.compiler.drafters.peagle.steps import peagle_step
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder


@dataclass(frozen=True)
class PEagleModel(LevelModel):
    """EAGLE-3's network with a mask row a level."""

    kind: ClassVar[str] = "peagle"
    config: PEagleConfig

    @property
    def levels(self) -> int:
        return self.config.levels

    def module(self, teacher: TeacherConfig, positions: int) -> PEagle:
        return PEagle(self.config, positions)

    def level_step(self, drafter: Any, decoder: Decoder, ranked: int, rows: int, slots: int, dtype: str) -> Step:
        return peagle_step(drafter, decoder, ranked, rows, slots, dtype)

    def cost(self) -> PEagleCost:
        config = self.config
        return PEagleCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            states=len(config.aux_layers),
        )
