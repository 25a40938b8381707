"""A teacher's files in any format, as a protocol; `draftwood.compiler.teachers.formats` lists the formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.safetensors_file import Entry
from draftwood.compiler.checkpoints.weight import Shape, WeightParts
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.manifest import UsualSampling


class WholeMatrix(Protocol):
    """A matrix [out, in] that is stored as whole numbers of ``bits``, in ``groups`` of inputs."""

    @property
    def title(self) -> str:
        """How people call the form."""

    @property
    def module(self) -> str:
        """The published name of its layer."""

    @property
    def shape(self) -> Shape: ...

    @property
    def bits(self) -> int: ...

    @property
    def groups(self) -> int: ...

    @property
    def middle(self) -> bool:
        """Whether its zeros are known to be the middle before they are read."""

    @property
    def minimum(self) -> bool:
        """Whether groups have a number that is added to all of theirs."""

    @property
    def rounds(self) -> bool:
        """Whether the whole numbers are rounded, and so differ from the file's numbers."""


class Reader(Protocol):
    """A teacher's files, opened and checked. Tensors have transformers' names and layout, for any format. One tensor at
    a time is in memory."""

    @classmethod
    def reads(cls, path: Path) -> bool:
        """Whether a path names files of this format; CheckpointError if it names too many or too few of them."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """The teacher with the header of every file of tensors; CheckpointError if they do not fit."""

    @classmethod
    def describe(cls, path: Path) -> Self:
        """The teacher by its description alone if that is a file apart, else as ``open``; CheckpointError if it does
        not fit."""

    @classmethod
    def has_tokenizer(cls, path: Path) -> bool:
        """Whether there is a tokenizer, which may still be one that has no form here."""

    @classmethod
    def write_tokenizer(cls, path: Path, folder: Path) -> bool:
        """Writes the tokenizer's files into a folder that is there; False if there is no tokenizer.

        Raises:
            CheckpointError: the tokenizer has no form here, or a file cannot be read.
        """

    @classmethod
    def usual_sampling(cls, path: Path) -> UsualSampling:
        """How the authors sample from it; CheckpointError if a value is outside its range."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> TeacherConfig:
        """The configuration; ``dtype`` is the type that ``tensor`` returns, not the description's."""

    @property
    def parts(self) -> Mapping[str, WeightParts]:
        """Our weight names, in the order of the forward pass, and the tensors that make each."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All that is stored; nothing if the files are a description alone."""

    @property
    def packed(self) -> Mapping[str, WholeMatrix]:
        """Matrices of whole numbers, by the names of the tensors that they stand for."""

    @property
    def linkable(self) -> Mapping[str, Entry]:
        """Tensors whose bytes lie in a safetensors file as a bundle would hold them."""

    def tensor(self, name: str) -> Tensor:
        """The stored tensor; of a packed matrix its exact numbers, float32."""

    def grouped(self, name: str) -> Grouped:
        """The whole numbers of one of ``packed``."""

    def digest(self) -> str:
        """SHA-256, in hex, over all that the teacher's numbers follow from."""

    def description(self) -> dict[str, Any]:
        """config.json, as transformers has it."""

    def copy_texts(self, folder: Path) -> None:
        """Writes the tokenizer, and other published files that are no weights, into a folder."""
