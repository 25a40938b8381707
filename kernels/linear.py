"""Products with a matrix that is stored transposed, as one operator: nothing is turned around in memory first."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract

# B batch, T rows, H inputs, O outputs


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _batched(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(x, weight.mT)


def _batched_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[-2]))


LINEAR = Contract(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    reference=_linear,
    fake=_linear_fake,
    namespace="draftwood",
)
"""x [T, H], weight [O, H], bias [O]: [T, O].

The bias of a bf16 product lies in float32 on an NPU, whose kernels take no other there, and holds values of bf16.
"""

BATCHED_LINEAR = Contract(
    "batched_linear(Tensor x, Tensor weight) -> Tensor",
    reference=_batched,
    fake=_batched_fake,
    namespace="draftwood",
)
"""x [B, T, H], weight [B, O, H]: [B, T, O]."""
