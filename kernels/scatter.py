"""Writes into a cache: functional operators for tracing and their in-place twins.

torchair puts a functional scatter back in place only if the twin is registered as well.
Indices are not checked on the device: every caller proves its own (the spare slot exists for that).
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op

# R rows of the cache, W rows written, D row width


def _scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input.index_put_(tuple(indices.long().unbind(-1)), updates)


def _scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return _scatter_nd_update_(input.clone(), indices, updates)


def _same_as_input(input: Tensor, *_: object) -> Tensor:
    return input.new_empty(input.shape)


def _input_itself(input: Tensor, *_: object) -> Tensor:
    return input


def _scatter_nd_update_onnx(input, indices, updates):  # type: ignore[no-untyped-def]
    return op.ScatterND(input, indices, updates)


def _join_rows(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second))


def _join_rows_fake(first: Tensor, second: Tensor) -> Tensor:
    return first.new_empty((first.shape[0] + second.shape[0], *first.shape[1:]))


JOIN_ROWS = Contract(
    "join_rows(Tensor first, Tensor second) -> Tensor",
    reference=_join_rows,
    fake=_join_rows_fake,
    namespace="draftwood",
)
"""Joins rows. On the NPU it is ConcatD, which is free if GE can place its inputs next to each other."""

SCATTER_ND_UPDATE = Contract(
    "npu_scatter_nd_update(Tensor input, Tensor indices, Tensor updates) -> Tensor",
    reference=_scatter_nd_update,
    fake=_same_as_input,
    onnx=_scatter_nd_update_onnx,
)
SCATTER_ND_UPDATE_ = Contract(
    "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    reference=_scatter_nd_update_,
    fake=_input_itself,
)
