"""Int8 matrices with a scale an output beside them: made of a matrix, or in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import DTYPES, Entry, read_header, read_tensor
from draftwood.kernels.quantised import LARGEST, LEAST

# O outputs, H inputs, P outputs of a piece

SCALE = "_scale"  # behind the key of the matrix, which ends in "weight"
PIECE = 4096


def rounded(weight_OH: Tensor, factor_H: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """int8 [O, H] and the scales of its outputs, float32 [O, 1]: the nearest of 255 steps, halves to even.

    Columns are multiplied by ``factor`` first. Outputs are taken some at a time: no fp32 copy of all is made.
    """
    whole_OH, scale_O1 = torch.empty(weight_OH.shape, dtype=torch.int8), torch.empty(len(weight_OH), 1)
    for start in range(0, len(weight_OH), PIECE):
        piece = slice(start, start + PIECE)
        part_PH = weight_OH[piece].float() * factor_H
        scale_O1[piece] = part_PH.abs().amax(1, keepdim=True).clamp_min(LEAST) / LARGEST
        whole_OH[piece] = (part_PH / scale_O1[piece]).round().to(torch.int8)
    return whole_OH, scale_O1


def int8_keys(stored: Mapping[str, Entry]) -> tuple[str, ...]:
    """The keys of int8 matrices [O, H] that have scales float32 [O, 1] beside them."""
    return tuple(key for key, entry in stored.items() if entry.kind == "I8" and _has_scales(stored, key, entry))


def _has_scales(stored: Mapping[str, Entry], key: str, entry: Entry) -> bool:
    beside = stored.get(f"{key}{SCALE}")
    return beside is not None and (beside.kind, beside.shape) == ("F32", (*entry.shape[:1], 1))


def as_numbers(file: Path) -> dict[str, Entry]:
    """What a file holds, where such matrices count as of the type of the file's other numbers, without their scales."""
    stored = read_header(file)
    keys = int8_keys(stored)
    scales = {f"{key}{SCALE}" for key in keys}
    plain = {key: entry for key, entry in stored.items() if key not in scales}
    kind = next((entry.kind for entry in plain.values() if entry.kind in DTYPES), "F32")
    return plain | {key: Entry(file, plain[key].shape, kind) for key in keys}


def read_number(file: Path, key: str, entry: Entry) -> Tensor:
    """A tensor that ``as_numbers`` has listed so."""
    value = read_tensor(file, key)
    if value.dtype.is_floating_point or entry.kind not in DTYPES:
        return value
    return (value.float() * read_tensor(file, f"{key}{SCALE}")).to(DTYPES[entry.kind])
