"""The blocks of a GGUF tensor as plain numbers, and as whole numbers with a scale and a minimum.

The plain numbers equal those of the package gguf's numpy reference. Whole numbers are in blocks of 32 inputs, as
`draftwood.kernels.nbits` multiplies them: (whole - zero) * scale + minimum. For nine kinds the two agree bit for bit.
The other kinds have scales for 16 inputs or for a codebook's groups and are rounded to eight bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.checkpoints.blocks import BLOCK, MIDDLE, rounded_to_eight
from draftwood.compiler.checkpoints.packed import Grouped
from draftwood.compiler.checkpoints.weight import Shape

# R rows, N numbers of a row, B blocks of 32, S super-blocks of 256, X bytes

_SUPER = 256
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class _Packed32:
    """One tensor's ``whole`` [R, B, 32] less the zero, ``scale`` [R, B] and, if its kind has one, ``minimum``."""

    whole: NDArray[Any]
    scale: NDArray[np.float32]
    minimum: NDArray[np.float32] | None = None


def readable() -> frozenset[str]:
    """The kinds that the package reads."""
    from gguf import quants

    # The package has no list of its own for others to read.
    return frozenset({*PLAIN, *(kind.name for kind in quants._type_traits)})


def numbers(bytes_RX: NDArray[np.uint8], kind: str) -> Tensor:
    """float32 [R, N] of rows of blocks."""
    import gguf

    if kind == "F32":
        return torch.from_numpy(bytes_RX.view(np.float32).copy())
    with np.errstate(all="ignore"):  # the reader looks for values that are no numbers
        return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(bytes_RX, gguf.GGMLQuantizationType[kind])))


def exact(kind: str) -> bool:
    """Whether `whole_numbers` stand for the same numbers as the blocks do."""
    return kind in _READERS


def bits(kind: str) -> int:
    """Bits of the whole numbers of a kind."""
    return 4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8


def has_minimum(kind: str) -> bool:
    """Whether the blocks of a kind have a smallest number of their own."""
    return kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def whole_numbers(bytes_RX: NDArray[np.uint8], shape: Shape, kind: str) -> Grouped:
    """The whole numbers of a matrix [R, N]; N is a multiple of 32."""
    width = bits(kind)
    if kind not in _READERS:
        return rounded_to_eight(numbers(bytes_RX, kind))
    with np.errstate(all="ignore"):
        parts = _READERS[kind](bytes_RX)
    # Four bits with a minimum count from 0; all else from the middle.
    zero = 0 if width == 4 and parts.minimum is not None else MIDDLE[width]
    whole_RN = (parts.whole.astype(np.int16) + zero).astype(np.uint8).reshape(shape)
    minimum = None if parts.minimum is None else torch.from_numpy(np.ascontiguousarray(parts.minimum))
    scale_RB = torch.from_numpy(np.ascontiguousarray(parts.scale))
    return Grouped(
        torch.from_numpy(whole_RN), torch.full_like(scale_RB, zero, dtype=torch.uint8), scale_RB, width, minimum
    )


def _blocks(bytes_RX: NDArray[np.uint8], *sizes: int) -> list[NDArray[np.uint8]]:
    """The fields of each block, each [R, blocks, bytes]; ``sizes`` are their bytes."""
    blocks = bytes_RX.reshape(len(bytes_RX), -1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=2)


def _half(field: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[R, blocks] of float16."""
    return np.ascontiguousarray(field).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(field: NDArray[np.uint8]) -> NDArray[np.int16]:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate((field & 15, field >> 4), axis=-1).astype(np.int16)


def _fifth(field: NDArray[np.uint8]) -> NDArray[np.int16]:
    """The fifth bit of 32 numbers, of four bytes."""
    return np.unpackbits(field, axis=-1, bitorder="little").astype(np.int16) << 4


def _q4_0(rows: NDArray[np.uint8]) -> _Packed32:
    scale, quants = _blocks(rows, 2, 16)
    return _Packed32(_nibbles(quants) - 8, _half(scale))


def _q4_1(rows: NDArray[np.uint8]) -> _Packed32:
    scale, minimum, quants = _blocks(rows, 2, 2, 16)
    return _Packed32(_nibbles(quants), _half(scale), _half(minimum))


def _q5_0(rows: NDArray[np.uint8]) -> _Packed32:
    scale, high, quants = _blocks(rows, 2, 4, 16)
    return _Packed32((_nibbles(quants) | _fifth(high)) - 16, _half(scale))


def _q5_1(rows: NDArray[np.uint8]) -> _Packed32:
    scale, minimum, high, quants = _blocks(rows, 2, 2, 4, 16)
    return _Packed32(_nibbles(quants) | _fifth(high), _half(scale), _half(minimum))


def _q8_0(rows: NDArray[np.uint8]) -> _Packed32:
    scale, quants = _blocks(rows, 2, 32)
    return _Packed32(quants.view(np.int8), _half(scale))


def _k_scales(rows: NDArray[np.uint8], *more: int) -> tuple[list[NDArray[np.uint8]], NDArray[Any], NDArray[Any]]:
    """The other fields of super-blocks, and scale and minimum of their eight blocks, [R, B]."""
    from gguf.quants import Q4_K

    scale, minimum, packed, *fields = _blocks(rows, 2, 2, 12, *more)
    count = packed.shape[1]
    scales, minima = (part.reshape(len(rows), count, 8) for part in Q4_K.get_scale_min(packed.reshape(-1, 12)))
    scale_RB = (_half(scale)[..., None] * scales.astype(np.float32)).reshape(len(rows), -1)
    minimum_RB = (_half(minimum)[..., None] * minima.astype(np.float32)).reshape(len(rows), -1)
    return fields, scale_RB, -minimum_RB


def _pairs(field: NDArray[np.uint8]) -> NDArray[np.int16]:
    """[R, B, 32] of super-blocks' nibbles: 32 bytes are two blocks, the first in the low halves."""
    bytes_of_blocks = field.reshape(len(field), -1, 1, BLOCK)
    return (
        np.concatenate((bytes_of_blocks & 15, bytes_of_blocks >> 4), axis=2)
        .reshape(len(field), -1, BLOCK)
        .astype(np.int16)
    )


def _q4_k(rows: NDArray[np.uint8]) -> _Packed32:
    (quants,), scale_RB, minimum_RB = _k_scales(rows, 128)
    return _Packed32(_pairs(quants), scale_RB, minimum_RB)


def _q5_k(rows: NDArray[np.uint8]) -> _Packed32:
    (high, quants), scale_RB, minimum_RB = _k_scales(rows, 32, 128)
    # Bit i of byte j belongs to number j of block i.
    fifth = (high[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _Packed32(_pairs(quants) | (fifth.reshape(len(rows), -1, BLOCK).astype(np.int16) << 4), scale_RB, minimum_RB)


def _iq4_nl(rows: NDArray[np.uint8]) -> _Packed32:
    from gguf.quants import IQ4_NL

    scale, quants = _blocks(rows, 2, 16)
    return _Packed32(np.array(IQ4_NL.kvalues, np.int16)[_nibbles(quants)], _half(scale))


def _iq4_xs(rows: NDArray[np.uint8]) -> _Packed32:
    from gguf.quants import IQ4_NL

    scale, high, low, quants = _blocks(rows, 2, 2, 4, 128)
    tops = np.ascontiguousarray(high).view(np.uint16) >> (2 * np.arange(8, dtype=np.uint16)) & 3
    bottoms = np.stack((low & 15, low >> 4), -1).reshape(tops.shape)
    steps = (bottoms.astype(np.int16) | (tops.astype(np.int16) << 4)) - 32
    whole = np.array(IQ4_NL.kvalues, np.int16)[_nibbles(quants.reshape(len(rows), -1, 16))]
    return _Packed32(whole, (_half(scale)[..., None] * steps.astype(np.float32)).reshape(len(rows), -1))


_READERS: Mapping[str, Callable[[NDArray[np.uint8]], _Packed32]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
