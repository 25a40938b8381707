"""Products of packed weights with rows in int8, a scale a block of 32 inputs on both sides: onnxruntime's MatMulNBits.

At accuracy level 4 a row's block is rounded to int8 by its own largest value. Sums within a block are of whole numbers,
and blocks are added in fp32 (onnxruntime, core/mlas/lib/sqnbitgemm). With blocks of 32 a row has the same bits next to
any other rows. With larger blocks it has not if the number of rows is odd. This was checked on AVX512-VNNI; the proof
at a first opening checks it on any other machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, declare, op, ort

# T rows, H inputs, O outputs, B = H / 32 blocks of inputs, X bytes

BLOCK = 32
_LARGEST = 127
_ACCURACY = 4  # int8 rows
# Weights that the reference unpacks at a time: they stay in a processor's cache, and in memory that is used again. A
# matrix of 8960 x 1536 whole, in pages new at every call, took 124 ms of processor time; in such pieces 12. A process
# that has freed nothing large yet gives such memory back, and took 33 (a loaded machine).
TOGETHER = 1 << 19


def packed_blocks(whole: Tensor, bits: int) -> Tensor:
    """uint8 [..., N] below 2 ** bits as bytes [..., N * bits / 8], the first in the low bits; a last half is empty."""
    if bits == 8:
        return whole
    pairs = torch.nn.functional.pad(whole, (0, whole.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpacked(packed: Tensor, bits: int, numbers: int) -> Tensor:
    if bits == 8:
        return packed[..., :numbers].float()
    pairs = packed.to(torch.int16)
    # The low half stays in the first byte of a little-endian pair, and the high one moves to the second.
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.uint8)[..., :numbers].float()


def _matrix(weight: Tensor, scale_OB: Tensor, zero_OB: Tensor | None, bits: int) -> Tensor:
    """The numbers [O, H] that packed blocks stand for."""
    matrix_OBX = _unpacked(weight, bits, BLOCK)
    matrix_OBX -= float(1 << (bits - 1)) if zero_OB is None else zero_OB[..., None]
    return matrix_OBX.mul_(scale_OB[..., None]).flatten(1)


def _bits(weight: Tensor) -> int:
    return weight.shape[2] * 8 // BLOCK


def rounded_blocks(x: Tensor) -> Tensor:
    """x [..., H] as the products see it: every block's numbers at the nearest of 255 steps."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / _LARGEST
    steps = torch.where(scale > 0, blocks / scale, 0.0).round()
    return (steps * scale).flatten(-2)


def _nbits_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero: Tensor | None = None,
    bias: Tensor | None = None,
    weight_minimum: Tensor | None = None,
) -> Tensor:
    bits, x_TH, outputs = _bits(weight), rounded_blocks(x), max(1, TOGETHER // x.shape[-1])
    zero_OB = None if weight_zero is None else _unpacked(weight_zero, bits, weight.shape[1])
    parts = [slice(first, first + outputs) for first in range(0, len(weight), outputs)]
    matrices = (_matrix(weight[o], weight_scale[o], None if zero_OB is None else zero_OB[o], bits) for o in parts)
    out = torch.cat([x_TH @ matrix_OH.t() for matrix_OH in matrices], -1)
    if weight_minimum is not None:
        out = out + x.float().unflatten(-1, (-1, BLOCK)).sum(-1) @ weight_minimum
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _fake(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _onnx(x, weight, weight_scale, weight_zero=None, bias=None, weight_minimum=None):  # type: ignore[no-untyped-def]
    # Three axes and no bias: an HTP accepts no other form.
    first = op.Constant(value_ints=[0])
    product = _onnx_cpu(op.Unsqueeze(x, first), weight, weight_scale, weight_zero)
    declare(product, 1, *x.shape[:-1], weight.shape[0])
    out = op.Squeeze(product, first)
    out = out if weight_minimum is None else op.Add(out, _minima(x, weight_minimum))
    return out if bias is None else op.Add(out, bias)


def _minima(x, weight_minimum):  # type: ignore[no-untyped-def]
    blocks = weight_minimum.shape[0]
    # In Reshape a 0 keeps the axis.
    apart = op.Reshape(x, op.Constant(value_ints=[*[0] * (len(x.shape) - 1), blocks, BLOCK]))
    return op.MatMul(op.ReduceSum(apart, op.Constant(value_ints=[-1]), keepdims=0), weight_minimum)


def _onnx_cpu(x, weight, weight_scale, weight_zero=None, bias=None, weight_minimum=None):  # type: ignore[no-untyped-def]
    outputs, blocks, size = weight.shape
    product = ort.MatMulNBits(
        x,
        weight,
        weight_scale,
        weight_zero,
        None,
        bias,
        K=blocks * BLOCK,
        N=outputs,
        bits=size * 8 // BLOCK,
        block_size=BLOCK,
        accuracy_level=_ACCURACY,
    )
    if weight_minimum is None:
        return product
    declare(product, *x.shape[:-1], outputs)
    return op.Add(product, _minima(x, weight_minimum))


NBITS_LINEAR = Contract(
    "nbits_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? weight_zero=None, Tensor? bias=None,"
    " Tensor? weight_minimum=None) -> Tensor",
    reference=_nbits_linear,
    fake=_fake,
    onnx=_onnx,
    onnx_cpu=_onnx_cpu,
    namespace="draftwood",
)
"""x [T, H], weight uint8 [O, B, X], weight_scale float32 [O, B], weight_zero uint8 [O, bytes of B numbers] (the middle
where it is left out), bias [O], weight_minimum float32 [B, O]: [T, O] in x's type. X = 16 are four bits, 32 eight.

A minimum is added to all weights of a block, so it is multiplied by the sum of the row's block, which is not rounded.
"""
