"""Products of whole numbers: weights in int8 with a scale a column, rows in int8 with a scale a row (W8A8).

A row's scale depends on that row alone, and sums are exact. So a row has the same bits next to any other rows. The
arithmetic is that of the NPU's DynamicQuant and QuantBatchMatmulV3 (ops-nn, quant/dynamic_quant). A row becomes rint(x
* (127 / max|x|)), ties to even; its scale is max|x| * (1/127). The products are weighted in fp32, by the column's scale
and then the row's. The bias is added last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, declare, op, ort

# T rows, H inputs, O outputs

LARGEST = 127
# A row of nothing larger counts as zeros: 127 over it would not be a number. The NPU gives such a row the scale 0.
LEAST = 2.0**-100
# Products of int8 that sum exactly in fp32, in any order: 1024 * 127 * 128 < 2 ** 24.
_EXACT_INPUTS = 1024
# Columns that are made fp32 at a time, in memory that is used again.
_OUTPUTS = 512
# Rows of onnxruntime's fast kernels are uint8 with zero at 128 (signed rows have none before AVX-VNNI-INT8).
_ZERO_POINT = 128


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, H] as int8 [T, H] and the scales of its rows, float32 [T, 1]."""
    x_TH = x.float()
    largest_T1 = x_TH.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    return (x_TH * (LARGEST / largest_T1)).round().to(torch.int8), largest_T1 * (1 / LARGEST)


def products(x: Tensor, weight: Tensor) -> Tensor:
    """int32 [T, O] of int8 [T, H] and [H, O], exact on every machine."""
    lefts = [left.float() for left in x.split(_EXACT_INPUTS, -1)]
    return torch.cat([_summed(lefts, part) for part in weight.split(_OUTPUTS, 1)], -1)


def _summed(lefts: Sequence[Tensor], weight: Tensor) -> Tensor:
    total_TO = torch.zeros((*lefts[0].shape[:-1], weight.shape[1]), dtype=torch.int32, device=weight.device)
    for left, right in zip(lefts, weight.split(_EXACT_INPUTS), strict=True):
        total_TO += (left @ right.float()).to(torch.int32)
    return total_TO


def _quantised_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    x_TH, scale_T1 = quantise_rows(x)
    out_TO = products(x_TH, weight).float() * weight_scale * scale_T1
    return (out_TO if bias is None else out_TO + bias.float()).to(x.dtype)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]))


def _onnx(x, weight, weight_scale, bias=None):  # type: ignore[no-untyped-def]
    # One factor after the other: were both scales multiplied first, onnxruntime would fuse the bias in before the
    # row's scale (MatMulIntegerToFloatFusion).
    largest = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[-1]), keepdims=1)
    largest = op.Max(largest, op.Constant(value_float=LEAST))
    rounded = op.Round(op.Mul(x, op.Div(op.Constant(value_float=float(LARGEST)), largest)))
    zero = op.Cast(op.Constant(value_int=_ZERO_POINT), to=_UINT8)
    rows = op.Cast(op.Add(rounded, op.Constant(value_float=float(_ZERO_POINT))), to=_UINT8)
    sums = op.Cast(op.MatMulInteger(rows, weight, zero), to=_FLOAT)
    scaled = op.Mul(op.Mul(sums, weight_scale), op.Mul(largest, op.Constant(value_float=1 / LARGEST)))
    return scaled if bias is None else op.Add(scaled, bias)


def _onnx_cpu(x, weight, weight_scale, bias=None):  # type: ignore[no-untyped-def]
    """The product in fewer operators, with equal numbers: a step of 1 rounds, a scale of 1 keeps the column's scale."""
    largest = op.ReduceMax(op.Abs(x), op.Constant(value_ints=[-1]), keepdims=1)
    largest = op.Max(largest, op.Constant(value_float=LEAST))
    unit, zero = op.Constant(value_float=1.0), op.Cast(op.Constant(value_int=_ZERO_POINT), to=_UINT8)
    rows = op.QuantizeLinear(op.Mul(x, op.Div(op.Constant(value_float=float(LARGEST)), largest)), unit, zero)
    sums = ort.MatMulIntegerToFloat(rows, weight, unit, weight_scale, zero)
    declare(sums, *x.shape[:-1], weight.shape[1])
    scaled = op.Mul(sums, op.Mul(largest, op.Constant(value_float=1 / LARGEST)))
    return scaled if bias is None else op.Add(scaled, bias)


_FLOAT, _UINT8 = 1, 2  # onnx.proto, TensorProto.DataType

QUANTISED_LINEAR = Contract(
    "quantised_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None) -> Tensor",
    reference=_quantised_linear,
    fake=_fake,
    onnx=_onnx,
    onnx_cpu=_onnx_cpu,
    namespace="draftwood",
)
"""x [T, H], weight int8 [H, O], weight_scale float32 [O], bias [O]: [T, O] in x's type."""
