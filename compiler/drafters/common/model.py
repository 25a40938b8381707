"""A drafter with a cache of accepted text, which reads states inside the teacher."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Self, cast

from draftwood import manifest as m
from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.tensors import open_stored
from draftwood.compiler.drafters.common.checkpoint import CachedCheckpoint, Parts, fitting_checkpoint
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.export import check_agreed
from draftwood.compiler.drafters.common.layers import CachedNetwork
from draftwood.compiler.drafters.common.ranked import candidates, check_levels
from draftwood.compiler.drafters.common.steps import NewRows, extend_step, level_step, tree_step
from draftwood.compiler.drafters.common.trees import grown
from draftwood.compiler.drafters.common.vocabulary import Vocabulary
from draftwood.compiler.drafters.model import DraftModel, Lengths, Modules, OpenedDrafter, Trees
from draftwood.compiler.ranks.share import shared_config
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.trees import Topology
from draftwood.trees.spec import Budget


@dataclass(frozen=True)
class CachedModel(DraftModel):
    """The base class of drafters with caches.

    If candidates depend on the nodes above them (``follows_nodes``), every tree has its own draft step. Otherwise they
    depend on the text alone, and one draft step ranks all levels and serves all trees.
    """

    # Ends of the keys of tensors that are not read.
    unused: ClassVar[tuple[str, ...]] = ()
    config: CachedConfig

    @classmethod
    @abstractmethod
    def read(
        cls, fields: Fields, teacher: TeacherConfig, stored: Collection[str]
    ) -> tuple[CachedConfig, Vocabulary, Parts]:
        """The network that config.json and the keys of the ``stored`` tensors describe, its vocabulary, its weights.

        Raises:
            CheckpointError: a field does not fit the teacher, contradicts another, or leaves open what is meant.
        """

    @classmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        """Opens a folder with config.json and model.safetensors, shards or pytorch_model.bin, or such a file in it.

        Raises:
            CheckpointError: a file is missing, damaged or holds more than tensors. Or a field, a key, a shape, a dtype
                or the vocabulary map does not fit the teacher or is ambiguous.
        """
        stored = open_stored(path, cls.called)
        stored = stored._replace(entries={k: e for k, e in stored.entries.items() if not k.endswith(cls.unused)})
        fields = Fields(stored.folder / "config.json", read_json(stored.folder / "config.json"))
        config, vocabulary, parts = cls.read(fields, teacher.config, stored.entries)
        opened = fitting_checkpoint(fields.path, config, teacher, parts, stored, vocabulary)
        return OpenedDrafter(cls(config), opened)

    @classmethod
    def check_layout(cls, checkpoint: CachedCheckpoint[CachedConfig], layout: str) -> None:
        check_agreed(layout, checkpoint.config)

    @property
    def levels(self) -> int:
        """How many tokens ahead one pass drafts; asked only of drafters that make all levels in one."""
        raise NotImplementedError(self.kind)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    def shared(self, ranks: int) -> Self:
        return replace(self, config=replace(self.config, block=shared_config(self.config.block, ranks)))

    def in_int8(self, layers: tuple[str, ...]) -> Self:
        tied = self.config.tied_head and "draft_head" not in layers
        return replace(self, config=replace(self.config, quantised=layers, tied_head=tied))

    def block(self, teacher: TeacherConfig) -> TeacherConfig:
        return self.config.block

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        check_levels(name, tree, self.levels, "levels", self.config.draft_vocabulary)

    def draft_name(self, tree: str) -> str:
        return f"draft-{tree}" if self.follows_nodes else "draft"

    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        decoder, drafter = modules[0], cast(CachedNetwork, modules[1])
        steps = []
        for slots in lengths.slots:
            # A chunk as long as the cache never fits it.
            chunks = [rows for rows in lengths.chunks if rows < slots] or sorted(lengths.chunks)[:1]
            steps += [extend_step(drafter, decoder, NewRows(rows, slots, sizes.dtype)) for rows in chunks]
            # A step for any KV length is also for any number of rows.
            new_rows = NewRows(sizes.path_rows if slots else 0, slots, sizes.dtype)
            if self.follows_nodes:
                grows = [(self.draft_name(name), grown(tree)) for name, tree in trees if tree.nodes]
                steps += [tree_step(drafter, decoder, name, tree, new_rows) for name, tree in grows]
            else:
                steps.append(level_step(drafter, decoder, self.levels, self._candidates(trees), new_rows))
        return steps

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        config = self.config
        follows = self.follows_nodes
        return m.Drafter(
            kind=self.kind,
            digest=digest,
            levels=max(tree.depth for _, tree in trees) if follows else self.levels,
            candidates=max(tree.width for _, tree in trees) if follows else self._candidates(trees),
            features=config.features,
            buffers=config.buffers,
            config=asdict(config),
        )

    def _candidates(self, trees: Trees) -> int:
        return candidates(trees, self.config.draft_vocabulary)
