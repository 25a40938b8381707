"""Element types as AscendCL numbers them, and conversions between numpy, which has no bf16, and a graph's types."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# aclDataType -> the element type as a manifest has it.
KINDS = {0: "float32", 1: "float16", 3: "int32", 9: "int64", 12: "bool", 27: "bfloat16"}
# How a graph's elements lie in the host's memory: bf16 as its bits.
STORED: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "int32": np.int32,
    "bool": np.bool_,
}
_QUIET = 0x7FC0  # what any number that is none becomes, as torch has it


def store(target: NDArray, values: NDArray) -> None:
    """Writes host values into a graph's input of the same shape; fp32 becomes bf16 to the nearest, ties to even."""
    if target.dtype != np.uint16:
        target[...] = values
        return
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    target[...] = np.where(np.isnan(values), _QUIET, rounded)


def to_host(stored: NDArray, kind: str, out: NDArray | None = None) -> NDArray:
    """A graph's result, as fp32 or whole numbers; into ``out`` if that is given."""
    if out is None:
        out = np.empty(stored.shape, host_type(kind))
    if kind == "bfloat16":
        np.left_shift(stored.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = stored.view(STORED[kind])
    return out


def item_bytes(kind: str) -> int:
    """Bytes of an element."""
    return np.dtype(STORED[kind]).itemsize


def host_type(kind: str) -> type[np.generic]:
    """The type that an engine gives for an element type: fp32 for fractions."""
    return np.float32 if kind in ("bfloat16", "float16") else STORED[kind]
