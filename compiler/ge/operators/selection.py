"""Operators that read and write at places given by indices, and that rank values."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.compiler.ge.operators.table import (
    ALL,
    INTEGERS,
    NUMBERS,
    Refusal,
    one_type,
    only,
    operator,
    register,
)
from draftwood.kernels.scatter import SCATTER_ND_UPDATE_, SCATTER_UPDATE_


def _indices(index: Tensor) -> Tensor:
    one_type(INTEGERS, index)
    return index.long()


@operator
def GatherV2(
    x: Tensor,
    indices: Tensor,
    axis: int,
    *,
    batch_dims: int = 0,
    is_preprocessed: bool = False,
    negative_index_support: bool = False,
) -> Tensor:
    """Slices of x along ``axis``; the indices' dimensions take that one's place. An index outside is refused."""
    only("batch_dims", batch_dims, 0)
    only("is_preprocessed", is_preprocessed, False)
    axis, index = axis % x.dim(), _indices(indices)
    if negative_index_support:
        index = torch.where(index < 0, index + x.shape[axis], index)
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@operator
def Gather(
    x: Tensor,
    indices: Tensor,
    *,
    validate_indices: bool = True,
    batch_dims: int = 0,
    is_preprocessed: bool = False,
    negative_index_support: bool = False,
) -> Tensor:
    # Whether GE checks the indices makes no difference to a graph whose indices are right.
    only("validate_indices", validate_indices, True, False)
    return GatherV2(
        x,
        indices,
        0,
        batch_dims=batch_dims,
        is_preprocessed=is_preprocessed,
        negative_index_support=negative_index_support,
    )


@operator
def GatherElements(x: Tensor, index: Tensor, *, dim: int = 0) -> Tensor:
    return torch.gather(x, dim, _indices(index))


@operator
def IndexByTensor(x: Tensor, indices: list[Tensor], *, indices_mask: list[int]) -> Tensor:
    """x[i, :, j, ...]: mask 1 where a dimension has an index, 0 where all of it stays; PyTorch's rules else."""
    if sum(indices_mask) != len(indices) or not set(indices_mask) <= {0, 1}:
        raise Refusal(f"attribute indices_mask = {indices_mask} does not fit {len(indices)} indices")
    given = iter(indices)
    return x[tuple(_indices(next(given)) if there else slice(None) for there in indices_mask)]


@operator
def ScatterElements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    only("reduction", reduction, "none", "add", "mul")
    one_type(NUMBERS, data, updates)
    index = _indices(indices)
    if reduction == "none":
        return data.scatter(axis, index, updates)
    return data.scatter_reduce(axis, index, updates, {"add": "sum", "mul": "prod"}[reduction])


def ScatterNdUpdate(var: Tensor, indices: Tensor, updates: Tensor, *, use_locking: bool = False) -> Tensor:
    only("use_locking", use_locking, False)
    one_type(ALL, var, updates)
    written: Tensor = SCATTER_ND_UPDATE_.reference(var, _indices(indices), updates)
    return written


def Scatter(var: Tensor, indices: Tensor, updates: Tensor, *, reduce: str, axis: int = 0) -> Tensor:
    """``updates`` of batch row b go to start ``indices``[b] and on, along the axis."""
    only("reduce", reduce, "update")
    one_type(NUMBERS, var, updates)
    # What the reference writes depends on the indices; what has no values is written nothing.
    write = SCATTER_UPDATE_.fake if var.is_meta else SCATTER_UPDATE_.reference
    written: Tensor = write(var, _indices(indices), updates, axis)
    return written


def Assign(ref: Tensor, value: Tensor, *, validate_shape: bool = True, use_locking: bool = False) -> Tensor:
    only("use_locking", use_locking, False)
    only("validate_shape", validate_shape, True)
    one_type(ALL, ref, value)
    if ref.shape != value.shape:
        raise Refusal(f"operand value has shape {list(value.shape)}, ref has {list(ref.shape)}")
    return ref.copy_(value)


for _write in (ScatterNdUpdate, Scatter, Assign):
    register(_write.__name__, _write, writes=True)


@operator
def TopKV2(
    x: Tensor, k: int, *, sorted: bool = True, dim: int = -1, largest: bool = True, sort_policy: int = 1
) -> tuple[Tensor, Tensor]:
    """The definition does not order equal values; they come as torch.topk has them."""
    only("sort_policy", sort_policy, 1)  # not in the definition: torchair sets it on every node
    one_type(NUMBERS, x)
    values, indices = torch.topk(x, k, dim, largest, sorted)
    return values, indices.int()


@operator
def Sort(x: Tensor, *, axis: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    one_type(NUMBERS, x)
    values, indices = torch.sort(x, dim=axis, descending=descending, stable=stable)
    return values, indices.int()
