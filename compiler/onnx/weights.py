"""One weights file for all ONNX graphs of a bundle: a safetensors file written as a stream.

ONNX initialisers point into it by byte offset, so the file is also readable by any safetensors library. Matrices as a
machine's kernels read them are added once the graphs are there; the header keeps room for their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from draftwood.compiler.checkpoints.weight import WeightEntry

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMES |= {torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8"}
_PAGE = 4096  # the tensors begin on a page, so that a memory map of them does too
_ROOM = 256  # bytes of the header for the names and places of the two tensors that may be added for a matrix


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
    text += b" " * (_ROOM * sum(len(entry.shape) > 1 for entry in entries))
    text += b" " * (-(len(text) + 8) % _PAGE)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            value = entry.read().to(entry.dtype or dtype).contiguous()
            assert tuple(value.shape) == entry.shape, (entry.name, value.shape, entry.shape)
            file.write(value.view(-1).view(torch.uint8).numpy().data)
    start = 8 + len(text)
    return {name: WeightSpan(span.shape, span.offset + start, span.length) for name, span in spans.items()}


class Appending:
    """Adds tensors of bytes to a weights file, each from a page's border on; on exit the header names them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._length = int.from_bytes(self._file.read(8), "little")
        self._header: dict[str, object] = json.loads(self._file.read(self._length))
        self._at = self._file.seek(0, 2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file as file:
            text = json.dumps(self._header, separators=(",", ":")).encode()
            assert len(text) <= self._length, "there is room for the names of all matrices"
            file.seek(8)
            file.write(text.ljust(self._length))

    def add(self, name: str, data: bytes) -> int:
        """The offset of ``data``, from the file's start. The tensor begins at the end of the one before it."""
        begin, start = self._at, self._at + -self._at % _PAGE
        self._file.write(bytes(start - begin) + data)
        self._at = start + len(data)
        offsets = [place - 8 - self._length for place in (begin, self._at)]
        self._header[name] = {"dtype": "U8", "shape": [self._at - begin], "data_offsets": offsets}
        return start
