"""The three kinds of drafter behind one face: what a bundle's builder and its eager reference ask of a drafter.

A ``Drafter`` says what the network is and makes its module and its steps; it is read from a checkpoint, or from a
bundle's manifest. An ``OpenedDrafter`` has the weights beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
from torch import nn

from draftwood import manifest as m
from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.common.checkpoint import DrafterCheckpoint
from draftwood.compiler.drafters.common.config import DrafterConfig, Eagle3Config
from draftwood.compiler.drafters.eagle3.budget_tree import BudgetTree
from draftwood.compiler.drafters.eagle3.checkpoint import open_eagle3
from draftwood.compiler.drafters.eagle3.fixed_tree import FixedTree
from draftwood.compiler.drafters.eagle3.network import Eagle3
from draftwood.compiler.drafters.fasteagle.checkpoint import open_fasteagle
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.drafters.medusa.checkpoint import MEDUSA_FILES, MedusaCheckpoint
from draftwood.compiler.drafters.medusa.network import MedusaHeads
from draftwood.compiler.drafters.steps import extend_step, fasteagle_step, medusa_step, tree_step
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import CheckpointError, TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# A draft step that ranks a level's candidates ranks at least this many, so that a bundle can be calibrated for
# wider trees.
LEAST_CANDIDATES = 10

Trees = Iterable[tuple[str, Topology | Budget]]
# The teacher and the drafter's network; the latter may be missing from a bundle.
Modules = tuple[Decoder, nn.Module | None]


class Lengths(NamedTuple):
    """KV lengths of draft and extend steps, and by how many rows a step extends; 0 means any, the form of a CPU."""

    slots: tuple[int, ...]
    chunks: tuple[int, ...]


ANY_LENGTH = Lengths((0,), (0,))


class Drafter(ABC):
    """A kind of drafter with the sizes of one, its weights aside."""

    kind: ClassVar[m.DrafterKind]
    # Its sizes, a dataclass that goes into the manifest.
    config: Any

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose entering states it reads; none where it reads the state behind the last norm."""
        return ()

    @abstractmethod
    def module(self, teacher: TeacherConfig, positions: int) -> nn.Module:
        """The network without values, on the device of the context."""

    @abstractmethod
    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        """Raises TreeError where it cannot draft this tree."""

    @abstractmethod
    def draft_name(self, tree: str) -> str:
        """Name of the draft graph of a tree, its KV length aside."""

    @abstractmethod
    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        """Draft and extend steps of all trees, at all lengths; ``modules`` are the teacher and ``module``'s."""

    @abstractmethod
    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        """What the manifest says of it."""


@dataclass(frozen=True, slots=True)
class MedusaSizes:
    """Heads, residual blocks of each, and whether the teacher's output matrix serves them all."""

    heads: int
    blocks: int
    tied: bool


@dataclass(frozen=True)
class MedusaDrafter(Drafter):
    """Heads on the teacher's last hidden state."""

    kind: ClassVar[m.DrafterKind] = "medusa"
    config: MedusaSizes

    def module(self, teacher: TeacherConfig, positions: int) -> MedusaHeads:
        return MedusaHeads(teacher.hidden, teacher.vocabulary, *asdict(self.config).values())

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        _check_levels(name, tree, self.config.heads, "heads", teacher.vocabulary)

    def draft_name(self, tree: str) -> str:
        return "draft"

    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        decoder, heads = modules
        candidates = _candidates(trees, decoder.config.vocabulary)
        return [medusa_step(cast(MedusaHeads, heads), decoder, candidates, sizes.dtype)]

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        return m.Drafter(
            kind=self.kind,
            digest=digest,
            levels=self.config.heads,
            candidates=_candidates(trees, teacher.vocabulary),
            features=teacher.hidden,
            layers=0,
            kv_heads=0,
            head_dim=0,
            config=asdict(self.config),
        )


@dataclass(frozen=True)
class _CachedDrafter(Drafter):
    """What has a cache of accepted text and reads states inside the teacher."""

    config: DrafterConfig

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        decoder, drafter = modules[0], cast(Eagle3 | FastEagle, modules[1])
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

    def _manifest(self, digest: str, levels: int, candidates: int) -> m.Drafter:
        config, block = self.config, self.config.block
        return m.Drafter(
            kind=self.kind,
            digest=digest,
            levels=levels,
            candidates=candidates,
            features=len(config.aux_layers) * config.target_hidden,
            layers=block.layers,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            config=asdict(config),
        )


@dataclass(frozen=True)
class FastEagleDrafter(_CachedDrafter):
    """A cascade of blocks, one a level."""

    kind: ClassVar[m.DrafterKind] = "fasteagle"

    def module(self, teacher: TeacherConfig, positions: int) -> FastEagle:
        return FastEagle(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        _check_levels(name, tree, self.config.block.layers, "levels", self.config.draft_vocabulary)

    def draft_name(self, tree: str) -> str:
        return "draft"

    def draft_steps(
        self, drafter: Any, decoder: Decoder, trees: Trees, rows: int, slots: int, dtype: str
    ) -> Iterable[Step]:
        yield fasteagle_step(drafter, decoder, _candidates(trees, self.config.draft_vocabulary), rows, slots, dtype)

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        return self._manifest(digest, self.config.block.layers, _candidates(trees, self.config.draft_vocabulary))


@dataclass(frozen=True)
class Eagle3Drafter(_CachedDrafter):
    """One block, run once a level of the tree; every tree has a draft step of its own."""

    kind: ClassVar[m.DrafterKind] = "eagle3"
    config: Eagle3Config

    def module(self, teacher: TeacherConfig, positions: int) -> Eagle3:
        return Eagle3(self.config, positions)

    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        _check_rank(name, tree, self.config.draft_vocabulary)

    def draft_name(self, tree: str) -> str:
        return f"draft-{tree}"

    def draft_steps(
        self, drafter: Any, decoder: Decoder, trees: Trees, rows: int, slots: int, dtype: str
    ) -> Iterable[Step]:
        for name, tree in trees:
            if tree.nodes:
                yield tree_step(drafter, decoder, self.draft_name(name), _grown(tree), rows, slots, dtype)

    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        depths, widths = zip(*((tree.depth, tree.width) for _, tree in trees), strict=True)
        return self._manifest(digest, max(depths), max(widths))


def _grown(tree: Topology | Budget) -> FixedTree | BudgetTree:
    return BudgetTree(tree.nodes, tree.depth, tree.width) if isinstance(tree, Budget) else FixedTree(tree)


def _candidates(trees: Trees, vocabulary: int) -> int:
    return min(max(LEAST_CANDIDATES, *(tree.width for _, tree in trees)), vocabulary)


def _check_levels(name: str, tree: Topology | Budget, levels: int, what: str, vocabulary: int) -> None:
    if isinstance(tree, Budget):
        raise TreeError(
            f"tree {name}: a budget tree follows candidates that depend on the node above them; it needs an EAGLE-3"
            " drafter"
        )
    if tree.depth > levels:
        raise TreeError(
            f"tree {name}: {tree.depth} levels deep, but the drafter has {levels} {what}; choose a shallower tree"
        )
    _check_rank(name, tree, vocabulary)


def _check_rank(name: str, tree: Topology | Budget, vocabulary: int) -> None:
    if tree.width > vocabulary:
        raise TreeError(f"tree {name}: rank {tree.width - 1} is past the drafter's vocabulary of {vocabulary}")


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A drafter's checkpoint that fits its teacher."""

    drafter: Drafter
    checkpoint: MedusaCheckpoint | DrafterCheckpoint[Any]

    @classmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        """Opens a folder or file of any kind of drafter; CheckpointError where it is none or does not fit."""
        kind = _kind(path)
        if kind == "medusa":
            return cls._of_medusa(MedusaCheckpoint.open(path, teacher.config))
        if kind == "fasteagle":
            fast = open_fasteagle(path, teacher)
            return cls(FastEagleDrafter(fast.config), fast)
        opened = open_eagle3(path, teacher)
        return cls(Eagle3Drafter(opened.config), opened)

    @classmethod
    def describe(cls, path: Path) -> OpenedDrafter:
        """The drafter that config.json describes, its weights unread and maybe absent; Medusa's alone can be."""
        if "medusa_num_heads" not in read_json(path / "config.json"):
            raise CheckpointError(
                f"{path}: only Medusa heads are described by their config.json alone (medusa_num_heads); what network"
                " another drafter is, its tensors decide; give --weights copy or link"
            )
        return cls._of_medusa(MedusaCheckpoint.describe(path))

    @classmethod
    def _of_medusa(cls, heads: MedusaCheckpoint) -> OpenedDrafter:
        return cls(MedusaDrafter(MedusaSizes(heads.heads, heads.blocks, heads.tied)), heads)

    def digest(self) -> str:
        """SHA-256, in hex, over its files."""
        return self.checkpoint.digest()

    def weights(self, shapes: Mapping[str, tuple[int, ...]], positions: int) -> list[WeightEntry]:
        """Weights and buffers of the network, whose ``shapes`` are given by name."""
        opened = self.checkpoint
        if isinstance(opened, MedusaCheckpoint):
            keys: dict[str, tuple[str, ...]] = {name: (key,) for name, key in opened.keys.items()}
        else:
            keys = {name: tuple(key for key, _ in part) for name, part in opened.parts.items()}
        # The keys of two checkpoints may be alike, so these say whose they are.
        parts = {name: tuple(f"drafter:{key}" for key in found) for name, found in keys.items()}
        entries = [WeightEntry(n, shapes[n], partial(opened.weight, n), parts[n]) for n in opened.names()]
        if isinstance(opened, MedusaCheckpoint):
            return entries
        for name, value in opened.buffers(positions).items():
            kind = None if value.is_floating_point() else value.dtype
            entries.append(WeightEntry(name, tuple(value.shape), value.clone, dtype=kind))
        return entries


def drafter_of(entry: m.Drafter) -> Drafter:
    """The drafter that a manifest describes."""
    if entry.kind == "medusa":
        return MedusaDrafter(msgspec.convert(entry.config, MedusaSizes))
    if entry.kind == "fasteagle":
        return FastEagleDrafter(msgspec.convert(entry.config, DrafterConfig))
    return Eagle3Drafter(msgspec.convert(entry.config, Eagle3Config))


def _kind(path: Path) -> m.DrafterKind:
    folder = path if path.is_dir() else path.parent
    if path.name in MEDUSA_FILES or any((path / name).is_file() for name in MEDUSA_FILES):
        return "medusa"
    if (folder / "config.json").is_file():
        fields = read_json(folder / "config.json")
        if "medusa_num_heads" not in fields:
            return "fasteagle" if fields.get("architectures") == ["FastEagleDrafter"] else "eagle3"
    if path.is_file():
        return "medusa"
    raise CheckpointError(
        f"{path}: no drafter; expected a folder with {' or '.join(MEDUSA_FILES)}, or with the config.json and the"
        " tensors of an EAGLE-3 or a FastEagle drafter"
    )
