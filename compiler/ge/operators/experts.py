"""Operators of a mixture of experts: they are those of ``draftwood.kernels.experts``."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.operators.table import FLOATS, Refusal, one_type, only, operator
from draftwood.kernels.contract import Contract
from draftwood.kernels.experts import FINALIZE_ROUTING, GATING, GROUPED_LINEAR, INIT_ROUTING

# T rows, E experts, K of them chosen by a row, R = T x K places, H hidden, O outputs


def _run(contract: Contract, x: Tensor, *arguments: Any, **options: Any) -> Any:
    """How many rows an expert gets is a value, which a tensor without values does not have."""
    return (contract.fake if x.is_meta else contract.reference)(x, *arguments, **options)


@operator
def MoeGatingTopKSoftmax(x: Tensor, finished: Tensor | None = None, *, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The definition does not order equal scores; they come as torch.topk has them."""
    one_type(FLOATS, x)
    if finished is not None:
        raise Refusal("operand finished is not covered by the interpreter")
    gated: tuple[Tensor, Tensor, Tensor] = _run(GATING, x, k=k)
    return gated


@operator
def MoeInitRoutingV3(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: Literal[0] = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: Literal[-1] = -1,
    active_expert_range: list[int],
    row_idx_type: Literal[0] = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every row at every expert of its own; nothing is dropped, padded or quantised."""
    one_type(FLOATS, x)
    one_type(frozenset((torch.int32,)), expert_idx)
    if scale is not None or offset is not None:
        raise Refusal("operands scale and offset are not covered by the interpreter")
    only("active_num", active_num, expert_idx.numel())
    only("expert_tokens_num_type", expert_tokens_num_type, 1)
    only("expert_tokens_num_flag", expert_tokens_num_flag, True)
    only("active_expert_range", active_expert_range, [0, expert_num])
    sorted_: tuple[Tensor, Tensor, Tensor, Tensor] = _run(
        INIT_ROUTING, x, expert_idx, expert_num=expert_num, expert_tokens_num_type=1, expert_tokens_num_flag=True
    )
    return sorted_


@operator
def GroupedMatmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor],
    scale: list[Tensor],
    offset: list[Tensor],
    antiquant_scale: list[Tensor],
    antiquant_offset: list[Tensor],
    group_list: Tensor | None = None,
    per_token_scale: Tensor | None = None,
    *,
    split_item: int = 0,
    dtype: int = 0,
    transpose_weight: bool = False,
    transpose_x: Literal[False] = False,
    group_type: int = -1,
    group_list_type: int = 0,
    act_type: Literal[0] = 0,
    tuning_config: list[int] = [0],  # noqa: B006 (a default)
) -> Tensor:
    """Rows x [R, H] in groups along R, a matrix of weight [E, O, H] each; operands that floats do without are empty."""
    for name, value in {"bias": bias, "scale": scale, "offset": offset, "antiquant_scale": antiquant_scale}.items():
        if any(t.numel() for t in (*value, *antiquant_offset)):
            raise Refusal(f"operand {name} has values, which the interpreter does not cover")
    if (len(x), len(weight)) != (1, 1) or group_list is None or per_token_scale is not None:
        raise Refusal("the interpreter covers one x, one weight and a group_list, and no per_token_scale")
    only("split_item", split_item, 2, 3)
    only("dtype", dtype, -1)
    only("transpose_weight", transpose_weight, True)
    only("group_type", group_type, 0)
    only("group_list_type", group_list_type, 1)
    only("tuning_config", tuning_config, [0])
    one_type(FLOATS, x[0], weight[0])
    product: Tensor = _run(GROUPED_LINEAR, x[0], weight[0], group_list)
    return product


@operator
def MoeFinalizeRoutingV2(
    expanded_x: Tensor,
    expanded_row_idx: Tensor,
    x1: Tensor | None = None,
    x2: Tensor | None = None,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    expert_idx: Tensor | None = None,
    *,
    drop_pad_mode: int = 0,
    k: Literal[1] = 1,
) -> Tensor:
    """The sum of every row's places, each times its share; with scales, k is theirs."""
    if scales is None or any(value is not None for value in (x1, x2, bias, expert_idx)):
        raise Refusal("the interpreter covers scales alone of the optional operands")
    only("drop_pad_mode", drop_pad_mode, 2)
    one_type(FLOATS, expanded_x, scales)
    summed: Tensor = _run(FINALIZE_ROUTING, expanded_x, None, None, None, scales, expanded_row_idx, None, 2)
    return summed
