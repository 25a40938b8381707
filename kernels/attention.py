"""Attention of tree rows over a cache: the fused NPU operator, its eager form, and onnxruntime's operator.

Mask polarity follows torch_npu: True means *masked out*. One boolean mask [1, 1, T, C] serves all heads; several texts
(batch B) have one each, [B, 1, T, C].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op, ort

# T query rows, C cache slots, S visible slots, N query heads, K key/value heads, G = N / K, X = G * T,
# D head dimension


_FUSED_SCHEMA = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, "
    "Tensor? quant_scale2=None, Tensor? quant_offset2=None, Tensor? antiquant_scale=None, "
    "Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, "
    "Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, Tensor? block_table=None, "
    "Tensor? query_padding_size=None, Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, "
    "Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, "
    'int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout="BSH", '
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, "
    "int antiquant_mode=0, int key_antiquant_mode=0, int value_antiquant_mode=0, "
    "bool softmax_lse_flag=False) -> (Tensor, Tensor)"
)
# Besides its named parameters the reference may ignore inner_precise, which chooses between kernels; any other
# argument away from its default is refused.
_DEFAULTS = {"pre_tokens": 2147483647, "next_tokens": 2147483647}


def _is_default(name: str, value: object) -> bool:
    # A tensor or a list is never a default, even one of zeros.
    return value is None or (isinstance(value, int) and value == _DEFAULTS.get(name, 0))


def _refuse_unsupported(
    query: Any, key: Any, heads: int, kv_heads: int, layout: str, sparse_mode: int, rest: dict[str, object]
) -> None:
    odd = [name for name, value in rest.items() if name != "inner_precise" and not _is_default(name, value)]
    if odd or layout not in ("BNSD", "BSND") or sparse_mode not in (0, 1):
        raise NotImplementedError(
            f"fused attention: layout {layout}, sparse_mode {sparse_mode}, {', '.join(odd) or 'no extras'};"
            " the reference knows layouts BNSD and BSND and sparse_mode 0 or 1 without extras"
        )
    axis = layout.index("N")
    declared, actual = (heads, kv_heads or heads), (query.shape[axis], key.shape[axis])
    if declared != actual or query.shape[0] != key.shape[0]:
        raise NotImplementedError(
            f"fused attention: num_heads, num_key_value_heads are {declared}; the tensors have {actual}, of"
            f" {query.shape[0]} and {key.shape[0]} texts"
        )


def eager_attention(query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, scale: float) -> Tensor:
    """Plain grouped-query attention. A fully masked row gives zeros, as the fused kernel does.

    Args: query [1, N, T, D]; key and value [1, K, C, D]; masked bool [1, 1, >=T, >=C], True = masked out.
    Returns: [1, N, T, D] in the query's dtype; scores and softmax are fp32.
    """
    kv_heads, rows, slots = key.shape[1], query.shape[2], key.shape[2]
    # squeeze, not [0]: onnxruntime would copy the whole cache for an index.
    key_KCD, value_KCD = key.squeeze(0).float(), value.squeeze(0).float()
    query_KXD = query.squeeze(0).unflatten(0, (kv_heads, -1)).flatten(1, 2).float()
    scores_KGTC = (query_KXD @ key_KCD.transpose(-1, -2)).unflatten(1, (-1, rows)) * scale
    if masked is not None:
        masked_TC = masked.reshape(masked.shape[-2:])[:rows, :slots]
        scores_KGTC = scores_KGTC.masked_fill(masked_TC, float("-inf"))
    weights_KGTC = torch.softmax(scores_KGTC, -1)
    if masked is not None:
        weights_KGTC = weights_KGTC.masked_fill(masked_TC, 0.0)
    out_KXD = weights_KGTC.flatten(1, 2) @ value_KCD
    return out_KXD.unflatten(1, (-1, rows)).flatten(0, 1).unsqueeze(0).to(query.dtype)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    **rest: object,
) -> tuple[Tensor, Tensor]:
    _refuse_unsupported(query, key, num_heads, num_key_value_heads, input_layout, sparse_mode, rest)
    turned = input_layout == "BSND"
    # In one order in memory, so that both layouts sum alike and their results are equal to the bit.
    q, k, v = (x.transpose(1, 2).contiguous() if turned else x for x in (query, key, value))
    texts = range(query.shape[0])
    masks = [atten_mask[i : i + 1] if atten_mask is not None and len(atten_mask) > 1 else atten_mask for i in texts]
    out = torch.cat([eager_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], masks[i], scale) for i in texts])
    return out.transpose(1, 2).contiguous() if turned else out, query.new_empty(0, dtype=torch.float32)


def _fused_fake(query: Tensor, key: Tensor, value: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    # Contiguous for any strides of the query: otherwise a trace would view memory that has to be copied.
    return query.new_empty(query.shape), query.new_empty(0, dtype=torch.float32)


def _fused_onnx(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    *,
    atten_mask=None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    **rest,
):
    _refuse_unsupported(query, key, num_heads, num_key_value_heads, input_layout, sparse_mode, rest)
    if input_layout != "BNSD" or query.shape[0] != 1:
        raise NotImplementedError(
            f"fused attention: layout {input_layout} of {query.shape[0]} texts has no ONNX form; expected BNSD of one"
        )
    kv_heads = num_key_value_heads or num_heads
    rows, dim = query.shape[2], query.shape[3]
    grouped = op.Reshape(query, op.Constant(value_ints=[kv_heads, (num_heads // kv_heads) * rows, dim]))
    keys, values = (op.Squeeze(t, op.Constant(value_ints=[0])) for t in (key, value))
    scores = op.MatMul(grouped, op.Transpose(keys, perm=[0, 2, 1]))
    scores = op.Mul(scores, op.Constant(value_float=scale))
    split = op.Constant(value_ints=[kv_heads, num_heads // kv_heads, rows, -1])
    scores = op.Reshape(scores, split)
    if atten_mask is not None:
        # Finite, so that a row without a visible slot cannot make a NaN. Such a row gives the mean of all values here,
        # zeros on the NPU. Padded rows see themselves, so no graph of ours has such a row.
        scores = op.Where(_cut(atten_mask, rows, key.shape[2]), op.Constant(value_float=-3.0e38), scores)
    weights = op.Reshape(op.Softmax(scores, axis=-1), op.Constant(value_ints=[kv_heads, -1, key.shape[2]]))
    out = op.MatMul(weights, values)
    return op.Reshape(out, op.Constant(value_ints=[1, num_heads, rows, dim])), op.Constant(value_floats=[0.0])


def _cut(mask, rows: int, slots: int):  # type: ignore[no-untyped-def]
    if tuple(mask.shape[-2:]) == (rows, slots):
        return mask
    ends, axes = op.Constant(value_ints=[rows, slots]), op.Constant(value_ints=[-2, -1])
    return op.Slice(mask, op.Constant(value_ints=[0, 0]), ends, axes)


FUSED_INFER_ATTENTION_SCORE = Contract(_FUSED_SCHEMA, reference=_fused, fake=_fused_fake, onnx=_fused_onnx)


def _append_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    bias: Tensor | None,
    last: Tensor,
    total: Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, slots = query.shape[1], int(total) if bias is None else bias.shape[-1]
    caches = []
    for cache, new in ((key_cache, key), (value_cache, value)):
        written = cache.clone()
        written[:, :, slots - rows : slots] = new.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
        caches.append(written)
    order_S = torch.arange(slots, device=query.device)
    causal_TS = order_S > order_S[slots - rows :, None]
    masked = (causal_TS if bias is None else causal_TS | (bias[0, 0] < -1e30)).view(1, 1, rows, slots)
    split = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    out = eager_attention(split, caches[0][:, :, :slots], caches[1][:, :, :slots], masked, scale)
    return out.transpose(1, 2).flatten(-2), caches[0], caches[1]


def _append_attention_fake(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key_cache), torch.empty_like(value_cache)


def _append_attention_onnx(  # type: ignore[no-untyped-def]
    query, key, value, key_cache, value_cache, bias, last, total, heads: int, kv_heads: int, scale: float
):
    return ort.GroupQueryAttention(
        query,
        key,
        value,
        key_cache,
        value_cache,
        last,
        total,
        None,
        None,
        None,
        bias,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=scale,
        do_rotary=0,
    )


APPEND_ATTENTION = Contract(
    "append_attention(Tensor query, Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
    "Tensor? bias, Tensor last, Tensor total, int heads, int kv_heads, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    reference=_append_attention,
    fake=_append_attention_fake,
    onnx_cpu=_append_attention_onnx,
    namespace="draftwood",
)
"""Appends T rows to the caches [1, K, C, D] at slots S - T .. S - 1 and attends causally through them.

query [1, T, N*D], key and value [1, T, K*D], bias [1, 1, T, S] or None (0 = seen, below -1e30 = masked),
last int32 [1] = S - 1, total int32 [] = S. Returns the rows [1, T, N*D] and both caches. onnxruntime's
GroupQueryAttention does it as one operator, in place when cache input and output are one buffer; it reads S
slots, not C.
"""
