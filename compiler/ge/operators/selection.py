"""Operators that read and write at places given by indices, and that rank values."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.operators.table import ALL, INTEGERS, NUMBERS, one_type, operator, register
from draftwood.kernels.scatter import SCATTER_ND_UPDATE_


def _indices(index: Tensor) -> Tensor:
    one_type(INTEGERS, index)
    return index.long()


@operator
def GatherV2(
    x: Tensor,
    indices: Tensor,
    axis: int,
    *,
    batch_dims: Literal[0] = 0,
    is_preprocessed: Literal[False] = False,
    negative_index_support: bool = False,
) -> Tensor:
    """Slices of x along ``axis``; the indices' dimensions take that one's place. An index outside is refused."""
    axis, index = axis % x.dim(), _indices(indices)
    if negative_index_support:
        index = torch.where(index < 0, index + x.shape[axis], index)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@operator
def GatherElements(x: Tensor, index: Tensor, *, dim: int = 0) -> Tensor:
    return torch.gather(x, dim, _indices(index))


def ScatterNdUpdate(var: Tensor, indices: Tensor, updates: Tensor, *, use_locking: Literal[False] = False) -> Tensor:
    one_type(ALL, var, updates)
    written: Tensor = SCATTER_ND_UPDATE_.reference(var, _indices(indices), updates)
    return written


register("ScatterNdUpdate", ScatterNdUpdate, writes=True)


@operator
def TopKV2(x: Tensor, k: int, *, sorted: bool = True, dim: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The definition does not order equal values; they come as torch.topk has them."""
    one_type(NUMBERS, x)
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, indices.int()


@operator
def Sort(x: Tensor, *, axis: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    one_type(NUMBERS, x)
    values, indices = torch.sort(x, dim=axis, descending=descending, stable=stable)
    return values, indices.int()
