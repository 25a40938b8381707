"""DSpark as a draft model: one pass over a block of rows, then the heads on a tree's nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from draftwood.compiler.drafters.common.model import TreeModel
from draftwood.compiler.drafters.common.ranked import check_levels
from draftwood.compiler.drafters.dspark.config import DSparkConfig
from draftwood.compiler.drafters.dspark.cost import DSparkCost
from draftwood.compiler.drafters.dspark.network import DSpark
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.trees import Topology
from draftwood.trees.spec import Budget


@dataclass(frozen=True)
class DSparkModel(TreeModel):
    """A block of rows that see each other, and a head that sees the path."""

    kind: ClassVar[str] = "dspark"
    config: DSparkConfig

    def module(self, teacher: TeacherConfig, positions: int) -> DSpark:
        return DSpark(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_levels(name, tree, self.config.levels, "levels", self.config.draft_vocabulary)

    def cost(self) -> DSparkCost:
        config = self.config
        return DSparkCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            rank=config.markov_rank,
            states=len(config.aux_layers),
        )
