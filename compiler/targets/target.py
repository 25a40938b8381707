"""A target turns a bundle's steps into graphs that one kind of engine runs.

A target is one file: the class below with its own answers, listed where bundles are written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from draftwood import manifest as m
from draftwood.compiler.checkpoints.safetensors_file import Entry
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.drafters.model import DraftModel, Modules
from draftwood.compiler.ranks.share import Share
from draftwood.compiler.ranks.weights import rank_entries
from draftwood.compiler.targets.modules import make_modules
from draftwood.compiler.targets.steps import Shapes
from draftwood.compiler.targets.storage import Storage
from draftwood.compiler.teachers.config import TeacherConfig

# Weights are written into the bundle, or read from the checkpoint's own files if they have the needed form there, or
# left out, to be bound later.
WeightMode = Literal["copy", "link", "none"]
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """A request to a target."""

    # The bundle, to be written into.
    folder: Path
    shapes: Shapes
    config: TeacherConfig
    drafter: DraftModel | None
    # Every weight, as the precision stores it.
    weights: tuple[WeightEntry, ...]
    precision: Storage
    mode: WeightMode
    # The places of the teacher's tensors in its files, by published name.
    files: Mapping[str, Entry]
    # On how many devices an NPU's graphs run together.
    ranks: int
    progress: Progress

    def modules(self) -> Modules:
        """Teacher and drafter without values, as a rank runs them, on the device of the context."""
        return make_modules(self.config, self.drafter, max(self.shapes.slots), self.ranks)

    def rank_weights(self, rank: int) -> list[WeightEntry]:
        """Every weight, as the precision stores it, of one rank."""
        block = self.drafter.block(self.config) if self.drafter else self.config
        return rank_entries(self.weights, self.config, block, Share(rank, self.ranks))


class Target(ABC):
    """One kind of graph."""

    # Its name in ``--target`` and in the manifest.
    name: ClassVar[str]
    # The ways in which it can store weights.
    modes: ClassVar[tuple[WeightMode, ...]]
    # Whether its graphs can run on several devices together.
    splits: ClassVar[bool] = False

    @abstractmethod
    def check_installed(self) -> None:
        """Raises ModuleNotFoundError if a package is missing that its graphs are made with."""

    @abstractmethod
    def precision(self, config: TeacherConfig) -> Storage:
        """The default storage for a teacher."""

    @abstractmethod
    def check(self, precision: Storage) -> None:
        """Raises RequestError if it cannot compute in this precision."""

    @abstractmethod
    def lower(self, lowering: Lowering) -> tuple[m.GraphSet, ...]:
        """Writes its graphs and their weights into the bundle, and returns them rank by rank."""
