"""One decoder block over explicit caches.

A step runs T new rows after the ``committed`` slots of every cache. Its attention has four forms. ``npu``: the NPU's
operators over caches with one row a token. ``fused``: that of a static ONNX graph, over flat caches. ``eager``: plain
PyTorch, the reference. ``cpu``: onnxruntime's operator. All but ``cpu`` commit late: the same single write also moves
the accepted rows of the previous tree (the *branch*) into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from draftwood import kernels
from draftwood.compiler.teachers.config import TeacherConfig

# T new rows, P rows moved from the branch, W = P + T rows written, H hidden, N query heads, K key/value heads,
# D head dimension, C cache slots

Form = Literal["npu", "fused", "eager", "cpu"]
# Head dimensions that the NPU's rotary operator takes (ops-transformer, posembedding/apply_rotary_pos_emb).
FUSED_ROTARY = (64, 128)


@dataclass(frozen=True, slots=True)
class Placement:
    """The rows that a static step writes and the slots that it sees. ``masked`` is [1, 1, T, C] (True = masked).
    ``index`` lists the written cache rows: [W*K, 1] over flat caches, [W, 1] over caches with one row a token."""

    index: Tensor
    masked: Tensor


def place(
    visible_TT: Tensor, committed_1: Tensor, accepted_1: Tensor, moved: int, slots: int, kv_heads: int
) -> Placement:
    """Cache rows and the mask of a static step, from values that vary at run time only.

    The last ``moved`` = P path slots past ``accepted`` go to the spare slot C - 1, never onto a live one.
    A cache row is head * C + slot.
    """
    rows, order = visible_TT.shape[0], partial(torch.arange, device=committed_1.device)
    order_P = order(moved)
    spare_P = torch.full_like(order_P, slots - 1)
    moved_P = torch.where(order_P < accepted_1, committed_1 - accepted_1 + order_P, spare_P)
    slot_W = torch.cat((moved_P, committed_1 + order(rows)))
    index = (slot_W[:, None] + order(kv_heads) * slots).reshape(-1, 1)
    # Column c is tree row c - committed. Columns before the tree are committed text, columns after it are stale.
    row_C = order(slots) - committed_1
    # A tree of one row sees it everywhere: a clamp to nothing but 0 is one that Qualcomm's HTP cannot run.
    tree_TC = visible_TT.index_select(1, row_C.clamp(0, rows - 1)) if rows > 1 else visible_TT
    seen_TC = (row_C < 0) | (tree_TC & (row_C >= 0) & (row_C < rows))
    return Placement(index, (~seen_TC)[None, None])


def place_rows(visible_TT: Tensor, committed_1: Tensor, accepted_1: Tensor, moved: int, slots: int) -> Placement:
    """`place` over caches with one row a token, in as few operators of an NPU as it takes."""
    rows, order = visible_TT.shape[0], partial(torch.arange, device=committed_1.device)
    # A new row counts from ``committed``, a moved one from ``accepted`` before it, and below ``accepted`` alone.
    offset_W = torch.cat((order(moved), order(rows)))
    below_W = torch.cat((order(moved), torch.full((rows,), -1, device=committed_1.device)))
    start_W = committed_1 - accepted_1 * (below_W >= 0).to(torch.int64)
    slot_W = torch.where(below_W < accepted_1, start_W + offset_W, slots - 1)
    # Column 0 of the table is committed text, the last one stale; between them are the tree's rows.
    text_T1 = torch.ones((rows, 1), dtype=torch.bool, device=committed_1.device)
    table_TX = torch.cat((text_T1, visible_TT, ~text_T1), 1)
    column_C = (order(1, slots + 1) - committed_1).clamp(0, rows + 1)
    return Placement(slot_W[:, None], (~table_TX.index_select(1, column_C))[None, None])


def place_texts(visible_BTT: Tensor, committed_B: Tensor, accepted_B: Tensor, moved: int, slots: int) -> Placement:
    """`place_rows` for B texts over pooled caches [B*C, K*D], text after text: index [B*W, 1], masked [B, 1, T, C].

    The index lists the moved rows of all texts before their new rows. ``accepted`` = -1 marks an unused place: all its
    rows go to its spare slot.
    """
    (texts, rows, _), order = visible_BTT.shape, partial(torch.arange, device=committed_B.device)
    committed_B1, accepted_B1, first_B1 = committed_B[:, None], accepted_B[:, None], (order(texts) * slots)[:, None]
    moved_BP = torch.where(order(moved) < accepted_B1, committed_B1 - accepted_B1 + order(moved), slots - 1)
    # Padded rows of a text that is nearly full would else be written to the next text's place.
    new_BT = torch.where(accepted_B1 >= 0, (committed_B1 + order(rows)).clamp(max=slots - 1), slots - 1)
    slot_X = torch.cat(((moved_BP + first_B1).flatten(), (new_BT + first_B1).flatten()))
    text_BT1 = torch.ones((texts, rows, 1), dtype=torch.bool, device=committed_B.device)
    table_TX = torch.cat((text_BT1, visible_BTT, ~text_BT1), 2).transpose(0, 1).flatten(1)
    column_BC = (order(1, slots + 1) - committed_B1).clamp(0, rows + 1) + (order(texts) * (rows + 2))[:, None]
    seen_TBC = table_TX.index_select(1, column_BC.flatten()).unflatten(1, (texts, slots))
    return Placement(slot_X[:, None], (~seen_TBC.transpose(0, 1))[:, None])


class Appended(NamedTuple):
    """The rows that a step on a CPU appends to caches [1, K, C, D], and the slots that they see.

    The fields are inputs of `draftwood.kernels.rows_attention`. ``queries`` [1, A] are the T rows; one of them may
    occur twice. ``positions`` [1, A] and ``bias`` [1, 1, A, S] belong to them. ``results`` [T, 2] is the place of each
    row's result. With S visible slots, ``last`` int32 [1] is S - 1 and ``total`` int32 [] is S. If heads stand as rows,
    queries are [1, A, 3 K, 2] and results [T, N, 3], as told there.
    """

    queries_1A: Tensor
    results_T2: Tensor
    positions_1A: Tensor
    bias_11AS: Tensor
    last_1: Tensor
    total: Tensor


class WrittenBlocks(NamedTuple):
    """The places that a step over blocks writes, [T*K, 3] (block, head, slot), and the order of its rows' sums. The
    fields are inputs of `draftwood.kernels.block_attention`."""

    written: Tensor
    bias: Tensor
    home: Tensor
    weight: Tensor
    chain: Tensor
    nothing: Tensor


class Norm(nn.Module):
    """RMS norm over the last dimension; ``forward`` normalises, ``added`` adds the residual first."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, self.weight, self.epsilon)[0]

    def added(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, self.weight, self.epsilon)
        return normed, total


def rotated_pair(q_1TND: Tensor, k_1TKD: Tensor, cos_1T1D: Tensor, sin_1T1D: Tensor) -> tuple[Tensor, Tensor]:
    """Both turned, by one operator of the NPU if it takes the head dimension."""
    if q_1TND.shape[-1] in FUSED_ROTARY:
        return torch.ops.draftwood.rotary_pair(q_1TND, k_1TKD, cos_1T1D, sin_1T1D)
    q, k = (torch.ops.npu.npu_rotary_mul(x, cos_1T1D, sin_1T1D) for x in (q_1TND, k_1TKD))
    return q, k


def turns_whole(config: TeacherConfig) -> bool:
    """Whether an NPU turns q, k and v together as the product's rows, before they are cut: v by no angle.

    Then new keys come from an operator that owns its result, and GE joins them to moved ones without a kernel.
    """
    return config.head_dim in FUSED_ROTARY and not config.qk_norm


def whole_tables(cos_1T1D: Tensor, sin_1T1D: Tensor, config: TeacherConfig) -> tuple[Tensor, Tensor]:
    """Rotary factors [1, T, N + 2K, D] of whole rows: those of v turn nothing."""
    turned, heads = config.heads + config.kv_heads, config.heads + 2 * config.kv_heads
    turned_M1 = (torch.arange(heads, device=cos_1T1D.device) < turned)[:, None]
    return torch.where(turned_M1, cos_1T1D, 1.0), torch.where(turned_M1, sin_1T1D, 0.0)


class Layer(nn.Module):
    """One decoder block: merged qkv and gate-up projections, so that an NPU launches two kernels fewer."""

    def __init__(self, config: TeacherConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.attn_norm = Norm(config.hidden, config.rms_norm_eps)
        self.qkv = nn.Linear(config.hidden, queries + 2 * keys, bias=config.qkv_bias)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.o = nn.Linear(queries, config.hidden, bias=config.o_bias)
        self.mlp_norm = Norm(config.hidden, config.rms_norm_eps)
        self.make_mlp()

    def make_mlp(self) -> None:
        """The weights of ``mlp``; a block with another one makes its own here."""
        self.gate_up = nn.Linear(self.config.hidden, 2 * self.config.intermediate, bias=False)
        self.down = nn.Linear(self.config.intermediate, self.config.hidden, bias=False)

    def mlp(self, normed_TH: Tensor) -> Tensor:
        """The MLP's addition to the rows [T, H], computed from normed rows."""
        down_TH: Tensor = self.down(torch.ops.npu.npu_swiglu(self.gate_up(normed_TH)))
        return down_TH

    def enter(self, added_TH: Tensor | None, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, residual): the rest of the block before is added here; the first has nothing."""
        if added_TH is None:
            return self.attn_norm(residual_TH), residual_TH
        return self.attn_norm.added(added_TH, residual_TH)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of q, k and v in a row of qkv."""
        keys = self.config.kv_heads * self.config.head_dim
        return self.config.heads * self.config.head_dim, keys, keys

    @property
    def own_projection(self) -> bool:
        """Whether ``project`` is a family's own, which no operator does in its stead."""
        return type(self).project is not Layer.project

    def project(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N*D], k and v [T, K*D], before rotary."""
        config = self.config
        q, k, v = self.qkv(x_TH).split(self.widths, -1)
        if not config.qk_norm:
            return q, k, v
        q_TND, k_TKD = (rows.unflatten(-1, (-1, config.head_dim)) for rows in (q, k))
        return self.q_norm(q_TND).flatten(-2), self.k_norm(k_TKD).flatten(-2), v

    def feed_forward(self, attended_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(down projection, new residual): their sum is the block's output, added by the next norm."""
        normed_TH, residual_TH = self.mlp_norm.added(self.o(attended_TH), residual_TH)
        return self.mlp(normed_TH), residual_TH

    def attend(
        self,
        x_TH: Tensor,
        moved_2PKD: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        placement: Placement,
        form: Form,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Static form over flat caches [K*C, D]: (rows [T, N*D], new rows [2, T, K, D], both caches)."""
        config, ops = self.config, torch.ops.npu
        q, k, v = self.project(x_TH)
        q_TND = ops.npu_rotary_mul(q.unflatten(-1, (config.heads, config.head_dim)), cos_T1D, sin_T1D)
        k_TKD = ops.npu_rotary_mul(k.unflatten(-1, (config.kv_heads, config.head_dim)), cos_T1D, sin_T1D)
        v_TKD = v.unflatten(-1, (config.kv_heads, config.head_dim))
        new_2TKD = torch.stack((k_TKD, v_TKD))
        written_2WKD = torch.cat((moved_2PKD, new_2TKD), 1).flatten(1, 2)
        key_cache = ops.npu_scatter_nd_update(key_cache, placement.index, written_2WKD[0])
        value_cache = ops.npu_scatter_nd_update(value_cache, placement.index, written_2WKD[1])
        out = self.over_cache(q_TND, (key_cache, value_cache), placement.masked, form)
        return out, new_2TKD, key_cache, value_cache

    def attend_rows(
        self,
        x_TH: Tensor,
        moved_2PE: Sequence[Tensor],
        cache_2CE: Sequence[Tensor],
        *,
        cos: Tensor,
        sin: Tensor,
        placement: Placement,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
        """NPU's form over caches [C, K*D], key then value: (rows [T, N*D], new rows [T, K*D] of both, both caches).

        Nothing is transposed, and a cache is written by whole rows. cos and sin: [1, T, 1, D], or `whole_tables`.
        Caches and rows may hold several texts in turn, as many as the placement has masks.
        """
        config, ops = self.config, torch.ops.npu
        heads, apart = (-1, config.head_dim), (placement.masked.shape[0], -1)
        q_1TND, *new_2TE = self.turned(x_TH, cos, sin)
        cache_2CE = [
            ops.npu_scatter_nd_update(cache, placement.index, torch.ops.draftwood.join_rows(moved, new))
            for cache, moved, new in zip(cache_2CE, moved_2PE, new_2TE, strict=True)
        ]
        out_1TND = ops.npu_fused_infer_attention_score(
            q_1TND if apart[0] == 1 else q_1TND.squeeze(0).unflatten(0, apart),
            *(cache.unflatten(-1, heads).unflatten(0, apart) for cache in cache_2CE),
            atten_mask=placement.masked,
            num_heads=config.heads,
            scale=config.head_dim**-0.5,
            input_layout="BSND",
            num_key_value_heads=config.kv_heads,
            sparse_mode=1,
        )[0]
        return out_1TND.flatten(2).flatten(0, 1), (new_2TE[0], new_2TE[1]), cache_2CE

    def turned(self, x_TH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """NPU's form: q [1, T, N, D], k and v [T, K*D], by the tables that ``attend_rows`` gets."""
        heads = (-1, self.config.head_dim)
        if cos.shape[2] > 1:
            rows_1TMD = self.qkv(x_TH).unflatten(-1, heads).unsqueeze(0)
            rows = torch.ops.npu.npu_rotary_mul(rows_1TMD, cos, sin).flatten(2).squeeze(0)
            q, k, v = rows.split(self.widths, -1)
            return q.unflatten(-1, heads).unsqueeze(0), k, v
        q, k, v = self.project(x_TH)
        q_1TND, k_1TKD = (x.unflatten(-1, heads).unsqueeze(0) for x in (q, k))
        q_1TND, k_1TKD = rotated_pair(q_1TND, k_1TKD, cos, sin)
        return q_1TND, k_1TKD.flatten(2).squeeze(0), v

    def over_cache(self, q_TND: Tensor, cache: Sequence[Tensor], masked: Tensor, form: Form) -> Tensor:
        """Attention of rotated rows over flat caches [K*C, D], key then value: [T, N*D]."""
        config = self.config
        query, scale = q_TND.transpose(0, 1)[None], config.head_dim**-0.5
        keys, values = (c.view(1, config.kv_heads, -1, config.head_dim) for c in cache)
        if form == "eager":
            out = kernels.eager_attention(query, keys, values, masked, scale)
        else:
            out = torch.ops.npu.npu_fused_infer_attention_score(
                query,
                keys,
                values,
                atten_mask=masked,
                num_heads=config.heads,
                scale=scale,
                input_layout="BNSD",
                num_key_value_heads=config.kv_heads,
                sparse_mode=1,
            )[0]
        return out[0].transpose(0, 1).flatten(1)

    def append(
        self,
        x_TH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        cos_PE: Tensor,
        sin_PE: Tensor,
        appended: Appended,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """CPU form over caches [1, K, C, D]: (rows [T, N*D], both caches), by half tables [P, D/2]."""
        config = self.config
        # A family's own projection stays outside the attention operator.
        rows_TE = torch.cat(self.project(x_TH), -1) if self.own_projection else self.qkv(x_TH)
        normed = config.qk_norm and not self.own_projection
        gains = (self.q_norm.weight, self.k_norm.weight) if normed else (None, None)
        out_TE, key_cache, value_cache = torch.ops.draftwood.rows_attention(
            rows_TE, key_cache, value_cache, cos_PE, sin_PE, *appended, *gains,
            config.heads, config.kv_heads, config.rms_norm_eps,
        )  # fmt: skip
        return out_TE, key_cache, value_cache

    def attend_blocks(
        self,
        x_TH: Tensor,
        key: Sequence[Tensor],
        value: Sequence[Tensor],
        *,
        cos_TE: Tensor,
        sin_TE: Tensor,
        blocks: WrittenBlocks,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """CPU form over caches in blocks [., K, B, D], settled and open ones of ``key`` and ``value``.

        Returns rows [T, N*D] and the open blocks of both caches.
        """
        config = self.config
        q_1TE, k_1TE, v_1TE = self.rotated_rows(x_TH, cos_TE, sin_TE)
        keys, values = (
            torch.ops.npu.npu_scatter_nd_update(cache[1], blocks.written, new_1TE.reshape(-1, config.head_dim))
            for cache, new_1TE in ((key, k_1TE), (value, v_1TE))
        )
        out = torch.ops.draftwood.block_attention(
            q_1TE, key[0], value[0], keys, values, *blocks[1:], config.heads, config.head_dim**-0.5
        )
        return out[0], keys, values

    def rotated_rows(self, x_TH: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """CPU form: q [1, T, N*D] and k [1, T, K*D] turned by half tables [T, D/2], v [1, T, K*D]."""
        q, k, v = (part[None] for part in self.project(x_TH))
        rotary = torch.ops.draftwood.rotary_rows
        return rotary(q, cos_TE, sin_TE, self.config.heads), rotary(k, cos_TE, sin_TE, self.config.kv_heads), v

    def append_rows(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        cache: Sequence[Tensor],
        bias: Tensor | None,
        last: Tensor,
        total: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """CPU form: q, k and v appended to caches [1, K, C, D], as the ``append_attention`` contract has it.

        Returns the attended rows [T, N*D] and both caches.
        """
        config = self.config
        out, key_cache, value_cache = torch.ops.draftwood.append_attention(
            *rows, *cache, bias, last, total, config.heads, config.kv_heads, config.head_dim**-0.5
        )
        return out[0], key_cache, value_cache
