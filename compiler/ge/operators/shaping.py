"""Operators that make, reshape, cut, join and repeat tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import GE_TYPES
from draftwood.compiler.ge.operators.table import ALL, Host, Refusal, one_type, only, operator, register


@operator
def Range(start: Host, limit: Host, delta: Host) -> Tensor:
    # torchair mixes int32 and int64 operands and casts the result; promotion loses nothing.
    dtype = torch.promote_types(torch.promote_types(start.dtype, limit.dtype), delta.dtype)
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=dtype)


@operator
def Fill(dims: list[int], value: Tensor) -> Tensor:
    return value.reshape(()).expand(dims).clone(memory_format=torch.contiguous_format)


@operator
def ZerosLike(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


@operator
def Shape(x: Tensor, *, dtype: Literal[3, 9] = 3) -> Tensor:
    return torch.tensor(x.shape, dtype=GE_TYPES[dtype])


def Reshape(x: Tensor, shape: list[int], *, axis: Literal[0] = 0, num_axes: Literal[-1] = -1) -> Tensor:
    return x.reshape(shape)


def Squeeze(x: Tensor, *, axis: list[int] = []) -> Tensor:  # noqa: B006 (the definition's default, never changed)
    if any(x.shape[a] != 1 for a in axis):
        raise Refusal(f"attribute axis = {axis}; a size of {list(x.shape)} there is not 1")
    return x.squeeze(axis) if axis else x.squeeze()


def Unsqueeze(x: Tensor, *, axes: list[int] = []) -> Tensor:  # noqa: B006 (as above)
    rank = x.dim() + len(axes)  # the axes count in the result
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


for _view in (Reshape, Squeeze, Unsqueeze):
    register(_view.__name__, _view, views=True)


@operator
def Transpose(x: Tensor, perm: list[int]) -> Tensor:
    return x.permute(perm)


@operator
def Identity(x: Tensor) -> Tensor:
    return x


@operator
def TensorMove(x: Tensor) -> Tensor:
    return x.clone()


@operator
def BroadcastTo(x: Tensor, shape: list[int]) -> Tensor:
    return x.expand(shape)


@operator
def Tile(x: Tensor, multiples: list[int]) -> Tensor:
    if len(multiples) != x.dim():
        raise Refusal(f"operand multiples has {len(multiples)} values, expected {x.dim()}")
    return x.repeat(multiples)


@operator
def Pack(x: list[Tensor], *, N: int, axis: int = 0) -> Tensor:
    only("N", N, len(x))
    one_type(ALL, *x)
    return torch.stack(x, axis)


@operator
def Unpack(x: Tensor, *, num: int, axis: int = 0) -> list[Tensor]:
    only("num", num, x.shape[axis])
    return list(x.unbind(axis))


@operator
def ConcatD(x: list[Tensor], *, concat_dim: int, N: int = 1) -> Tensor:
    only("N", N, len(x))
    one_type(ALL, *x)
    return torch.cat(x, concat_dim)


register("ConcatV2D", ConcatD)


@operator
def SplitV(x: Tensor, size_splits: list[int], split_dim: int, *, num_split: int) -> list[Tensor]:
    """One size may be -1: the rest of the others."""
    only("num_split", num_split, len(size_splits))
    if size_splits.count(-1) == 1:
        rest = x.shape[split_dim] - sum(size for size in size_splits if size != -1)
        size_splits = [rest if size == -1 else size for size in size_splits]
    return list(x.split(size_splits, split_dim))


@operator
def PadV3(
    x: Tensor,
    paddings: list[int],
    constant_values: Tensor | None = None,
    *,
    mode: Literal["constant"] = "constant",
    paddings_contiguous: Literal[True] = True,
) -> Tensor:
    """``paddings`` [rank, 2]: how much before and after every dimension."""
    if len(paddings) != 2 * x.dim() or min(paddings, default=0) < 0:
        raise Refusal(f"operand paddings = {paddings} does not fit {x.dim()} dimensions")
    pairs = list(zip(paddings[::2], paddings[1::2], strict=True))
    shape = [size + before + after for size, (before, after) in zip(x.shape, pairs, strict=True)]
    fill = x.new_zeros(()) if constant_values is None else constant_values.reshape(()).to(x.dtype)
    padded = fill.expand(shape).clone(memory_format=torch.contiguous_format)
    padded[tuple(slice(before, before + size) for size, (before, _) in zip(x.shape, pairs, strict=True))] = x
    return padded
