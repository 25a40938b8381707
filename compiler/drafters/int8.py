"""A drafter with linear layers in W8A8, rounded when it is read from a folder of any layout.

A bundle keeps the whole numbers. A drafter that ranks with the teacher's output matrix gets a copy, since the teacher's
must not change. It reads the matrix once a level, which is most of a draft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.compiler.checkpoints.int8 import SCALE, rounded
from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.model import DrafterCheckpoint, OpenedDrafter
from draftwood.compiler.teachers.config import TeacherConfig

# O outputs, H inputs

# Layers that read raw states of the teacher or embeddings side by side. These differ in size, but a row has one scale.
_RAW = ("fc", "proj")
# Small, and run once for every node: DSpark's confidence and the memory of its sequential head.
_SMALL = ("confidence_proj", "markov_head.gate_proj", "markov_head.joint_proj")
# Our names of output matrices: a drafter's with caches, and its teacher's.
_HEAD, _TEACHERS_HEAD = "draft_head", "lm_head"


@dataclass(frozen=True, slots=True)
class RoundedCheckpoint:
    """A checkpoint of plain numbers whose ``layers`` are rounded: weights int8 [H, O], scales [O]."""

    plain: DrafterCheckpoint
    layers: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.plain.names(), *_parameters(self.layers)]))

    def keys(self, name: str) -> tuple[str, ...]:
        return () if name in _parameters(self.layers) else self.plain.keys(name)

    def weight(self, name: str) -> Tensor:
        if name not in _parameters(self.layers):
            return self.plain.weight(name)
        whole_OH, scale_O1 = rounded(self.plain.weight(name.removesuffix(SCALE)))
        return scale_O1.flatten() if name.endswith(SCALE) else whole_OH.t().contiguous()

    def stored(self, key: str) -> Tensor:
        return self.plain.stored(key)

    def buffers(self, positions: int) -> dict[str, Tensor]:
        return self.plain.buffers(positions)

    def maps(self) -> dict[str, Tensor]:
        return self.plain.maps()

    def digest(self) -> str:
        return hashlib.sha256(f"{self.plain.digest()} W8A8".encode()).hexdigest()


def _parameters(layers: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{layer}.weight{part}" for layer in layers for part in ("", SCALE))


def in_int8(opened: OpenedDrafter, teacher: TeacherConfig) -> OpenedDrafter:
    """The drafter with its linear layers in W8A8, and an output matrix if it ranks with the teacher's."""
    layers = (*_linear_layers(opened, teacher), *((_HEAD,) if borrows_head(opened, teacher) else ()))
    return OpenedDrafter(opened.model.in_int8(layers), RoundedCheckpoint(opened.checkpoint, layers))


def borrows_head(opened: OpenedDrafter, teacher: TeacherConfig) -> bool:
    """Whether the drafter has caches and ranks with the teacher's output matrix, or rows of it, in plain numbers."""
    config = opened.model.config
    if not isinstance(config, CachedConfig) or not config.tied_head:
        return False
    return config.mapped or _TEACHERS_HEAD not in (*teacher.quantised, *(layer.name for layer in teacher.packed))


def _linear_layers(opened: OpenedDrafter, teacher: TeacherConfig) -> tuple[str, ...]:
    """Our names of the layers that are worth it, of those whose matrices are all of tensors of the drafter's own."""
    with torch.device("meta"):
        network = opened.model.module(teacher, 1)
    names = set(opened.checkpoint.names())
    return tuple(
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.weight" in names
        if not name.startswith(_SMALL) and name not in _RAW
        if opened.checkpoint.keys(f"{name}.weight") and _whole(opened.checkpoint, name, layer)
    )


def _whole(checkpoint: DrafterCheckpoint, name: str, layer: nn.Linear) -> bool:
    """Whether all rows of the tensors are used."""
    return sum(len(checkpoint.stored(key)) for key in checkpoint.keys(f"{name}.weight")) == layer.out_features
