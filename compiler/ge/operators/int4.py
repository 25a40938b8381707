"""The product of packed weights of four bits as the kernels of a 910B compute it: by the number of rows.

Source: ops-nn 9.1.0, matmul/weight_quant_batch_matmul_v2. For words in groups of 64 or 128 and deterministic sums, its
tiling (op_tiling/..._registry.cpp) uses two templates:

* up to an eighth of a group of rows: MSD (..._tiling_msd.cpp, op_kernel/..._msd_split_k.h). Each row is cut, group by
  group, in three digits of four bits, as shares of its largest number. Their products with the weights are summed
  exactly; digits and groups are added up in fp32, always in the same order. So a row has the same bits next to any
  others.
* more rows: CUSTOM (..._tiling_custom.cpp). Weights are rounded to the rows' type and multiplied as others are.

Without deterministic sums a third one adds the groups up in any order (MSD-group, ..._tiling_msd_group.cpp). Two things
are assumed, since the sources do not say: a vector core multiplies and adds with two roundings, and it adds neighbours
first.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.operators.network import MatMul
from draftwood.compiler.ge.operators.table import FLOATS, Refusal, one_type, operator
from draftwood.kernels.int4 import GROUPS, OUTPUTS, matrix, most_rows, whole_numbers

# T rows, H inputs, X inputs of a group, G groups, O outputs

# The factor of a digit's remainder: twice the largest digit and nearly a half.
_FACTORS = (7.49, 14.98, 14.98)
_TOGETHER = 1024  # inputs whose groups are worked through one after the other, offsets first


@operator
def WeightQuantBatchMatmulV2(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    transpose_x: Literal[False] = False,
    transpose_weight: Literal[False] = False,
    antiquant_group_size: int = 0,
    dtype: Literal[-1] = -1,
    inner_precise: Literal[0] = 0,
) -> Tensor:
    """x [T, H] times words int32 [H, O / 8]; scales and offsets [G, O]; the bias is added before the one rounding."""
    kind = one_type(FLOATS - {torch.float32}, x, *(t for t in (antiquant_scale, antiquant_offset) if t is not None))
    if weight.dtype != torch.int32 or x.dim() != 2:
        raise Refusal(f"weight is {weight.dtype}, x has {x.dim()} dimensions; expected int32 words and a matrix")
    group, outputs = antiquant_group_size, antiquant_scale.shape[-1]
    if group not in GROUPS or outputs % OUTPUTS or x.shape[1] != group * antiquant_scale.shape[0]:
        raise Refusal(f"groups of {group}, {outputs} outputs; expected {GROUPS}, and a multiple of {OUTPUTS}")
    if x.is_meta:
        return x.new_empty(x.shape[0], outputs)
    if x.shape[0] > most_rows(group):
        return MatMul(x, matrix(weight, antiquant_scale, antiquant_offset).to(kind), bias)
    out = _digit_sums(x.float(), weight, antiquant_scale.float(), antiquant_offset)
    return _rounded(out if bias is None else out + bias.float(), kind)


def _digit_sums(x: Tensor, weight: Tensor, scale_GO: Tensor, offset_GO: Tensor | None) -> Tensor:
    """float32 [T, O]."""
    groups = scale_GO.shape[0]
    x_GTX = x.unflatten(1, (groups, -1)).transpose(0, 1)
    whole_GXO = whole_numbers(weight).unflatten(0, (groups, -1))
    largest_GT1 = x_GTX.abs().amax(-1, keepdim=True)
    parts_GTO, factor = torch.zeros(()), torch.ones(())
    for digits_GTX, by in zip(_digits(x_GTX, largest_GT1), _FACTORS, strict=True):
        factor = factor * torch.tensor(by)
        # Exact: digits of 7 and weights of 8, 128 of them, stay below 2 ** 24.
        parts_GTO = parts_GTO + (digits_GTX @ whole_GXO) * (1 / factor)
    parts_GTO = parts_GTO * scale_GO[:, None] * largest_GT1
    out, pack = x.new_zeros(x.shape[0], scale_GO.shape[1]), _TOGETHER // x_GTX.shape[-1]
    for first in range(0, groups, pack):
        several = range(first, min(first + pack, groups))
        for g in several if offset_GO is not None else ():
            assert offset_GO is not None
            out = out + _sum(x_GTX[g])[:, None] * (scale_GO[g] * offset_GO[g].float())
        for g in several:
            out = out + parts_GTO[g]
    return out


def _digits(x_GTX: Tensor, largest_GT1: Tensor) -> list[Tensor]:
    """Three of -7 to 7, the largest first; in a group of zeros the kernel divides by zero, which counts zero times."""
    rest, digits = torch.where(largest_GT1 > 0, x_GTX / largest_GT1, 0.0), []
    for by in _FACTORS:
        scaled = rest * by
        digits.append(torch.where(scaled.frac().abs() == 0.5, scaled + scaled.sign() / 2, scaled.round()))
        rest = scaled - digits[-1]
    return digits


def _sum(x_TX: Tensor) -> Tensor:
    """[T] of 64 or 128: halves, then neighbours."""
    x_TX = x_TX if x_TX.shape[1] == 64 else x_TX[:, :64] + x_TX[:, 64:]
    while x_TX.shape[1] > 1:
        x_TX = x_TX[:, ::2] + x_TX[:, 1::2]
    return x_TX[:, 0]


def _rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """Rounds to the nearest number of a half type; halves away from zero, unlike torch."""
    dropped = 16 if kind is torch.bfloat16 else 13
    bits = x.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return (bits & -(1 << dropped)).view(torch.float32).to(kind)
