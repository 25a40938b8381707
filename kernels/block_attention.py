"""Attention that sums by a token's position, not by its slot. So a row has the same bits in a tree, in a chain and
alone.

Text is summed in blocks of 64 positions: within a block position by position, then block by block. Blocks that no tree
can touch any more are *settled*. The blocks after them are *open*: there a row's ancestors may lie in any slots. Slots
that a row does not see add exact zeros, which change no sum. ``home`` gives the block that a slot's token belongs to.
So a block's border falls between the same two tokens for every row.

One condition is left to the machine: a matrix product must add each element's terms in order, at any number of rows.
It holds for onnxruntime's kernels up to 256 terms and 64 columns, unless one row and factor 1 select another kernel.
So no factor here is 1, and columns come 64 at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.attention import eager_attention
from draftwood.kernels.contract import Contract, op, ort

# T query rows, N query heads, K key/value heads, G = N / K, X = G * T, D head dimension, B slots of a block,
# F settled blocks, A open blocks, O = A * B open slots, S = (F + A) * B, Z blocks that the open tokens belong to

_COLUMNS = 64
# Exact: the weights of the next product double the halved values.
_HALF = 0.5


def _block_attention(
    query: Tensor,
    settled_key: Tensor,
    settled_value: Tensor,
    open_key: Tensor,
    open_value: Tensor,
    bias: Tensor,
    home: Tensor,
    weight: Tensor,
    chain: Tensor,
    nothing: Tensor,
    heads: int,
    scale: float,
) -> Tensor:
    # Exact arithmetic: the order of the sums does not matter.
    pairs = ((settled_key, open_key), (settled_value, open_value))
    key_KSD, value_KSD = (torch.cat(pair).transpose(0, 1).flatten(1, 2) for pair in pairs)
    text_TS = (nothing < 0).expand(bias.shape[0], settled_key.shape[0] * settled_key.shape[2])
    masked_TS = torch.cat((text_TS, bias < -1e30), 1)
    query_1NTD = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    out = eager_attention(query_1NTD, key_KSD[None], value_KSD[None], masked_TS[None, None], scale)
    return out.transpose(1, 2).flatten(-2)


def _block_attention_fake(query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)


def _block_attention_onnx(  # type: ignore[no-untyped-def]
    query,
    settled_key,
    settled_value,
    open_key,
    open_value,
    bias,
    home,
    weight,
    chain,
    nothing,
    heads: int,
    scale: float,
):
    _, kv_heads, block, dim = settled_key.shape
    groups = heads // kv_heads
    query_KGTD = op.Transpose(op.Reshape(query, _ints(-1, kv_heads, groups, dim)), perm=[1, 2, 0, 3])
    query_1KXD = op.Reshape(query_KGTD, _ints(1, kv_heads, -1, dim))
    shape = op.Concat(_ints(1, kv_heads, groups), op.Shape(bias), axis=0)
    far_FKXB, near_ZKXO = _exponentials(query_1KXD, settled_key, _turned(open_key), bias, home, nothing, shape, scale)
    ones_B1, ones_O1 = (op.ConstantOfShape(size, value=_ones()) for size in (_ints(block, 1), _column(bias)))
    total = _summed((far_FKXB, ones_B1), (near_ZKXO, [ones_O1]), weight, chain)
    pieces = _pieces(_turned(open_value), dim)
    mixed = _summed((far_FKXB, settled_value), (near_ZKXO, pieces), weight, chain)
    out_KGTD, total_KGT1 = (op.Reshape(x, _ints(kv_heads, groups, -1, n)) for x, n in ((mixed, dim), (total, 1)))
    out_TKGD = op.Transpose(op.Div(out_KGTD, total_KGT1), perm=[2, 0, 1, 3])
    return op.Reshape(out_TKGD, _ints(1, -1, heads * dim))


def _exponentials(query, settled_key, open_key, bias, home, nothing, shape, scale: float):  # type: ignore[no-untyped-def]
    """exp of the scores: over settled blocks [F, K, X, B], and over open slots by their token's block [Z, K, X, O]."""
    far = ort.FusedMatMul(query, settled_key, transB=1, alpha=scale)
    peak = op.ReduceMax(op.ReduceMax(far, _ints(-1)), _ints(0))
    near = ort.FusedMatMul(query, open_key, transB=1, alpha=scale)
    near = op.Reshape(op.Add(op.Reshape(near, shape), bias), op.Shape(near))
    top = op.Max(op.Add(peak, nothing), op.ReduceMax(near, _ints(-1)))
    # If no block is settled yet, the placeholder block must not overflow before it is left out.
    far = op.Exp(op.Sub(far, op.Max(top, peak)))
    ends = op.Shape(near, start=1)
    near = op.Mul(op.Reshape(op.Exp(op.Sub(near, top)), shape), home)
    return far, op.Reshape(near, op.Concat(_ints(-1), ends, axis=0))


def _summed(far, near, weight, chain):  # type: ignore[no-untyped-def]
    """Weights times the slots' values, summed within each block, then over the blocks: [1, K * X * n]."""
    pieces = [ort.FusedMatMul(near[0], piece, alpha=_HALF) for piece in near[1]]
    near_ZKXn = pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=-1)
    far_FKXn = ort.FusedMatMul(*far, alpha=_HALF)
    far_1n = ort.FusedMatMul(weight, op.Reshape(far_FKXn, _ints(0, -1)), alpha=_HALF)
    blocks = op.Concat(far_1n, op.Reshape(near_ZKXn, _ints(0, -1)), axis=0)
    return ort.FusedMatMul(chain, blocks, alpha=_HALF)


def _turned(cache):  # type: ignore[no-untyped-def]
    """Open blocks [A, K, B, D] as slots side by side, [1, K, O, D]."""
    _, kv_heads, _, dim = cache.shape
    return op.Reshape(op.Transpose(cache, perm=[1, 0, 2, 3]), _ints(1, kv_heads, -1, dim))


def _pieces(value, dim: int):  # type: ignore[no-untyped-def]
    """[1, K, O, D] by 64 columns."""
    cuts = range(0, dim, _COLUMNS)
    if len(cuts) == 1:
        return [value]
    return [op.Slice(value, _ints(at), _ints(min(at + _COLUMNS, dim)), _ints(-1)) for at in cuts]


def _column(bias):  # type: ignore[no-untyped-def]
    """The shape [O, 1]."""
    return op.Concat(op.Shape(bias, start=1), _ints(1), axis=0)


def _ints(*values: int):  # type: ignore[no-untyped-def]
    return op.Constant(value_ints=list(values))


def _ones():  # type: ignore[no-untyped-def]
    import onnx  # where a form is built, and nowhere else

    return onnx.helper.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0])


BLOCK_ATTENTION = Contract(
    "block_attention(Tensor query, Tensor settled_key, Tensor settled_value, Tensor open_key, Tensor open_value, "
    "Tensor bias, Tensor home, Tensor weight, Tensor chain, Tensor nothing, int heads, float scale) -> Tensor",
    reference=_block_attention,
    fake=_block_attention_fake,
    onnx_cpu=_block_attention_onnx,
    namespace="draftwood",
)
"""query [1, T, N*D]; settled key and value [F, K, B, D], open ones [A, K, B, D]: the rows [1, T, N*D].

bias [T, O] is 0 where a row sees an open slot, below -1e30 where not. home [Z, 1, 1, T, O] is 1 where it sees the slot
and the slot's token belongs to block z of the open text, else 0. weight [1, F] and chain [1, 1 + Z] are 2. Where
nothing is settled F is 1, weight is 0, nothing [1] is -1e38 (else 0), and the block may hold any finite numbers. D is
at most 128.
"""
