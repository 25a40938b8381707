"""A drafter: its class is a kind, an instance is that kind with certain sizes.

The class recognises and opens checkpoints, trains, and writes other engines' layouts. An instance, read from a
checkpoint or from a bundle's manifest, makes the network's module and steps. An
``OpenedDrafter`` is an instance with its weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import msgspec
import torch
from torch import Tensor, nn

from draftwood import manifest as m
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.errors import RequestError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

if TYPE_CHECKING:
    from draftwood.compiler.training.student import Student
    from draftwood.compiler.training.teacher import FrozenTeacher

# The tensors of a quantised layer: whole numbers, and their scales.
_INT8 = {"": torch.int8, "_scale": torch.float32}

Trees = Iterable[tuple[str, Topology | Budget]]
# The teacher and the drafter's network; the latter may be missing from a bundle.
Modules = tuple[Decoder, nn.Module | None]


class Lengths(NamedTuple):
    """KV lengths of draft and extend steps, and the rows by which a step extends. 0 means any, the form of a CPU."""

    slots: tuple[int, ...]
    chunks: tuple[int, ...]


ANY_LENGTH = Lengths((0,), (0,))


class DrafterFolder(NamedTuple):
    """The contents of a drafter's folder: config.json, and a file of tensors by key."""

    fields: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"


class DraftModel(ABC):
    """A drafter of one kind, its weights aside; equal ones have equal graphs."""

    # The name of its kind, and the name of such drafters in errors.
    kind: ClassVar[str]
    called: ClassVar[str]
    # The file that we write its tensors to.
    weights_file: ClassVar[str] = "model.safetensors"
    # The module of its students, with ``begin`` and ``read_back``; None if such drafters cannot be trained here.
    training: ClassVar[str | None] = None
    # The field of config.json that describes the network without its tensors; None if they decide.
    described_by: ClassVar[str | None] = None
    # Whether candidates depend on the nodes above them: then it can choose a tree's shape while growing it.
    follows_nodes: ClassVar[bool] = False
    # Other engines' layouts: each writes a folder of the drafter's checkpoint, its teacher, and what that is called.
    layouts: ClassVar[Mapping[str, Callable[[Any, Checkpoint, str], DrafterFolder]]] = {}
    # Its sizes, a dataclass that goes into the manifest.
    config: Any

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path, fields: Mapping[str, Any]) -> bool:
        """Whether ``path`` holds such a drafter; ``fields`` are those of the config.json there, if any."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        """Opens a folder or file; CheckpointError if it does not fit the teacher."""

    @classmethod
    def describe(cls, path: Path, teacher: Checkpoint) -> OpenedDrafter:
        """The drafter of a folder's config.json, its weights unread and maybe absent; asked only of a kind with
        ``described_by``. If they are there, they decide as in ``open``."""
        raise NotImplementedError(cls.kind)

    @classmethod
    def of_manifest(cls, config: Mapping[str, Any]) -> Self:
        """The drafter whose sizes a manifest gives; msgspec.ValidationError if they are no such sizes."""
        return msgspec.convert({"config": config}, cls)

    @classmethod
    def student(cls, teacher: FrozenTeacher, options: Mapping[str, Any], ids_V: Tensor | None) -> Student:
        """A drafter to be trained; options are complete, ``ids_V`` are the teacher's ids that it may propose."""
        student: Student = cls._training().begin(teacher, options, ids_V)
        return student

    @classmethod
    def trained(cls, folder: Path, teacher: FrozenTeacher, levels: int | None) -> tuple[Student, dict[str, Tensor]]:
        """A student as large as the drafter of a folder, and its values by name.

        ``levels`` is the number of levels to draft if the drafter does not say it.

        Raises:
            CheckpointError: the folder holds no drafter of this teacher, or one with a part that no student has.
        """
        training = cls._training()  # refuses kinds without one before a file is read
        checkpoint = cls.open(folder, teacher.checkpoint).checkpoint
        student: tuple[Student, dict[str, Tensor]] = training.read_back(checkpoint, teacher, levels)
        return student

    @classmethod
    def _training(cls) -> ModuleType:
        if cls.training is None:
            raise RequestError(
                f"{cls.kind}: such drafters cannot be trained here, nor read back; to count one, build a bundle"
                " with it and calibrate that"
            )
        return import_module(cls.training)

    @classmethod
    def exported(cls, checkpoint: Any, teacher: Checkpoint, layout: str, verifier: str) -> DrafterFolder:
        """A drafter, by its ``checkpoint``, in another engine's ``layout``.

        If the layout names its teacher, that is ``verifier``.

        Raises:
            RequestError: no engine serves such drafters, or the layout has no form for a part of this one.
        """
        if not cls.layouts:
            raise RequestError(f"{layout}: no other engine serves {cls.kind} drafters, so no layout of them is written")
        if layout not in cls.layouts:
            known = " or ".join(cls.layouts)
            raise RequestError(f"{layout}: no layout of {cls.called} that is written; expected {known}")
        cls.check_layout(checkpoint, layout)
        return cls.layouts[layout](checkpoint, teacher, verifier)

    @classmethod
    def check_layout(cls, checkpoint: Any, layout: str) -> None:
        """Raises RequestError if the readers of a layout would take another network for the drafter."""
        return

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose entering states it reads; empty if it reads the state after the last norm."""
        return ()

    @property
    def quantised(self) -> tuple[str, ...]:
        """Its linear layers that are W8A8, by their names in the network."""
        return getattr(self.config, "quantised", ())

    def in_int8(self, layers: tuple[str, ...]) -> Self:
        """The drafter with these linear layers in W8A8."""
        return replace(self, config=replace(self.config, quantised=layers))  # type: ignore[type-var]

    def rows_read(self, path_rows: int) -> int:
        """Rows of the accepted path whose features a draft reads, the last of at most ``path_rows``."""
        return path_rows

    @abstractmethod
    def module(self, teacher: TeacherConfig, positions: int) -> nn.Module:
        """The network without values, on the device of the context; its parameter names are those in the bundle."""

    @abstractmethod
    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        """Raises TreeError if it cannot draft a tree of a kind of trees that its kind can."""

    @abstractmethod
    def draft_name(self, tree: str) -> str:
        """Name of the draft graph of a tree, its KV length aside; alike for all trees if one graph serves all."""

    @abstractmethod
    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        """Draft and extend steps of all trees, at all lengths; ``modules`` are the teacher and ``module``'s.

        A step's module holds the network as ``drafter`` and, as ``teacher``, a `TeacherEnds` of the teacher's matrices
        that it reads. The bundle's weights have these names.
        """

    @abstractmethod
    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        """Its entry in the manifest: everything that a runtime needs to know of it."""

    def shared(self, ranks: int) -> Self:
        """The part of it that one of ``ranks`` devices runs; a kind without blocks of its own is the same everywhere.

        Raises:
            RequestError: it cannot be split.
        """
        return self

    def block(self, teacher: TeacherConfig) -> TeacherConfig:
        """The sizes of its decoder blocks; the teacher's if it has none."""
        return teacher


class DrafterCheckpoint(Protocol):
    """A drafter's file of tensors, by our names and by its own keys."""

    @property
    def dtype(self) -> torch.dtype: ...

    def names(self) -> list[str]:
        """Our names: the parameters of the network."""

    def keys(self, name: str) -> tuple[str, ...]:
        """The file's keys of the tensors that make a weight; none if it is made of the teacher's."""

    def weight(self, name: str) -> Tensor:
        """A weight under our name, as stored."""

    def stored(self, key: str) -> Tensor:
        """A tensor under its key in the file."""

    def buffers(self, positions: int) -> dict[str, Tensor]:
        """The network's buffers under our names, tables of positions as long as asked for."""

    def maps(self) -> dict[str, Tensor]:
        """Tensors of whole numbers besides the weights, by their keys in the file."""

    def digest(self) -> str:
        """SHA-256, in hex, over its files."""


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    """A draft model with a checkpoint that fits it and its teacher."""

    model: DraftModel
    checkpoint: DrafterCheckpoint

    def digest(self) -> str:
        """SHA-256, in hex, over its files."""
        return self.checkpoint.digest()

    def weights(self, shapes: Mapping[str, tuple[int, ...]], positions: int) -> list[WeightEntry]:
        """Weights and buffers of the network, whose ``shapes`` are given by name."""
        opened = self.checkpoint
        # The keys of two checkpoints may be alike, so these say whose they are.
        parts = {name: tuple(f"drafter:{key}" for key in opened.keys(name)) for name in opened.names()}
        kinds = {f"{layer}.weight{part}": kind for layer in self.model.quantised for part, kind in _INT8.items()}
        entries = [
            WeightEntry(n, shapes[n], partial(opened.weight, n), () if n in kinds else parts[n], kinds.get(n))
            for n in opened.names()
        ]
        for name, value in opened.buffers(positions).items():
            kind = None if value.is_floating_point() else value.dtype
            entries.append(WeightEntry(name, tuple(value.shape), value.clone, dtype=kind))
        return entries
