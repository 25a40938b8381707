"""Sums and products in one operator of the NPU each. Its AI Core has no right shift of whole numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op


def _multiply_add(added: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return added + x * y


def _multiply_add_onnx(added, x, y):  # type: ignore[no-untyped-def]
    return op.Add(added, op.Mul(x, y))


def _add_scaled(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return x + (y.float() * factor).to(x.dtype)


def _add_scaled_onnx(x, y, factor: float):  # type: ignore[no-untyped-def]
    return op.Add(x, op.CastLike(op.Mul(op.Cast(y, to=1), op.Constant(value_float=factor)), x))  # FLOAT


def _broadcast(x: Tensor, *others: object) -> Tensor:
    return x.new_empty(torch.broadcast_shapes(x.shape, *(other.shape for other in others if isinstance(other, Tensor))))


MULTIPLY_ADD = Contract(
    "multiply_add(Tensor added, Tensor x, Tensor y) -> Tensor",
    reference=_multiply_add,
    fake=_broadcast,
    onnx=_multiply_add_onnx,
    namespace="draftwood",
)
"""added + x * y, all of one type: the NPU's Addcmul."""

ADD_SCALED = Contract(
    "add_scaled(Tensor x, Tensor y, float factor) -> Tensor",
    reference=_add_scaled,
    fake=_broadcast,
    onnx=_add_scaled_onnx,
    namespace="draftwood",
)
"""x + factor * y, both float32 or both int32: the NPU's Axpy.

Whole numbers go through float32 there as here, so with a factor of 2^-bits it is a shift to the right of multiples of
2^bits whose shares, and the sums, are below 2^24.
"""
