"""DSpark as a draft model: one pass over a block of rows, then the heads on a tree's nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from draftwood.compiler.drafters.common.model import TreeModel
from draftwood.compiler.drafters.common.ranked import check_levels
from draftwood.compiler.drafters.dspark.config import DEEPSPEC, DSparkConfig
from draftwood.compiler.drafters.dspark.cost import DSparkCost
from draftwood.compiler.drafters.dspark.network import DSpark
from draftwood.compiler.drafters.widening import Axes, Widening
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import RequestError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

_AXES: Axes = {
    "q_norm.weight": ("head",),
    "k_norm.weight": ("head",),
    "markov_w1.weight": ("vocabulary", "rank"),
    "markov_w2.weight": ("draft vocabulary", "rank"),
    "markov_head.gate_proj.weight": ("rank", "level and token"),
    "markov_head.gate_proj.bias": ("rank",),
    "joint_proj.weight": ("gates", "state, token and level"),
    "joint_proj.bias": ("gates",),
    "confidence_head.proj.bias": ("confidence",),
}
_CONFIDENCE = "confidence_head.proj.weight"


@dataclass(frozen=True)
class DSparkModel(TreeModel):
    """A block of rows that see each other, and a head that sees the path."""

    kind: ClassVar[str] = "dspark"
    config: DSparkConfig

    def module(self, teacher: TeacherConfig, positions: int) -> DSpark:
        return DSpark(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_levels(name, tree, self.config.levels, "levels", self.config.draft_vocabulary)

    def widening(self) -> Widening:
        # The heads are as wide beside a large teacher as beside a small one: only what they read of a level grows.
        R = self.config.markov_rank
        read = "level and token" if self.config.confidence == "markov" else "hidden"
        parts: dict[str, tuple[str | int, ...]] = {
            "head": (self.config.block.head_dim,),
            "rank": (R,),
            "gates": (3 * R,),
            "level and token": ("hidden", R),
            "state, token and level": (2 * R, "hidden"),
            "confidence": (1,),
        }
        return self.grown({**_AXES, _CONFIDENCE: ("confidence", read)}, parts)

    def widened_fields(self, fields: dict[str, Any], wide: TeacherConfig) -> dict[str, Any]:
        if fields.get("architectures") != [DEEPSPEC]:
            raise RequestError(
                f"architectures is {fields.get('architectures')}; a DSpark grows in DeepSpec's layout alone, expected"
                f" {DEEPSPEC}; write it so with draftwood export"
            )
        return super().widened_fields(fields, wide)

    def cost(self) -> DSparkCost:
        config = self.config
        return DSparkCost(
            levels=config.levels,
            layers=config.block.layers,
            vocabulary=config.draft_vocabulary,
            rank=config.markov_rank,
            states=len(config.aux_layers),
        )
