"""The gated activation of the feed-forward block (Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, declare, op, ort


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _swiglu_fake(input: Tensor, dim: int = -1) -> Tensor:
    shape = list(input.shape)
    shape[dim] //= 2
    return input.new_empty(shape)


def _swiglu_onnx(input, dim: int = -1):  # type: ignore[no-untyped-def]
    # x * sigmoid(x), not Swish: onnxruntime fuses the pair and expands Swish.
    gate, up = op.Split(input, num_outputs=2, axis=dim)
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


def _swiglu_onnx_cpu(input, dim: int = -1):  # type: ignore[no-untyped-def]
    gate, up = op.Split(input, num_outputs=2, axis=dim)
    gated = ort.QuickGelu(gate, alpha=1.0)  # with that factor it is x * sigmoid(x)
    declare(gated, *input.shape[:-1], input.shape[-1] // 2)
    return op.Mul(gated, up)


SWIGLU = Contract(
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    reference=_swiglu,
    fake=_swiglu_fake,
    onnx=_swiglu_onnx,
    onnx_cpu=_swiglu_onnx_cpu,
)
