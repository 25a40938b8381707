"""A CPU's attention of a step's rows: from rows of qkv to attended rows, by onnxruntime's operator over written caches.

Which rows stand together is an input: a row that the operator would sum alone comes twice, and no product sees that.
The operator reads keys and values once for each query head. If the heads that share them stand as rows, it reads them
once for all of these. Keys and values of a row are then there once for each of its heads; the mask hides all but one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.attention import APPEND_ATTENTION
from draftwood.kernels.contract import Contract, op, ort
from draftwood.kernels.norm import RMS_NORM
from draftwood.kernels.rotary import ROTARY_ROWS

# T rows, A rows attended to together, X rows of qkv, E = (N + 2 K) * D their width, S visible slots,
# N query heads, K key/value heads, D head dimension, C cache slots, P positions. A row of attention has M query heads:
# N, or K if heads stand as rows

# The operator turns heads of a multiple of this itself.
_TURNED = 16


def _rows_attention(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    queries: Tensor,
    results: Tensor,
    positions: Tensor,
    bias: Tensor,
    last: Tensor,
    total: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    heads: int,
    kv_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dim = key_cache.shape[-1]
    together = _heads_together(queries, heads, kv_heads)
    if together == heads:
        picked_AE = qkv[queries[0]]
    else:
        picked_AE = qkv.unflatten(-1, (-1, dim))[queries[0, ..., 0], queries[0, ..., 1]].flatten(1)
    widths = [together * dim, kv_heads * dim, kv_heads * dim]
    q, k, v = (part[None] for part in picked_AE.split(widths, -1))
    if q_gain is not None and k_gain is not None:
        q, k = (_normed(x, gain, epsilon) for x, gain in ((q, q_gain), (k, k_gain)))
    tables = cos[positions[0]], sin[positions[0]]
    q, k = ROTARY_ROWS.reference(q, *tables, together), ROTARY_ROWS.reference(k, *tables, kv_heads)
    out, *written = APPEND_ATTENTION.reference(
        q, k, v, key_cache, value_cache, bias, last, total, together, kv_heads, dim**-0.5
    )
    if together == heads:
        return out[results[:, 0], results[:, 1]], written[0], written[1]
    out_TND = out.unflatten(-1, (-1, dim))[results[..., 0], results[..., 1], results[..., 2]]
    return out_TND.flatten(1), written[0], written[1]


def _heads_together(queries: Any, heads: int, kv_heads: int) -> int:
    """M: the query heads of a row in attention."""
    return kv_heads if len(queries.shape) == 4 else heads


def _normed(x_1AE: Tensor, gain_D: Tensor, epsilon: float) -> Tensor:
    heads = x_1AE.unflatten(-1, (-1, gain_D.shape[0]))
    normed: Tensor = RMS_NORM.reference(heads, gain_D, epsilon)[0]
    return normed.flatten(-2)


def _fake(
    qkv: Tensor, key_cache: Tensor, value_cache: Tensor, cos: Tensor, sin: Tensor, queries: Tensor, results: Tensor,
    positions: Tensor, bias: Tensor, last: Tensor, total: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
    heads: int, kv_heads: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = qkv.new_empty((results.shape[0], heads * key_cache.shape[-1]))
    return out, torch.empty_like(key_cache), torch.empty_like(value_cache)


def _onnx(  # type: ignore[no-untyped-def]
    qkv, key_cache, value_cache, cos, sin, queries, results, positions, bias, last, total, q_gain, k_gain,
    heads: int, kv_heads: int, epsilon: float,
):  # fmt: skip
    dim, together = key_cache.shape[-1], _heads_together(queries, heads, kv_heads)
    if together == heads:
        q, k, v = op.Gather(qkv, queries, axis=0), None, None  # [1, A, E]
    else:
        each = op.Reshape(qkv, op.Constant(value_ints=[0, heads + 2 * kv_heads, dim]))
        picked = op.GatherND(each, queries)  # [1, A, M + 2 K, D]
        q, k, v = op.Reshape(picked, op.Constant(value_ints=[0, 0, (together + 2 * kv_heads) * dim])), None, None
    turned = dim % _TURNED == 0
    if q_gain is not None or not turned:
        from draftwood.kernels.rows_attention_onnx import apart  # where a form is built, and nowhere else

        q, k, v = apart(q, op.Constant(value_ints=[together * dim, kv_heads * dim, kv_heads * dim]))
    if q_gain is not None:
        q, k = (_normed_onnx(x, gain, dim, epsilon) for x, gain in ((q, q_gain), (k, k_gain)))
    if not turned:
        q, k = (
            ort.RotaryEmbedding(x, positions, cos, sin, num_heads=number, interleaved=0)
            for x, number in ((q, together), (k, kv_heads))
        )
    out, keys, values = ort.GroupQueryAttention(
        q,
        k,
        v,
        key_cache,
        value_cache,
        last,
        total,
        *((cos, sin, positions) if turned else (None, None, None)),
        bias,
        num_heads=together,
        kv_num_heads=kv_heads,
        scale=dim**-0.5,
        do_rotary=int(turned),
    )
    if together == heads:
        return op.GatherND(out, results), keys, values
    of_heads = op.Reshape(out, op.Constant(value_ints=[0, 0, kv_heads, dim]))
    ordered = op.Reshape(op.GatherND(of_heads, results), op.Constant(value_ints=[0, heads * dim]))  # [T, N*D]
    return ordered, keys, values


def _normed_onnx(x, gain, dim: int, epsilon: float):  # type: ignore[no-untyped-def]
    assert RMS_NORM.onnx_cpu
    apart = op.Reshape(x, op.Constant(value_ints=[0, 0, -1, dim]))
    return op.Reshape(RMS_NORM.onnx_cpu(apart, gain, epsilon)[0], op.Constant(value_ints=[0, 0, -1]))


ROWS_ATTENTION = Contract(
    "rows_attention(Tensor qkv, Tensor key_cache, Tensor value_cache, Tensor cos, Tensor sin, Tensor queries,"
    " Tensor results, Tensor positions, Tensor bias, Tensor last, Tensor total, Tensor? q_gain, Tensor? k_gain,"
    " int heads, int kv_heads, float epsilon) -> (Tensor, Tensor, Tensor)",
    reference=_rows_attention,
    fake=_fake,
    onnx_cpu=_onnx,
    namespace="draftwood",
)
"""Rows qkv [X, E] attend to caches [1, K, C, D], and are written there at slots S - A .. S - 1.

queries int64 [1, A] are the rows attended to together. positions int64 [1, A] are theirs in the half tables cos and sin
[P, D/2]. bias [1, 1, A, S] masks slots for each (0 = seen, below -1e30 = masked). results int64 [T, 2] is each result's
place in [1, A, N*D]. last int32 [1] = S - 1, total int32 [] = S. If no slot precedes the rows (S = A), the operator
reads the first position only and counts from it. If q_gain and k_gain [D] are given, they normalise q and k head by
head. Returns rows [T, N*D] and both caches.

With heads as rows, queries int64 [1, A, 3 K, 2] are the row and the place among its N + 2 K heads of each head that
stands in a row of attention: K query heads, the keys, the values. results int64 [T, N, 3] are each head's place in
[1, A, K, D].
"""
