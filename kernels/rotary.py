"""Rotary position embedding in the rotate-half form (Su et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op, ort

# T rows, N heads, D head dimension


def _rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def _rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    if rotary_mode != "half" or rotate is not None:
        raise NotImplementedError("only rotary_mode='half' without a rotate matrix has a reference")
    return input * r1 + _rotate_half(input) * r2


def _rotary_mul_fake(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    return torch.empty_like(input)


def _rotary_mul_onnx(input, r1, r2, rotary_mode: str = "half", rotate=None):  # type: ignore[no-untyped-def]
    low, high = op.Split(input, num_outputs=2, axis=-1)
    return op.Add(op.Mul(input, r1), op.Mul(op.Concat(op.Neg(high), low, axis=-1), r2))


ROTARY_MUL = Contract(
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    reference=_rotary_mul,
    fake=_rotary_mul_fake,
    onnx=_rotary_mul_onnx,
)


def _rotary_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotary_mul(q, cos, sin), _rotary_mul(k, cos, sin)


def _rotary_pair_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotary_pair_onnx(q, k, cos, sin):  # type: ignore[no-untyped-def]
    return _rotary_mul_onnx(q, cos, sin), _rotary_mul_onnx(k, cos, sin)


ROTARY_PAIR = Contract(
    "rotary_pair(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)",
    reference=_rotary_pair,
    fake=_rotary_pair_fake,
    onnx=_rotary_pair_onnx,
    namespace="draftwood",
)
"""q [1, T, N, D] and k [1, T, K, D] by cos, sin [1, T, 1, D]: the NPU's ApplyRotaryPosEmb.

torch_npu's own name for it, npu_apply_rotary_pos_emb, is put to the NPU with a copy of q and of k before it, because
the operator writes over its inputs. Ours is for those that nobody else reads.
"""


def _rotary_rows(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    x_TND = x.unflatten(-1, (heads, -1))[0]
    cos_T1D, sin_T1D = (torch.cat((t, t), -1).unsqueeze(1) for t in (cos, sin))
    return _rotary_mul(x_TND, cos_T1D, sin_T1D).reshape(x.shape)


def _rotary_rows_fake(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    return torch.empty_like(x)


def _rotary_rows_onnx(x, cos, sin, heads: int):  # type: ignore[no-untyped-def]
    # One position id means "rows 0, 1, ... of the tables": the tables come gathered by position already.
    start = op.Constant(value_ints=[0])
    return ort.RotaryEmbedding(x, start, cos, sin, num_heads=heads, interleaved=0)


ROTARY_ROWS = Contract(
    "rotary_rows(Tensor x, Tensor cos, Tensor sin, int heads) -> Tensor",
    reference=_rotary_rows,
    fake=_rotary_rows_fake,
    onnx_cpu=_rotary_rows_onnx,
    namespace="draftwood",
)
"""x [1, T, N*D] by the half tables cos, sin [T, D/2]: onnxruntime's RotaryEmbedding as one operator."""
