"""EAGLE-3 as a draft model: run once a level of the tree; every tree has a draft step of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from draftwood.compiler.drafters.common.model import TreeModel
from draftwood.compiler.drafters.common.ranked import check_rank
from draftwood.compiler.drafters.eagle3.config import Eagle3Config
from draftwood.compiler.drafters.eagle3.cost import Eagle3Cost
from draftwood.compiler.drafters.eagle3.layouts import AUX_IDS
from draftwood.compiler.drafters.eagle3.network import Eagle3
from draftwood.compiler.drafters.widening import Axes, Widening, size_fields
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# Its q, k and v read two hidden states side by side.
_AXES: Axes = {f"{side}_proj.weight": (axis, "pair") for side, axis in (("q", "query"), ("k", "key"), ("v", "key"))}


@dataclass(frozen=True)
class Eagle3Model(TreeModel):
    """One block or several, run once a level."""

    kind: ClassVar[str] = "eagle3"
    config: Eagle3Config

    def module(self, teacher: TeacherConfig, positions: int) -> Eagle3:
        return Eagle3(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_rank(name, tree, self.config.draft_vocabulary)
        if self.config.window is not None and tree.depth >= self.config.window:
            raise TreeError(
                f"tree {name}: {tree.depth} levels deep; expected less than the drafter's window of"
                f" {self.config.window}; choose a shallower tree"
            )

    def widening(self) -> Widening | None:
        plain = self.config.block.layers == 1 and not self.config.block.qk_norm
        return self.grown(_AXES) if plain else None

    def widened_fields(self, fields: dict[str, Any], wide: TeacherConfig) -> dict[str, Any]:
        nested = fields.get("transformer_layer_config")  # where one layout has the block's fields
        if nested:
            nested |= size_fields(wide, nested)
            aux = {"target_hidden_size": wide.hidden, "aux_layer_ids": list(self.config.aux_layers)}
            fields = fields | aux
        else:
            fields = super().widened_fields(fields, wide)
        for listed in (fields, fields.get("eagle_config") or {}):
            if listed.get(AUX_IDS) is not None:
                listed[AUX_IDS] = list(self.config.aux_layers)
        return fields

    def cost(self) -> Eagle3Cost:
        config = self.config
        return Eagle3Cost(vocabulary=config.draft_vocabulary, layers=config.block.layers, states=len(config.aux_layers))
