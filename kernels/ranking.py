"""The best of every row and what stands at their places, with places in int32, as the NPU's own operators have them.

PyTorch's are int64: each list of them costs an NPU one kernel more, which casts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op

# R rows, U values of each, k best


def _best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, places = x.topk(k, -1)
    return values, places.to(torch.int32)


def _best_fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)


def _best_onnx(x, k: int):  # type: ignore[no-untyped-def]
    values, places = op.TopK(x, op.Constant(value_ints=[k]), axis=-1)
    return values, op.Cast(places, to=6)  # INT32


def _picked(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(-1, places.long())


def _picked_onnx(x, places):  # type: ignore[no-untyped-def]
    return op.GatherElements(x, places, axis=-1)


def _picked_fake(x: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(places.shape)


BEST = Contract(
    "best(Tensor x, int k) -> (Tensor, Tensor)",
    reference=_best,
    fake=_best_fake,
    onnx=_best_onnx,
    namespace="draftwood",
)
"""x [R, U]: the k greatest values of every row, greatest first, and their places, int32 [R, k]."""

PICKED = Contract(
    "picked(Tensor x, Tensor places) -> Tensor",
    reference=_picked,
    fake=_picked_fake,
    onnx=_picked_onnx,
    namespace="draftwood",
)
"""x [R, U] at places int32 [R, k]: [R, k]."""
