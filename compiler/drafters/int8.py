"""A drafter of which linear layers are W8A8: rounded as it is read, or as `draftwood.compiler.quantisation` wrote it.

Its kind opens it as if its matrices were the numbers that they stand for; what a bundle keeps are the whole numbers.
A drafter that ranks with the teacher's output matrix gets one of its own: it reads the matrix once a level, which is
most of a draft, and the teacher's must stay as it is.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.int8 import SCALE, int8_keys, rounded
from draftwood.compiler.checkpoints.safetensors_file import read_header, read_tensor
from draftwood.compiler.checkpoints.scheme import quantised_modules
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.model import DrafterCheckpoint, OpenedDrafter
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError, RequestError

# O outputs, H inputs

# What reads raw states of the teacher, or embeddings, side by side: they differ in size, and a row has one scale.
_RAW = ("fc", "proj")
# Small, and run once for every node: a cascade's cell, DSpark's confidence and what its sequential head remembers.
_SMALL = ("cell.", "confidence_proj", "markov_head.gate_proj", "markov_head.joint_proj")
# Our names of output matrices: a drafter's with caches, and its teacher's.
_HEAD, _TEACHERS_HEAD = "draft_head", "lm_head"


@dataclass(frozen=True, slots=True)
class _Int8Layers(ABC):
    """The checkpoint of a drafter with such layers: weights int8 [H, O], as products read them, and scales [O]."""

    plain: DrafterCheckpoint
    layers: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.plain.names(), *_parameters(self.layers)]))

    @abstractmethod
    def keys(self, name: str) -> tuple[str, ...]: ...

    def weight(self, name: str) -> Tensor:
        if name not in _parameters(self.layers):
            return self.plain.weight(name)
        found = self.whole(name)
        return found.flatten() if name.endswith(SCALE) else found.t().contiguous()

    @abstractmethod
    def whole(self, name: str) -> Tensor:
        """Of a layer the whole numbers [O, H], or the scales [O, 1]."""

    def stored(self, key: str) -> Tensor:
        return self.plain.stored(key)

    def buffers(self, positions: int) -> dict[str, Tensor]:
        return self.plain.buffers(positions)

    def maps(self) -> dict[str, Tensor]:
        return self.plain.maps()

    def digest(self) -> str:
        return self.plain.digest()


@dataclass(frozen=True, slots=True)
class Int8Checkpoint(_Int8Layers):
    """One whose ``file`` holds them so."""

    file: Path

    def keys(self, name: str) -> tuple[str, ...]:
        if name.endswith(SCALE):
            return tuple(f"{key}{SCALE}" for key in self.plain.keys(name.removesuffix(SCALE)))
        return self.plain.keys(name)

    def whole(self, name: str) -> Tensor:
        return torch.cat([read_tensor(self.file, key) for key in self.keys(name)])


@dataclass(frozen=True, slots=True)
class RoundedCheckpoint(_Int8Layers):
    """One of plain numbers, of which ``layers`` are rounded as they are read."""

    def keys(self, name: str) -> tuple[str, ...]:
        return () if name in _parameters(self.layers) else self.plain.keys(name)

    def whole(self, name: str) -> Tensor:
        return rounded(self.plain.weight(name.removesuffix(SCALE)))[name.endswith(SCALE)]

    def digest(self) -> str:
        return hashlib.sha256(f"{self.plain.digest()} W8A8".encode()).hexdigest()


def _parameters(layers: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{layer}.weight{part}" for layer in layers for part in ("", SCALE))


def in_int8(opened: OpenedDrafter, path: Path, teacher: TeacherConfig) -> OpenedDrafter:
    """The drafter that was opened from ``path``, its linear layers in W8A8.

    Raises:
        RequestError: it is so already.
    """
    if opened.model.quantised:
        raise RequestError(f"{path}: is quantised already; name the original")
    layers = int8_layers(opened, teacher)
    return OpenedDrafter(opened.model.in_int8(layers), RoundedCheckpoint(opened.checkpoint, layers))


def int8_layers(opened: OpenedDrafter, teacher: TeacherConfig) -> tuple[str, ...]:
    """Our names of the layers that it has in W8A8: `linear_layers`, and an output matrix that is the teacher's."""
    return (*linear_layers(opened, teacher), *((_HEAD,) if borrows_head(opened, teacher) else ()))


def borrows_head(opened: OpenedDrafter, teacher: TeacherConfig) -> bool:
    """Whether it has caches and ranks with the teacher's output matrix, or rows of it, in plain numbers."""
    config = opened.model.config
    if not isinstance(config, CachedConfig) or not config.tied_head:
        return False
    return config.mapped or _TEACHERS_HEAD not in teacher.quantised


def linear_layers(opened: OpenedDrafter, teacher: TeacherConfig) -> tuple[str, ...]:
    """Our names of the layers that are worth it, of those that can be W8A8."""
    return tuple(name for name in _able(opened, teacher) if not name.startswith(_SMALL) and name not in _RAW)


def _able(opened: OpenedDrafter, teacher: TeacherConfig) -> tuple[str, ...]:
    """Those whose matrices are all of tensors of the drafter's own."""
    with torch.device("meta"):
        network = opened.model.module(teacher, 1)
    names = set(opened.checkpoint.names())
    return tuple(
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.weight" in names
        if opened.checkpoint.keys(f"{name}.weight") and _whole(opened.checkpoint, name, layer)
    )


def _whole(checkpoint: DrafterCheckpoint, name: str, layer: nn.Linear) -> bool:
    """Whether the tensors have no rows behind those that are used."""
    return sum(len(checkpoint.stored(key)) for key in checkpoint.keys(f"{name}.weight")) == layer.out_features


def with_int8(opened: OpenedDrafter, path: Path, file: Path, teacher: TeacherConfig) -> OpenedDrafter:
    """The drafter with the layers that its ``file`` holds in int8; itself where there are none.

    Raises:
        CheckpointError: config.json describes another scheme, or other layers than the file has.
    """
    config = (path if path.is_dir() else path.parent) / "config.json"
    chosen = quantised_modules(Fields(config, read_json(config))) if config.is_file() else None
    keys = set(int8_keys(read_header(file))) if file.suffix == ".safetensors" and file.is_file() else set()
    layers = tuple(
        name
        for name in (_able(opened, teacher) if keys else ())
        if keys.issuperset(opened.checkpoint.keys(f"{name}.weight"))
    )
    said = {key for key in keys if chosen is not None and chosen(key.removesuffix(".weight"))}
    used = {key for name in layers for key in opened.checkpoint.keys(f"{name}.weight")}
    if keys != said or keys != used or (chosen is not None and not keys):
        odd = next(iter(sorted((keys - said) | (keys - used))), "no tensor")
        raise CheckpointError(
            f"{file}: {odd} is int8; expected those of whole linear layers that quantization_config of {config} names;"
            " run draftwood quantize --drafter on the original"
        )
    if not layers:
        return opened
    return OpenedDrafter(opened.model.in_int8(layers), Int8Checkpoint(opened.checkpoint, layers, file))
