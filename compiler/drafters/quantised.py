"""A drafter of which linear layers are W8A8, as `draftwood.compiler.quantisation.drafter` writes one.

Its kind opens it as if its matrices were the numbers that they stand for; what a bundle keeps are the whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.int8 import SCALE, int8_keys
from draftwood.compiler.checkpoints.quantised import quantised_modules
from draftwood.compiler.checkpoints.safetensors_file import read_header, read_tensor
from draftwood.compiler.drafters.model import DrafterCheckpoint, OpenedDrafter
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import CheckpointError

# O outputs, H inputs

# The cell of a cascade is small, and runs once for every node.
_LEFT_ALONE = ("cell.",)


@dataclass(frozen=True, slots=True)
class Int8Checkpoint:
    """The checkpoint of a drafter with such layers: weights int8 [H, O], as products read them, and scales [O]."""

    plain: DrafterCheckpoint
    file: Path
    layers: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.dtype

    def names(self) -> list[str]:
        scales = [f"{layer}.weight{SCALE}" for layer in self.layers]
        return [*self.plain.names(), *scales]

    def keys(self, name: str) -> tuple[str, ...]:
        if name.endswith(SCALE):
            return tuple(f"{key}{SCALE}" for key in self.plain.keys(name.removesuffix(SCALE)))
        return self.plain.keys(name)

    def weight(self, name: str) -> Tensor:
        if name.rpartition(".")[0] not in self.layers or name.endswith(".bias"):
            return self.plain.weight(name)
        joined = torch.cat([read_tensor(self.file, key) for key in self.keys(name)])
        return joined.flatten() if name.endswith(SCALE) else joined.t().contiguous()

    def stored(self, key: str) -> Tensor:
        return self.plain.stored(key)

    def buffers(self, positions: int) -> dict[str, Tensor]:
        return self.plain.buffers(positions)

    def maps(self) -> dict[str, Tensor]:
        return self.plain.maps()

    def digest(self) -> str:
        return self.plain.digest()


def linear_layers(opened: OpenedDrafter, teacher: TeacherConfig) -> tuple[str, ...]:
    """Our names of the layers that can be W8A8: those whose matrices are all of tensors of the drafter's own."""
    with torch.device("meta"):
        network = opened.model.module(teacher, 1)
    names = set(opened.checkpoint.names())
    return tuple(
        name
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and f"{name}.weight" in names and not name.startswith(_LEFT_ALONE)
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
        for name in (linear_layers(opened, teacher) if keys else ())
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
    return OpenedDrafter(opened.model.in_int8(layers), Int8Checkpoint(opened.checkpoint, file, layers))
