"""A draft model: a drafter of one kind and certain sizes, as a bundle's builder and its eager reference ask for it.

A ``DraftModel`` says what the network is and makes its module and its steps; it is read from a checkpoint, or from a
bundle's manifest. An ``OpenedDrafter`` has the checkpoint beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from draftwood import manifest as m
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.device.table import DraftCost
from draftwood.compiler.drafters.widening import Widening
from draftwood.compiler.steps.step import Step, StepSizes
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.decoder import Decoder
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# Of a quantised layer: the whole numbers, and the scales beside them.
_INT8 = {"": torch.int8, "_scale": torch.float32}

Trees = Iterable[tuple[str, Topology | Budget]]
# The teacher and the drafter's network; the latter may be missing from a bundle.
Modules = tuple[Decoder, nn.Module | None]


class Lengths(NamedTuple):
    """KV lengths of draft and extend steps, and by how many rows a step extends; 0 means any, the form of a CPU."""

    slots: tuple[int, ...]
    chunks: tuple[int, ...]


ANY_LENGTH = Lengths((0,), (0,))


class DraftModel(ABC):
    """A drafter, its weights aside; equal ones have equal graphs."""

    # The name of its kind.
    kind: ClassVar[str]
    # Whether candidates depend on the nodes above them: then it can choose a tree's shape while growing it.
    follows_nodes: ClassVar[bool] = False
    # Its sizes, a dataclass that goes into the manifest.
    config: Any

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The teacher's layers whose entering states it reads; none where it reads the state behind the last norm."""
        return ()

    @property
    def quantised(self) -> tuple[str, ...]:
        """Its linear layers that are W8A8, by their names in the network."""
        return getattr(self.config, "quantised", ())

    def in_int8(self, layers: tuple[str, ...]) -> Self:
        """The same with these linear layers in W8A8."""
        return replace(self, config=replace(self.config, quantised=layers))  # type: ignore[type-var]

    def rows_read(self, path_rows: int) -> int:
        """Rows of the accepted path whose features a draft reads, the last of at most ``path_rows``."""
        return path_rows

    @abstractmethod
    def module(self, teacher: TeacherConfig, positions: int) -> nn.Module:
        """The network without values, on the device of the context; its parameter names are those in the bundle."""

    @abstractmethod
    def check_tree(self, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
        """Raises TreeError where it cannot draft a tree of a kind of trees that its kind can."""

    @abstractmethod
    def draft_name(self, tree: str) -> str:
        """Name of the draft graph of a tree, its KV length aside; alike for all trees where one graph serves all."""

    @abstractmethod
    def steps(self, modules: Modules, trees: Trees, sizes: StepSizes, lengths: Lengths) -> list[Step]:
        """Draft and extend steps of all trees, at all lengths; ``modules`` are the teacher and ``module``'s.

        A step's module holds the network as ``drafter``, and a `TeacherEnds` of the teacher's matrices that it reads as
        ``teacher``: by these names the weights are found in the bundle.
        """

    @abstractmethod
    def manifest(self, digest: str, teacher: TeacherConfig, trees: Trees) -> m.Drafter:
        """What the manifest says of it: all that a runtime needs to know of the kind."""

    def shared(self, ranks: int) -> Self:
        """What one of ``ranks`` devices runs of it; a kind without blocks of its own is the same everywhere.

        Raises:
            RequestError: it cannot be split.
        """
        return self

    def block(self, teacher: TeacherConfig) -> TeacherConfig:
        """The sizes of its decoder blocks; the teacher's where it has none."""
        return teacher

    def widening(self) -> Widening | None:
        """How it grows with a teacher that is made larger; None where nobody has said."""
        return None

    def cost(self) -> DraftCost | None:
        """What a draft costs on a device that is not here; None where nobody has said."""
        return None


class DrafterCheckpoint(Protocol):
    """A drafter's file of tensors, by our names and by its own keys."""

    @property
    def dtype(self) -> torch.dtype: ...

    def names(self) -> list[str]:
        """Our names: the parameters of the network."""

    def keys(self, name: str) -> tuple[str, ...]:
        """The file's keys of the tensors that make a weight; none where it is made of the teacher's."""

    def weight(self, name: str) -> Tensor:
        """A weight under our name, as stored."""

    def stored(self, key: str) -> Tensor:
        """A tensor under its key in the file."""

    def buffers(self, positions: int) -> dict[str, Tensor]:
        """The network's buffers under our names, tables of positions as long as asked for."""

    def maps(self) -> dict[str, Tensor]:
        """Tensors of whole numbers that stand beside the weights, by their keys in the file."""

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
