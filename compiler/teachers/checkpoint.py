"""A teacher's checkpoint in any supported format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.safetensors_file import Entry
from draftwood.compiler.checkpoints.weight import WeightParts, shapes_of
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.compiler.teachers.formats import format_of
from draftwood.compiler.teachers.reader import Reader, WholeMatrix
from draftwood.compiler.teachers.registry import family_of


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A teacher whose files have passed the checks of ``open``; tensors are read when asked for.

    ``config`` and ``parts`` are those of the reader, or of the same numbers in another precision.
    """

    reader: Reader
    config: TeacherConfig
    # Our weight names, in the order of the forward pass, and the tensors that make each.
    parts: Mapping[str, WeightParts]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads a description and the header of every file of tensors, and checks names, shapes and dtypes.

        Args:
            path: a Hugging Face folder with safetensors, a GGUF file (any part of a split one), or a folder with one.

        Raises:
            CheckpointError: the description is unsupported, or a file is missing or damaged. Or a tensor is missing,
                unexpected, of another shape or of an unsupported type.
        """
        return cls._of(format_of(path).open(path))

    @classmethod
    def describe(cls, path: Path) -> Checkpoint:
        """The teacher that config.json describes, its weights unread and maybe absent; has no tensors.

        In a packed one all linear layers count as packed, except the output matrix and a mixture's router. A GGUF file
        describes itself and has its tensors.
        """
        return cls._of(format_of(path).describe(path))

    @classmethod
    def _of(cls, reader: Reader) -> Checkpoint:
        return cls(reader, reader.config, reader.parts)

    @property
    def path(self) -> Path:
        """The folder or file that it was opened by."""
        return self.reader.path

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All that is stored, by the names of transformers."""
        return self.reader.entries

    @property
    def packed(self) -> Mapping[str, WholeMatrix]:
        """Matrices of whole numbers, by the names of the tensors that they stand for."""
        return self.reader.packed

    @property
    def dtype(self) -> torch.dtype:
        """Element type of every tensor."""
        return cast(torch.dtype, getattr(torch, self.config.dtype))

    def names(self) -> list[str]:
        """Our weight names, in the order of the forward pass."""
        return list(self.parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor under its Hugging Face name."""
        return self.packed[name].shape if name in self.packed else self.entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """The stored tensor of a Hugging Face name; of a packed matrix its exact numbers, float32."""
        return self.reader.tensor(name)

    def grouped(self, name: str) -> Grouped:
        """The whole numbers of a packed matrix, under its Hugging Face name."""
        return self.reader.grouped(name)

    def weight(self, name: str) -> Tensor:
        """A weight under our name, made of its parts; linear weights are [out, in], int8 [in, out] if quantised."""
        return self.parts[name].read(self.tensor)

    def matrix(self, name: str) -> Tensor:
        """A matrix [out, in] of numbers, whether its layer is quantised or not."""
        if self.parts[name].dtype is None:
            return self.weight(name)
        return self.weight(name).t().float() * self.weight(f"{name}_scale")[:, None]

    def digest(self) -> str:
        """SHA-256, in hex, over the description and every file of tensors."""
        return self.reader.digest()


def expected_tensors(config: TeacherConfig) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor of a teacher."""
    return shapes_of(family_of(config).parts(config))
