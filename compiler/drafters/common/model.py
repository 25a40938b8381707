"""A draft model with a cache of accepted text, which reads states inside the teacher."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self, cast

from draftwood import manifest as m
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.layers import CachedNetwork
from draftwood.compiler.drafters.common.levels import level_step
from draftwood.compiler.drafters.common.ranked import candidates, check_levels
from draftwood.compiler.drafters.common.steps import extend_step
from draftwood.compiler.drafters.common.tree_step import grown, tree_step
from draftwood.compiler.drafters.model import DraftModel, Lengths, Modules, Trees
from draftwood.compiler.drafters.widening import LLAMA_AXES, Axes, Widening, size_fields
from draftwood.compiler.ranks.share import shared_config
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# What these drafters have beside a Llama's tensors.
_AXES: Axes = {
    **LLAMA_AXES,
    "lm_head.weight": ("draft vocabulary", "hidden"),
    "fc.weight": ("hidden", "states"),
    "input_norm.weight": ("states",),
}


@dataclass(frozen=True)
class CachedModel(DraftModel):
    """What all of them share; a kind adds its draft steps."""

    config: CachedConfig

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    def shared(self, ranks: int) -> Self:
        return replace(self, config=replace(self.config, block=shared_config(self.config.block, ranks)))

    def in_int8(self, layers: tuple[str, ...]) -> Self:
        own = self.config.tied_head and "draft_head" not in layers
        return replace(self, config=replace(self.config, quantised=layers, tied_head=own))

    def block(self, teacher: TeacherConfig) -> TeacherConfig:
        return self.config.block

    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        decoder, drafter = modules[0], cast(CachedNetwork, modules[1])
        found = []
        for slots in lengths.slots:
            found += [extend_step(drafter, decoder, rows, slots, sizes.dtype) for rows in lengths.chunks]
            # Where any KV length will do, so will any number of rows.
            found += self.draft_steps(drafter, decoder, trees, sizes.path_rows if slots else 0, slots, sizes.dtype)
        return found

    @abstractmethod
    def draft_steps(
        self, drafter: Any, decoder: Decoder, trees: Trees, rows: int, slots: int, dtype: str
    ) -> Iterable[Step]:
        """The draft steps of all trees behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""

    def entry(self, digest: str, levels: int, candidates: int) -> m.Drafter:
        """What the manifest says of it, with what the kind knows of levels and candidates."""
        config, block = self.config, self.config.block
        return m.Drafter(
            kind=self.kind,
            digest=digest,
            levels=levels,
            candidates=candidates,
            features=config.features,
            layers=block.layers,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            config=asdict(config),
        )

    def grown(self, own: Axes, parts: Mapping[str, tuple[str | int, ...]] | None = None) -> Widening:
        """The widening with the axes of a kind's own tensors, and what lies along those that it alone has.

        Every hidden state that a matrix reads beside others is padded in its own place.
        """
        states = len(self.config.aux_layers)
        return Widening(
            axes={**_AXES, **{f"fc_norm.{i}.weight": ("hidden",) for i in range(states)}, **own},
            fields=self.widened_fields,
            block=self.config.block,
            parts={
                "draft vocabulary": (self.config.draft_vocabulary,),
                "pair": ("hidden", "hidden"),
                "states": ("hidden",) * states,
                **(parts or {}),
            },
        )

    def widened_fields(self, fields: dict[str, Any], wide: TeacherConfig) -> dict[str, Any]:
        """config.json of the drafter with a block ``wide``, the ids of the teacher's states written out: the usual
        ones depend on the teacher's number of layers, and new layers come last."""
        aux = {"target_hidden_size": wide.hidden, "aux_layer_ids": list(self.config.aux_layers)}
        return fields | size_fields(wide, fields) | aux


class LevelModel(CachedModel):
    """A drafter whose candidates depend on the text alone: one draft step ranks all levels and serves all trees."""

    @property
    @abstractmethod
    def levels(self) -> int:
        """How many tokens ahead it drafts."""

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_levels(name, tree, self.levels, "levels", self.config.draft_vocabulary)

    def draft_name(self, tree: str) -> str:
        return "draft"

    def draft_steps(
        self, drafter: Any, decoder: Decoder, trees: Trees, rows: int, slots: int, dtype: str
    ) -> Iterable[Step]:
        ranked = candidates(trees, self.config.draft_vocabulary)
        yield level_step(drafter, decoder, self.levels, ranked, rows, slots, dtype)

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        return self.entry(digest, self.levels, candidates(trees, self.config.draft_vocabulary))


class TreeModel(CachedModel):
    """A drafter whose candidates depend on the nodes above them: every tree has a draft step of its own."""

    follows_nodes: ClassVar[bool] = True

    def draft_name(self, tree: str) -> str:
        return f"draft-{tree}"

    def draft_steps(
        self, drafter: Any, decoder: Decoder, trees: Trees, rows: int, slots: int, dtype: str
    ) -> Iterable[Step]:
        for name, tree in trees:
            if tree.nodes:
                yield tree_step(drafter, decoder, self.draft_name(name), grown(tree), rows, slots, dtype)

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        depths, widths = zip(*((tree.depth, tree.width) for _, tree in trees), strict=True)
        return self.entry(digest, max(depths), max(widths))
