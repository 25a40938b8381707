"""Mixtures of experts: which experts a row goes to, and the products with their matrices (Shazeer et al., 1701.06538).

Only the values depend on how many rows an expert gets. T rows always fill T x K places, expert by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.contract import Contract, op
from draftwood.kernels.mlp import SWIGLU

# T rows, E experts, K of them chosen by a row, R = T x K places, H hidden, I width of an expert, O outputs


def _gating(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    if finished is not None:
        raise NotImplementedError("gating: finished rows have no reference")
    shares_TK, ids_TK = x.float().softmax(-1).topk(k, -1)
    order_TK = torch.arange(ids_TK.numel(), dtype=torch.int32, device=x.device).view(k, -1).t().contiguous()
    return shares_TK.to(x.dtype), ids_TK.int(), order_TK


def _gating_fake(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    ids, order = (x.new_empty(shape, dtype=torch.int32) for _ in range(2))
    return x.new_empty(shape), ids, order


def _gating_onnx(x, finished=None, k: int = 1):  # type: ignore[no-untyped-def]
    shares, ids = op.TopK(op.Softmax(x, axis=-1), op.Constant(value_ints=[k]), axis=-1)
    count = op.Size(ids)
    order = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    order = op.Transpose(op.Reshape(order, op.Constant(value_ints=[k, -1])), perm=[1, 0])
    return shares, op.Cast(ids, to=6), op.Cast(order, to=6)


GATING = Contract(
    "npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
    reference=_gating,
    fake=_gating_fake,
    onnx=_gating_onnx,
)
"""Scores x [T, E]: shares [T, K] of a softmax over all experts, int32 ids [T, K], best first, and places by column."""


def _check_routing(expert_capacity: int = -1, **options: Any) -> None:
    supported: dict[str, Any] = {
        "drop_pad_mode": 0,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
    }
    supported |= {"row_idx_type": 0, "scale": None, "offset": None, "x_dtype": None}
    for name, value in supported.items():
        if options.get(name, value) != value:
            raise NotImplementedError(f"routing: {name} = {options[name]!r} has no reference; expected {value!r}")


def _init_routing(x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, **given: Any) -> tuple[Tensor, ...]:
    _check_routing(**given)
    flat_R = expert_idx.flatten().long()
    order_R = flat_R.argsort(stable=True)
    place_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.numel(), device=x.device))
    counts_E = flat_R.bincount(minlength=expert_num)
    return x[order_R // expert_idx.shape[1]], place_R.int(), counts_E, x.new_zeros(flat_R.shape, dtype=torch.float32)


def _init_routing_fake(x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, **given: Any) -> tuple[Tensor, ...]:
    _check_routing(**given)
    places = expert_idx.numel()
    scale = x.new_empty(places, dtype=torch.float32)
    counts = x.new_empty(expert_num, dtype=torch.int64)
    return x.new_empty(places, x.shape[1]), x.new_empty(places, dtype=torch.int32), counts, scale


INIT_ROUTING = Contract(
    "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
    "bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
    "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_init_routing,
    fake=_init_routing_fake,
)
"""Rows x [T, H] sorted by expert, [R, H]; place [R] of row t's choice j at t * K + j; rows of each expert [E]."""


def _check_finalizing(drop_pad_mode: int | None, *absent: Tensor | None) -> None:
    if drop_pad_mode != 2 or any(value is not None for value in absent):
        raise NotImplementedError("finalizing: only drop_pad_mode 2 without skips, bias and experts has a reference")


def _finalize(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    _check_finalizing(drop_pad_mode, skip1, skip2, bias, export_for_source_row)
    rows_TKH = expanded_permuted_rows[expanded_src_to_dst_row.long()].unflatten(0, scales.shape)
    return (rows_TKH.float() * scales.float().unsqueeze(-1)).sum(1).to(expanded_permuted_rows.dtype)


def _finalize_fake(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    _check_finalizing(drop_pad_mode, skip1, skip2, bias, export_for_source_row)
    return expanded_permuted_rows.new_empty(scales.shape[0], expanded_permuted_rows.shape[1])


FINALIZE_ROUTING = Contract(
    "npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
    "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1)"
    " -> Tensor",
    reference=_finalize,
    fake=_finalize_fake,
)
"""The way back: every row is the sum [T, H] of its K places, each times its share."""


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = zip(x.split(counts.tolist()), weight, strict=True)
    return torch.cat([torch.nn.functional.linear(rows, matrix) for rows, matrix in parts])


def _grouped_fake(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


GROUPED_LINEAR = Contract(
    "grouped_linear(Tensor x, Tensor weight, Tensor counts) -> Tensor",
    reference=_grouped,
    fake=_grouped_fake,
    namespace="draftwood",
)
"""Rows x [R, H] sorted by expert, matrices weight [E, O, H], int64 counts [E] of an expert's rows: [R, O]."""


def _experts(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    linear = torch.nn.functional.linear
    total_TH = torch.zeros_like(x, dtype=torch.float32)
    for expert in ids.unique().tolist():
        rows, choices = (ids == expert).nonzero().unbind(1)
        out = linear(SWIGLU.reference(linear(x[rows], gate_up[expert])), down[expert])
        total_TH.index_add_(0, rows, out.float() * shares[rows, choices, None].float())
    return total_TH.to(x.dtype)


def _experts_fake(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _experts_onnx(x, ids, shares, gate_up, down):  # type: ignore[no-untyped-def]
    from draftwood.kernels.experts_onnx import experts_loop  # where a form is built, and nowhere else

    return experts_loop(x, ids, shares, gate_up, down)


EXPERTS = Contract(
    "experts(Tensor x, Tensor ids, Tensor shares, Tensor gate_up, Tensor down) -> Tensor",
    reference=_experts,
    fake=_experts_fake,
    onnx=_experts_onnx,
    namespace="draftwood",
)
"""Rows x [T, H], int32 ids [T, K], shares [T, K], gate_up [E, 2I, H], down [E, H, I]: the weighed sum [T, H].

A loop over the chosen experts, not a gather of their matrices: on one thread, with 64 experts of 256 by 512, 8 chosen
and 16 rows, the loop took 34 ms. A gather took 440 ms and T x K matrices of memory.
"""
