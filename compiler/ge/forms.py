"""Replacements of traced operators before conversion, for operators of the NPU that need another form.

The table goes to torchair as decompositions, on a device as here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from draftwood.kernels.rotary import ROTARY_MUL

# GE joins parts of such a multiple without a kernel (concat_notask_pass.cc, CheckTensorAlign).
JOINED_BYTES = 32
# The rotary operator's head dimension is a multiple of this (CANN 8.1.RC1, op_proto/inc/nn_other.h, RotaryMul).
ROTARY_MULTIPLE = 64


def npu_forms() -> dict[Any, Callable[..., Any]]:
    """Operator -> function that puts it otherwise, or gives NotImplemented if it may stay."""
    return {
        torch.ops.npu.npu_rotary_mul.default: _rotary,
        torch.ops.aten.select.int: _select,
        torch.ops.aten.slice.Tensor: _slice,
        torch.ops.aten.masked_fill.Scalar: _masked_fill,
        torch.ops.aten.cat.default: _cat,
        torch.ops.aten.linear.default: _linear,
        torch.ops.draftwood.experts.default: _experts,
        torch.ops.draftwood.quantised_linear.default: _quantised_linear,
        torch.ops.aten.bitwise_and.Scalar: _masked,
        torch.ops.aten.__rshift__.Scalar: _shifted,
    }


def argument(node: fx.Node, name: str) -> Any:
    """An argument of a traced operator; torch.export leaves out those that have the schema's default."""
    for number, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            return node.args[number] if number < len(node.args) else node.kwargs.get(name, declared.default_value)
    raise KeyError(f"{node.target}: {name}")


def join_transposes(graph: fx.Graph) -> None:
    """Products with a transposed tensor of three dimensions become one operator, so that no cache is turned around."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        turned = node.args[1]
        if turned.target == aten.transpose.int and set(turned.args[1:]) == {-1, -2} and turned.meta["val"].dim() == 3:
            node.target, node.args = torch.ops.draftwood.batched_linear.default, (node.args[0], turned.args[0])
            if not turned.users:
                graph.erase_node(turned)


def _cat(tensors: list[Tensor], dim: int = 0) -> Any:
    """Two equally long parts of one row lie one after the other, as two rows do, for which GE may run nothing."""
    first, *others = tensors
    parts = [tuple(t.shape) for t in tensors] == 2 * [(1, *first.shape[1:])]
    if dim % first.dim() != 1 or not parts or first.nbytes % JOINED_BYTES:
        return NotImplemented
    return torch.ops.draftwood.join_rows(first, *others).reshape(1, -1, *first.shape[2:])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A product of two matrices; the operator takes no more dimensions, and views of them cost nothing."""
    if x.dim() == 2:
        return torch.ops.draftwood.linear(x, weight, bias)
    return torch.ops.draftwood.linear(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _quantised_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Any:
    """A product of integers in two dimensions; its scales have one."""
    if x.dim() == 2:
        return NotImplemented
    flat = torch.ops.draftwood.quantised_linear(x.flatten(0, -2), weight, weight_scale, bias)
    return flat.unflatten(0, x.shape[:-1])


def _rotary(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Any:
    """Four dimensions, as the operator's definition demands; other head dimensions element by element."""
    if x.shape[-1] % ROTARY_MULTIPLE:
        return ROTARY_MUL.reference(x, r1, r2, rotary_mode, rotate)
    if x.dim() == 4:
        return NotImplemented
    x_1TND, *tables = (t.unsqueeze(0) for t in (x, r1, r2))
    return torch.ops.npu.npu_rotary_mul(x_1TND, *tables, rotary_mode, rotate).squeeze(0)


def _select(x: Tensor, dim: int, index: int) -> Any:
    """The only one of a dimension is a view of the tensor, for which torchair would make a gather."""
    return x.squeeze(dim) if x.shape[dim] == 1 else NotImplemented


def _slice(x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """A part of a split, or rows that are gathered: of StridedSliceV2, torchair's form, a 910B has no kernel."""
    places = range(x.shape[dim])[slice(start, end, step)]
    if step != 1:
        return x.index_select(dim, torch.arange(places.start, places.stop, step, device=x.device))
    sizes = (places.start, len(places), x.shape[dim] - places.start - len(places))
    if len(places) == x.shape[dim]:
        return x.reshape(x.shape)
    return torch.split(x, [size for size in sizes if size], dim)[int(sizes[0] > 0)]


def _masked_fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """A choice between values of one type; torchair's MaskedFill has the number in float32, so GE casts x, too."""
    return torch.where(mask, torch.full((), value, dtype=x.dtype, device=x.device), x)


def _experts(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Rows sorted by expert, two grouped products over all of them, and back: shapes depend on no choice."""
    npu, grouped, count = torch.ops.npu, torch.ops.draftwood.grouped_linear, gate_up.shape[0]
    rows_RH, place_R, counts_E, _ = npu.npu_moe_init_routing_v2(
        x, ids, active_num=ids.numel(), expert_capacity=0, expert_num=count, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, count],
    )  # fmt: skip
    out_RH = grouped(npu.npu_swiglu(grouped(rows_RH, gate_up, counts_E)), down, counts_E)
    back: Tensor = npu.npu_moe_finalize_routing(out_RH, None, None, None, shares, place_R, None, 2)
    return back


def _masked(x: Tensor, mask: int) -> Tensor:
    """A mask as a tensor, which torchair has a converter for."""
    return torch.bitwise_and(x, torch.full((), mask, dtype=x.dtype, device=x.device))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right of non-negative int32, for which torchair has no converter; and nothing says how a device
    divides whole numbers. With the low bits cleared it is a multiple of 2^bits. If at most 24 bits are left, fp32 holds
    it and its share exactly."""
    return (_masked(x, -(1 << bits)).to(torch.float32) * 2.0**-bits).to(torch.int32)
