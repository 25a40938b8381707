"""Products of weights of four bits with rows of a half type: the NPU's WeightQuantBatchMatmulV2.

A weight is (whole + offset) * scale. Whole numbers are -8 to 7. Eight are in a word along the outputs, the first in the
lowest bits, as torch_npu's npu_convert_weight_to_int4pack packs them. Each group of inputs has a scale and an offset.
The reference is the exact product in fp32. The kernel's rounding depends on the number of rows;
`draftwood.compiler.ge.operators.int4` computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract

# T rows, H inputs, O outputs, G groups of inputs, W = O / 8 words

# Groups that the kernel takes with rows cut in digits, the larger first, and what the outputs are a multiple of
# (ops-nn, matmul/weight_quant_batch_matmul_v2, op_tiling/..._tiling_msd.cpp, IsCapable).
GROUPS, OUTPUTS = (128, 64), 64
# Digits that a row is cut in.
DIGITS = 3
_BITS, _WORD = 4, 8
_MIDDLE = 1 << (_BITS - 1)


def most_rows(group: int) -> int:
    """Rows of a product up to which each is cut in digits; with more the weights are rounded to the rows' type."""
    return group // 8


def packed_words(whole: Tensor) -> Tensor:
    """int32 [H, W] from uint8 [O, H] below 16, centred on 8."""
    nibbles_HWX = (whole.t() ^ _MIDDLE).int().unflatten(1, (-1, _WORD))  # in two's complement
    words_HW = torch.zeros_like(nibbles_HWX[..., 0])
    for place in range(_WORD):
        words_HW |= nibbles_HWX[..., place] << (_BITS * place)
    return words_HW


def whole_numbers(words: Tensor) -> Tensor:
    """float32 [H, O], -8 to 7, of int32 [H, W]."""
    nibbles = torch.stack([(words >> (_BITS * place)) & 15 for place in range(_WORD)], -1).flatten(-2)
    return ((nibbles ^ _MIDDLE) - _MIDDLE).float()


def matrix(words: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """The weights [H, O], float32: exact for scales of a half type."""
    whole_GXO = whole_numbers(words).unflatten(0, (scale.shape[0], -1))
    shifted = whole_GXO if offset is None else whole_GXO + offset.float()[:, None]
    return (shifted * scale.float()[:, None]).flatten(0, 1)


def _product(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    rest = (quant_scale, quant_offset, weight_dtype)
    if weight.dtype != torch.int32 or any(option is not None for option in rest) or inner_precise:
        raise NotImplementedError("only words of eight weights, with sums that are not rounded, have a reference")
    out = x.float() @ matrix(weight, antiquant_scale, antiquant_offset)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _fake(x: Tensor, weight: Tensor, *rest: object, **options: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1] * _WORD))


WEIGHT_QUANT_BATCHMATMUL = Contract(
    "npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None,"
    " Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0,"
    " int inner_precise=0, int? weight_dtype=None) -> Tensor",
    reference=_product,
    fake=_fake,
)
"""x [T, H], weight int32 [H, W], scales and offsets [G, O] in x's type, bias [O] (float32 where x is bfloat16):
[T, O]."""
