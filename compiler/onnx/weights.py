"""One weights file for all ONNX graphs of a bundle: a safetensors file written as a stream.

ONNX initialisers point into it by byte offset, so the file is also readable by any safetensors library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwood.compiler.checkpoints.weight import WeightEntry

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8"}
_PAGE = 4096  # the tensors begin on a page, so that a memory map of them does too


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """One tensor's place in the file: byte ``offset`` from its start and byte ``length``."""

    shape: tuple[int, ...]
    offset: int
    length: int


def write_weights(
    path: Path, entries: Iterable[WeightEntry], dtype: torch.dtype = torch.float32
) -> dict[str, WeightSpan]:
    """Writes the entries in order, holding one at a time; returns where each lies."""
    entries = list(entries)
    header: dict[str, object] = {}
    spans: dict[str, WeightSpan] = {}
    at = 0
    for entry in entries:
        kind = entry.dtype or dtype
        length = kind.itemsize * int(torch.Size(entry.shape).numel())
        header[entry.name] = {
            "dtype": _NAMES[kind],
            "shape": list(entry.shape),
            "data_offsets": [at, at + length],
        }
        spans[entry.name] = WeightSpan(entry.shape, at, length)
        at += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            value = entry.read().to(entry.dtype or dtype).contiguous()
            assert tuple(value.shape) == entry.shape, (entry.name, value.shape, entry.shape)
            file.write(value.view(-1).view(torch.uint8).numpy().data)
    start = 8 + len(text)
    return {name: WeightSpan(span.shape, span.offset + start, span.length) for name, span in spans.items()}
