"""Operators that round rows as they make them, and the product of rows that are rounded already (W8A8 on an NPU).

One kernel does the work of two: of a norm or an activation, and of DynamicQuant. It leaves out the rounding to a half
type in between. Arithmetic as in the kernels for the 910B (ops-nn, norm/add_rms_norm_dynamic_quant and
quant/dequant_swiglu_quant): fp32 throughout, ties to even. A row of zeros, which the first leaves open, is zeros with
the scale 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract
from draftwood.kernels.quantised import LARGEST, products

# T rows, H inputs, O outputs, I width of a gated activation

# Ten rows of an activation's operand have to be less than a vector core holds (ops-nn, quant/dequant_swiglu_quant,
# README, constraints for Atlas A2 and A3). The tiling in the operator's source works through wider rows in pieces, but
# what the document excludes is not used.
SWIGLU_BYTES = 192 * 1024
SWIGLU_ROWS = 10


def swiglu_fits(width: int, rows: int) -> bool:
    """Whether DequantSwigluQuant takes ``rows`` rows [2 * width] of a half type, by its document."""
    return SWIGLU_ROWS * 2 * 2 * width + rows * 4 / 40 < SWIGLU_BYTES


_FIVE = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _rounded(x_TH: Tensor, factor_T1: Tensor) -> Tensor:
    return torch.where(factor_T1.isfinite(), x_TH * factor_T1, 0.0).round().to(torch.int8)


def _add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> _FIVE:
    if not all(option is None for option in (smooth_scale1, smooth_scale2, beta, output_mask, y_dtype)):
        raise NotImplementedError("only the norm of a sum, rounded to int8, has a reference")
    x_TH = x1.float() + x2.float()
    y_TH = x_TH * torch.rsqrt(x_TH.pow(2).mean(-1, keepdim=True) + epsilon) * gamma.float()
    factor_T1 = LARGEST / y_TH.abs().amax(-1, keepdim=True)
    nothing = x1.new_empty(0, dtype=torch.int8)
    scale_T = (1 / factor_T1).squeeze(-1)
    return _rounded(y_TH, factor_T1), nothing, x_TH.to(x1.dtype), scale_T, nothing.to(torch.float32)


def _add_rms_norm_dynamic_quant_fake(x1: Tensor, *rest: object, **options: object) -> _FIVE:
    whole, scale = torch.empty_like(x1, dtype=torch.int8), x1.new_empty(x1.shape[:-1], dtype=torch.float32)
    nothing = x1.new_empty(0, dtype=torch.int8)
    return whole, nothing, torch.empty_like(x1), scale, nothing.to(torch.float32)


def _dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    absent = (weight_scale, activation_scale, bias, quant_scale, quant_offset, group_index, dst_type, round_mode)
    if not all(option is None for option in (*absent, activate_dim)) or (quant_mode, swiglu_mode) != (1, 0):
        raise NotImplementedError("only a half type's gated activation, rounded to int8 by its rows, has a reference")
    left, right = x.float().chunk(2, -1)
    gate, up = (left, right) if activate_left else (right, left)
    gated_TI = gate / (1 + torch.exp(-gate)) * up
    scale_T1 = gated_TI.abs().amax(-1, keepdim=True) / LARGEST
    return _rounded(gated_TI, 1 / scale_T1), scale_T1.squeeze(-1)


def _dequant_swiglu_quant_fake(x: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return x.new_empty(shape, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _rounded_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out_TO = products(x, weight).float() * weight_scale * x_scale[:, None]
    return (out_TO if bias is None else out_TO + bias.float()).to(dtype)


def _rounded_linear_fake(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]), dtype=dtype)


ADD_RMS_NORM_DYNAMIC_QUANT = Contract(
    "npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None,"
    " Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-6, bool[2]? output_mask=None,"
    " int? y_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_add_rms_norm_dynamic_quant,
    fake=_add_rms_norm_dynamic_quant_fake,
)
"""The norm of x1 + x2 [T, H], int8, and its scales [T]: (rows, none, the sum in x1's type, scales, none)."""

DEQUANT_SWIGLU_QUANT = Contract(
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None,"
    " Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None,"
    " bool activate_left=False, int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None,"
    " int swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, float glu_bias=1.0) -> (Tensor, Tensor)",
    reference=_dequant_swiglu_quant,
    fake=_dequant_swiglu_quant_fake,
)
"""The gated activation of x [T, 2*I], int8 [T, I], and its scales [T]."""

ROUNDED_LINEAR = Contract(
    "rounded_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype)"
    " -> Tensor",
    reference=_rounded_linear,
    fake=_rounded_linear_fake,
    namespace="draftwood",
)
"""`quantised_linear` of rows int8 [T, H] and their scales [T]."""
