"""RMS normalisation, alone and fused with the residual addition (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op, ort, standard

# T rows, H features


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    # The statistics are in fp32 and the product is rounded once, as openPangu and Llama define it.
    x_TH = input.float()
    rstd_T1 = torch.rsqrt(x_TH.pow(2).mean(-1, keepdim=True) + epsilon)
    return (gamma * (x_TH * rstd_T1).to(input.dtype)).to(input.dtype), rstd_T1


def _rms_norm_fake(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)


def _rms_norm_onnx(input, gamma, epsilon: float = 1e-6):  # type: ignore[no-untyped-def]
    # This order of operators is the one that onnxruntime fuses into SimplifiedLayerNormalization.
    mean = op.ReduceMean(op.Pow(input, op.Constant(value_float=2.0)), op.Constant(value_ints=[-1]), keepdims=1)
    rms = op.Sqrt(op.Add(mean, op.Constant(value_float=epsilon)))
    return op.Mul(op.Div(input, rms), gamma), op.Reciprocal(rms)


def _rms_norm_onnx_cpu(input, gamma, epsilon: float = 1e-6):  # type: ignore[no-untyped-def]
    return standard.SimplifiedLayerNormalization(input, gamma, axis=-1, epsilon=epsilon)


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    y, rstd = _rms_norm(total, gamma, epsilon)
    return y, rstd, total


def _add_rms_norm_fake(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _rms_norm_fake(x1, gamma, epsilon)
    return y, rstd, torch.empty_like(x1)


def _add_rms_norm_onnx(x1, x2, gamma, epsilon: float = 1e-6):  # type: ignore[no-untyped-def]
    total = op.Add(x1, x2)
    y, rstd = _rms_norm_onnx(total, gamma, epsilon)
    return y, rstd, total


def _add_rms_norm_onnx_cpu(x1, x2, gamma, epsilon: float = 1e-6):  # type: ignore[no-untyped-def]
    y, _, rstd, total = ort.SkipSimplifiedLayerNormalization(x1, x2, gamma, epsilon=epsilon)
    return y, rstd, total


RMS_NORM = Contract(
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    reference=_rms_norm,
    fake=_rms_norm_fake,
    onnx=_rms_norm_onnx,
    onnx_cpu=_rms_norm_onnx_cpu,
)
ADD_RMS_NORM = Contract(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    reference=_add_rms_norm,
    fake=_add_rms_norm_fake,
    onnx=_add_rms_norm_onnx,
    onnx_cpu=_add_rms_norm_onnx_cpu,
)
