"""A teacher checkpoint on disk: what a Hugging Face folder must hold, and its tensors one at a time.

Only safetensors are read. Opening looks at headers alone, so a checkpoint larger than memory can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, check_kinds, read_tensor, sha256_of
from draftwood.compiler.checkpoints.scheme import DESCRIPTION
from draftwood.compiler.checkpoints.shards import check_names, folder_entries
from draftwood.compiler.checkpoints.weight import Parts, shapes_of
from draftwood.compiler.teachers.config import DType, TeacherConfig
from draftwood.compiler.teachers.quantised import check_quantised, quantised_parts
from draftwood.compiler.teachers.registry import family_of, read_config

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A teacher folder that has passed the checks of ``open``; tensors are read when asked for.

    ``config.dtype`` is the type of the stored weights, whatever config.json declares.
    """

    folder: Path
    config: TeacherConfig
    entries: Mapping[str, Entry]
    # Our weight names, in the order of the forward pass, and what makes each.
    parts: Mapping[str, Parts]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads config.json and the header of every shard, and checks names, shapes and dtypes.

        Raises:
            CheckpointError: the configuration is unsupported, a file is missing or damaged, or a tensor is
                missing, unexpected, of another shape, or of another dtype than the rest.
        """
        config = read_config(folder)
        family = family_of(config)
        parts = _parts(folder, config)
        stored = {name: entry for name, entry in folder_entries(folder).items() if not family.ignores(config, name)}
        check_names(folder, shapes_of(parts), stored)
        plain = check_quantised(parts, stored)
        dtype = cast(DType, str(DTYPES[check_kinds(plain)]).removeprefix("torch."))
        return cls(folder, replace(config, dtype=dtype), stored, parts)

    @classmethod
    def describe(cls, folder: Path) -> Checkpoint:
        """The teacher that config.json describes, its weights unread and maybe absent; has no tensors."""
        config = read_config(folder)
        return cls(folder, config, {}, _parts(folder, config))

    @property
    def dtype(self) -> torch.dtype:
        """Element type of every tensor."""
        return cast(torch.dtype, getattr(torch, self.config.dtype))

    def names(self) -> list[str]:
        """Our weight names, in the order of the forward pass."""
        return list(self.parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor under its Hugging Face name."""
        return self.entries[name].shape

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored, under its Hugging Face name."""
        return read_tensor(self.entries[name].file, name)

    def weight(self, name: str) -> Tensor:
        """A weight under our name, made of its parts; linear weights are [out, in], int8 [in, out] where quantised."""
        return self.parts[name].read(self.tensor)

    def matrix(self, name: str) -> Tensor:
        """A matrix [out, in] of numbers, whether its layer is quantised or not."""
        if self.parts[name].dtype is None:
            return self.weight(name)
        return self.weight(name).t().float() * self.weight(f"{name}_scale")[:, None]

    def digest(self) -> str:
        """SHA-256, in hex, over config.json and every shard."""
        shards = sorted({entry.file for entry in self.entries.values()})
        described = [path for path in (self.folder / DESCRIPTION,) if path.is_file()]
        return sha256_of([self.folder / "config.json", *described, *shards])


def _parts(folder: Path, config: TeacherConfig) -> dict[str, Parts]:
    return quantised_parts(family_of(config).parts(config), config.quantised, (folder / DESCRIPTION).is_file())


def expected_tensors(config: TeacherConfig) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor of a teacher."""
    return shapes_of(family_of(config).parts(config))


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files, those that exist; none is an acceptable answer."""
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]
