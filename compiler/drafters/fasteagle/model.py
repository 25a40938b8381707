"""FastEagle as a draft model: a cascade of blocks, one a level, in one pass; with a cell, then a tree's nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from draftwood.compiler.drafters.common.model import LevelModel, TreeModel
from draftwood.compiler.drafters.common.ranked import check_levels
from draftwood.compiler.drafters.fasteagle.config import FastEagleConfig
from draftwood.compiler.drafters.fasteagle.cost import FastEagleCost
from draftwood.compiler.drafters.fasteagle.network import CellCascade, FastEagle
from draftwood.compiler.drafters.widening import Axes, Widening
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import RequestError, TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

_AXES: Axes = {"proj.weight": ("hidden", "pair")}
_CELL_AXES: Axes = {
    **_AXES,
    "cell.state.weight": ("cell gates", "cell state"),
    "cell.token.weight": ("cell gates", "hidden"),
    "cell.level.weight": ("cell gates", "hidden"),
    "cell.level.bias": ("cell gates",),
    "cell.out.weight": ("hidden", "cell state"),
}


@dataclass(frozen=True)
class FastEagleModel(LevelModel):
    """A cascade of blocks, one a level."""

    kind: ClassVar[str] = "fasteagle"
    config: FastEagleConfig

    @property
    def levels(self) -> int:
        return self.config.block.layers

    def module(self, teacher: TeacherConfig, positions: int) -> FastEagle:
        return FastEagle(self.config, positions)

    def widening(self) -> Widening:
        return self.grown(_AXES)

    def cost(self) -> FastEagleCost:
        return _cost(self.config)


@dataclass(frozen=True)
class CellModel(TreeModel):
    """The same with a cell that every node of a tree runs."""

    kind: ClassVar[str] = "fasteagle"
    config: FastEagleConfig

    def shared(self, ranks: int) -> Self:
        if ranks > 1:
            raise RequestError(
                f"--ranks {ranks}: a FastEagle drafter with a cell reads single rows of the output matrix, which lie on"
                " one rank each; expected another drafter; build for one rank"
            )
        return self

    def module(self, teacher: TeacherConfig, positions: int) -> CellCascade:
        return CellCascade(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        shortlist = self.config.cell_shortlist
        check_levels(name, tree, self.config.block.layers, "levels", self.config.draft_vocabulary)
        if tree.width > shortlist:
            raise TreeError(f"tree {name}: rank {tree.width - 1} is past the drafter's shortlist of {shortlist}")

    def widening(self) -> Widening:
        # The cell is as wide beside a large teacher as beside a small one: only what it reads and writes grows.
        size = self.config.cell_size
        return self.grown(_CELL_AXES, {"cell state": (size,), "cell gates": (3 * size,)})

    def cost(self) -> FastEagleCost:
        return _cost(self.config)


def model_of(config: FastEagleConfig) -> FastEagleModel | CellModel:
    """The draft model of a cascade, which is another with a cell."""
    return CellModel(config) if config.cell_size else FastEagleModel(config)


def _cost(config: FastEagleConfig) -> FastEagleCost:
    block = config.block
    return FastEagleCost(
        layers=block.layers,
        vocabulary=config.draft_vocabulary,
        heads=block.heads,
        kv_heads=block.kv_heads,
        intermediate=block.intermediate,
        cell=config.cell_size,
        shortlist=config.cell_shortlist,
    )
