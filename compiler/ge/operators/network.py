"""Matrix products and the fused operators of a decoder; the latter are those of ``draftwood.kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import GE_TYPES
from draftwood.compiler.ge.operators.table import FLOATS, Refusal, one_type, only, operator
from draftwood.kernels import eager_attention
from draftwood.kernels.mlp import SWIGLU
from draftwood.kernels.norm import ADD_RMS_NORM, RMS_NORM
from draftwood.kernels.quantised import LARGEST, products
from draftwood.kernels.rotary import ROTARY_MUL, ROTARY_PAIR
from draftwood.kernels.rounded import ADD_RMS_NORM_DYNAMIC_QUANT, DEQUANT_SWIGLU_QUANT

# B batch, T query rows, C cache slots, N query heads, K key/value heads, D head dimension


@operator
def MatMul(
    x1: Tensor, x2: Tensor, bias: Tensor | None = None, *, transpose_x1: bool = False, transpose_x2: bool = False
) -> Tensor:
    """Two matrices; the bias is added before the one rounding, and may be float32 that holds values of their type."""
    kind = one_type(FLOATS, x1, x2)
    if bias is not None and bias.dtype not in (kind, torch.float32):
        raise Refusal(f"operand bias is {bias.dtype}; expected {kind} or float32")
    if (x1.dim(), x2.dim()) != (2, 2):
        raise Refusal(f"operands have {x1.dim()} and {x2.dim()} dimensions, expected 2 each")
    left, right = x1.t() if transpose_x1 else x1, x2.t() if transpose_x2 else x2
    return left @ right if bias is None else torch.addmm(bias.to(kind), left, right)


@operator
def MatMulV2(
    x1: Tensor,
    x2: Tensor,
    bias: Tensor | None = None,
    *,
    transpose_x1: bool = False,
    transpose_x2: bool = False,
    offset_x: Literal[0] = 0,
) -> Tensor:
    return MatMul(x1, x2, bias, transpose_x1=transpose_x1, transpose_x2=transpose_x2)


@operator
def DynamicQuant(x: Tensor, *, dst_type: Literal[2] = 2) -> tuple[Tensor, Tensor]:
    """int8 and a scale a row, in fp32: rint(x * (127 / max)), halves to even, and max * (1 / 127).

    For a row of zeros the document gives the scale 0 and leaves the whole numbers open; here they are zeros.
    """
    one_type(FLOATS, x)
    largest = x.float().abs().amax(-1, keepdim=True)
    whole = torch.where(largest > 0, x.float() * (LARGEST / largest), 0.0).round()
    return whole.to(torch.int8), (largest * (1 / LARGEST)).squeeze(-1)


@operator
def QuantBatchMatmulV3(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    *,
    dtype: Literal[1, 27],
    transpose_x1: Literal[False] = False,
    transpose_x2: bool = False,
) -> Tensor:
    """Sums in int32, times the column's scale and then the row's in fp32, plus the bias; rounded once."""
    if {x1.dtype, x2.dtype} != {torch.int8} or pertoken_scale is None:
        raise Refusal(f"operands are {x1.dtype} and {x2.dtype}; expected int8 and a scale of every row")
    out = products(x1, x2.t() if transpose_x2 else x2).float() * scale.float() * pertoken_scale[:, None]
    return (out if bias is None else out + bias.float()).to(GE_TYPES[dtype])


@operator
def BatchMatMul(x1: Tensor, x2: Tensor, *, adj_x1: bool = False, adj_x2: bool = False) -> Tensor:
    """Matrices in the last two dimensions; those before broadcast."""
    one_type(FLOATS, x1, x2)
    if min(x1.dim(), x2.dim()) < 2:
        raise Refusal(f"operands have {x1.dim()} and {x2.dim()} dimensions, expected 2 or more")
    return torch.matmul(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2)


@operator
def BatchMatMulV2(
    x1: Tensor, x2: Tensor, *, adj_x1: bool = False, adj_x2: bool = False, offset_x: Literal[0] = 0
) -> Tensor:
    return BatchMatMul(x1, x2, adj_x1=adj_x1, adj_x2=adj_x2)


@operator
def RmsNorm(x: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    one_type(FLOATS, x)
    normed: tuple[Tensor, Tensor] = RMS_NORM.reference(x, gamma, epsilon)
    return normed


@operator
def AddRmsNorm(x1: Tensor, x2: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    one_type(FLOATS, x1, x2)
    normed: tuple[Tensor, Tensor, Tensor] = ADD_RMS_NORM.reference(x1, x2, gamma, epsilon)
    return normed


@operator
def AddRmsNormDynamicQuant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] = (),
    dst_type: Literal[2] = 2,
) -> tuple[Tensor, ...]:
    """The norm of a sum as int8 and a scale a row; second rows and scales are for a second product, and empty."""
    only("output_mask", list(output_mask), [])
    one_type(FLOATS, x1, x2, gamma)
    whole, no_rows, total, scale, no_scale = ADD_RMS_NORM_DYNAMIC_QUANT.reference(x1, x2, gamma, epsilon=epsilon)
    return whole, no_rows, total, scale, no_scale


@operator
def DequantSwigluQuant(
    x: Tensor,
    *,
    activate_left: bool = False,
    quant_mode: str = "static",
    dst_type: Literal[2] = 2,
    round_mode: Literal["rint"] = "rint",
    activate_dim: Literal[-1] = -1,
    swiglu_mode: Literal[0] = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A gated activation as int8 and a scale a row; the last three attributes are of another activation."""
    only("quant_mode", quant_mode, "dynamic")
    one_type(FLOATS, x)
    rounded: tuple[Tensor, Tensor] = DEQUANT_SWIGLU_QUANT.reference(x, activate_left=activate_left, quant_mode=1)
    return rounded


@operator
def RotaryMul(x: Tensor, r1: Tensor, r2: Tensor, *, rotary_mode: Literal["half"] = "half") -> Tensor:
    one_type(FLOATS, x, r1, r2)
    rotated: Tensor = ROTARY_MUL.reference(x, r1, r2)
    return rotated


@operator
def ApplyRotaryPosEmb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Literal[1] = 1,
    rotary_mode: Literal["half"] = "half",
) -> tuple[Tensor, Tensor]:
    """[B, T, N, D] by cos and sin [1, T, 1, D]; on a device the results lie where query and key did."""
    one_type(FLOATS, query, key, cos, sin)
    turned: tuple[Tensor, Tensor] = ROTARY_PAIR.reference(query, key, cos, sin)
    return turned


@operator
def SwiGlu(x: Tensor, *, dim: int = -1) -> Tensor:
    one_type(FLOATS, x)
    gated: Tensor = SWIGLU.reference(x, dim)
    return gated


@operator
def FusedInferAttentionScore(
    query: Tensor,
    key: list[Tensor],
    value: list[Tensor],
    atten_mask: Tensor | None = None,
    *,
    num_heads: int,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: Literal["BNSD", "BSND", "BSH"] = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: Literal[0, 1] = 0,
    inner_precise: Literal[0, 1, 2, 3] = 0,  # which kernel runs, not what it computes
    block_size: Literal[0] = 0,
    antiquant_mode: Literal[0] = 0,
    softmax_lse_flag: Literal[False] = False,
    key_antiquant_mode: Literal[0] = 0,
    value_antiquant_mode: Literal[0] = 0,
    query_quant_mode: Literal[0] = 0,
    pse_type: Literal[0] = 0,
    out_dtype: Literal[0] = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of every batch row; a mask hides where it is set. The second output is empty.

    Layouts: BNSD [B, N, T, D], BSND [B, T, N, D], BSH [B, T, N*D]; those of key and value likewise.
    """
    if sparse_mode == 0:  # mode 1 ignores both
        only("pre_tokens", pre_tokens, 2147483647)
        only("next_tokens", next_tokens, 2147483647)
    if (len(key), len(value)) != (1, 1):
        raise Refusal(f"{len(key)} keys and {len(value)} values, expected one tensor each")
    one_type(FLOATS, query, key[0], value[0])
    kv_heads = num_key_value_heads or num_heads
    # In one order in memory, so that all layouts sum alike.
    q = _heads(query, num_heads, input_layout).contiguous()
    k, v = (_heads(t, kv_heads, input_layout).contiguous() for t in (key[0], value[0]))
    out = [
        eager_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], masked, scale)
        for b, masked in enumerate(_masks(atten_mask, q.shape[0], q.shape[2], k.shape[2]))
    ]
    return _from_heads(torch.cat(out), input_layout), query.new_empty(0, dtype=torch.float32)


def _heads(x: Tensor, heads: int, layout: str) -> Tensor:
    """[B, N, T, D] of any layout."""
    if layout == "BSH":
        x = x.unflatten(-1, (heads, -1))
    x_BNTD = x if layout == "BNSD" else x.transpose(1, 2)
    if x_BNTD.dim() != 4 or x_BNTD.shape[1] != heads:
        raise Refusal(f"an operand is {list(x.shape)} in layout {layout}; expected 4 dimensions and {heads} heads")
    return x_BNTD


def _from_heads(x_BNTD: Tensor, layout: str) -> Tensor:
    x = x_BNTD if layout == "BNSD" else x_BNTD.transpose(1, 2)
    return x.flatten(2) if layout == "BSH" else x


def _masks(mask: Tensor | None, batch: int, rows: int, slots: int) -> list[Tensor | None]:
    """The mask [1, 1, >=T, >=C] of every batch row, from [T, C], [B|1, T, C] or [B|1, 1, T, C]."""
    if mask is None:
        return [None] * batch
    one_type(frozenset((torch.bool, torch.int8, torch.uint8)), mask)
    shape = (1,) * (3 - mask.dim()) + tuple(mask.shape)
    heads = shape[1] if len(shape) == 4 else 1
    if mask.dim() not in (2, 3, 4) or heads != 1 or shape[0] not in (1, batch):
        raise Refusal(f"operand atten_mask is {list(mask.shape)}; expected [T, C], [B, T, C] or [B, 1, T, C]")
    if shape[-2] < rows or shape[-1] < slots:
        raise Refusal(f"operand atten_mask is {list(mask.shape)}; expected {rows} rows of {slots} slots or more")
    masked = mask.reshape(shape[0], 1, *shape[-2:]).bool()
    return [masked[b : b + 1] if shape[0] == batch else masked for b in range(batch)]
