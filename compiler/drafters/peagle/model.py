"""P-EAGLE as a draft model: one pass, whose one draft step serves all trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.drafters.common.model import LevelModel
from draftwood.compiler.drafters.peagle.config import PEagleConfig
from draftwood.compiler.drafters.peagle.cost import PEagleCost
from draftwood.compiler.drafters.peagle.network import PEagle
from draftwood.compiler.teachers.config import TeacherConfig


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

    def cost(self) -> PEagleCost:
        config = self.config
        return PEagleCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            states=len(config.aux_layers),
        )
