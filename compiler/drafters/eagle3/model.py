"""EAGLE-3 as a drafter: run once a level of the tree; every tree has a draft step of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.device.operators import Op, copy, elementwise, matmul, products, ranking
from draftwood.compiler.device.steps import HEAD, layer_ops
from draftwood.compiler.device.table import DraftCost
from draftwood.compiler.drafters.common.checkpoint import Parts
from draftwood.compiler.drafters.common.model import CachedModel
from draftwood.compiler.drafters.common.ranked import check_rank
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.eagle3.checkpoint import UNUSED, eagle3_parts, read_eagle3_config
from draftwood.compiler.drafters.eagle3.export import specforge, speculators
from draftwood.compiler.drafters.eagle3.layouts import OTHERS, WRITERS, Spelling, read_writer
from draftwood.compiler.drafters.eagle3.network import Eagle3, Eagle3Config
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Cost(DraftCost):
    """As many passes, one after the other, as levels; `vocabulary` is the draft head's.

    The first pass takes the accepted rows through the feature projection; every further one expands the best
    `width` nodes of a level. (The reference implementation's depth counts the passes after the first.)
    """

    kind: ClassVar[str] = "eagle3"
    vocabulary: int
    layers: int = 1
    states: int = 3
    levels: int = 8
    widths: tuple[int, ...] = (1, 4, 8, 16)

    def drafts(self, config: TeacherConfig, slots: int) -> Iterator[tuple[int, int, list[Op]]]:
        H = config.hidden
        for width in self.widths:
            first = [
                matmul("features", self.levels + 1, self.states * H, H),
                *self._pass(config, self.levels + 1, 1, slots),
            ]
            for depth in range(1, self.levels + 1):
                yield depth, width, [*first, *(depth - 1) * self._pass(config, width, width, slots)]

    def _pass(self, config: TeacherConfig, rows: int, scored: int, slots: int) -> list[Op]:
        H, V = config.hidden, self.vocabulary
        return [
            copy("embedding", rows * H),
            *layer_ops(config, rows, slots, wide=2, flat=True),
            *(self.layers - 1) * layer_ops(config, rows, slots, flat=True),
            elementwise("last norm", scored * H, 4),
            *products("head", scored, H, V, HEAD in config.quantised),
            *ranking(scored, V),
        ]


@dataclass(frozen=True)
class Eagle3Model(CachedModel):
    """One block or several, run once a level."""

    kind: ClassVar[str] = "eagle3"
    called: ClassVar[str] = "EAGLE-3"
    unused: ClassVar[tuple[str, ...]] = UNUSED
    layouts = {"speculators": speculators, "specforge": specforge}  # noqa: RUF012 (declared by DraftModel)
    training: ClassVar[str | None] = "draftwood.compiler.drafters.eagle3.training"
    follows_nodes: ClassVar[bool] = True
    config: Eagle3Config

    @classmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        # Unsupported architectures are recognised here, and refused later by name.
        return fields.get("architectures") in [[name] for name in (*WRITERS, *OTHERS)]

    @classmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[Eagle3Config, Vocabulary, Parts]:
        config, vocabulary = read_eagle3_config(fields, read_writer(fields), teacher, stored)
        return config, vocabulary, eagle3_parts(config, vocabulary, Spelling.of(stored))

    @classmethod
    def cost_of(cls, sizes: Sequence[str], teacher: TeacherConfig) -> Eagle3Cost | None:
        match [int(size) for size in sizes if size.isdecimal() and int(size)]:
            case [] | [_] as found if len(found) == len(sizes):
                return Eagle3Cost(vocabulary=(*found, teacher.vocabulary)[0])
        return None

    def module(self, teacher: TeacherConfig, positions: int) -> Eagle3:
        return Eagle3(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_rank(name, tree, self.config.draft_vocabulary)
        if self.config.window is not None and tree.depth >= self.config.window:
            raise TreeError(
                f"tree {name}: {tree.depth} levels deep; expected less than the drafter's window of"
                f" {self.config.window}; choose a shallower tree"
            )

    def cost(self) -> Eagle3Cost:
        config = self.config
        return Eagle3Cost(vocabulary=config.draft_vocabulary, layers=config.block.layers, states=len(config.aux_layers))
