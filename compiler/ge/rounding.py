"""Rows that are rounded by the operator that makes them. If only integer products read a norm or an activation, it
takes over the DynamicQuant after it, and the rounding to a half type in between goes."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from draftwood.compiler.ge.forms import argument
from draftwood.kernels.rounded import swiglu_fits

_HALVES = (torch.bfloat16, torch.float16)


def round_inside(graph: fx.Graph) -> None:
    """Puts the operators of `draftwood.kernels.rounded` instead of pairs."""
    npu = torch.ops.npu
    for node in list(graph.nodes):
        if node.target == npu.npu_add_rms_norm.default:
            _round_norm(graph, node)
        elif node.target == npu.npu_swiglu.default and _only_rounded(node):
            rows, width = node.meta["val"].shape
            if swiglu_fits(width, rows):
                options = {"activate_left": True, "quant_mode": 1}
                pair = _before(graph, node, npu.npu_dequant_swiglu_quant.default, node.args[:1], options)
                _read_rounded(graph, node, pair, scale=1)


def _round_norm(graph: fx.Graph, norm: fx.Node) -> None:
    for unread in [output for output in norm.users if not output.users]:
        graph.erase_node(unread)
    outputs = {output.args[1]: output for output in norm.users}
    if not outputs.keys() <= {0, 2} or 0 not in outputs or not _only_rounded(outputs[0]):
        return
    fused = torch.ops.npu.npu_add_rms_norm_dynamic_quant.default
    five = _before(graph, norm, fused, norm.args[:3], {"epsilon": argument(norm, "epsilon")})
    _read_rounded(graph, outputs.pop(0), five, scale=3)
    for output in outputs.values():
        output.args = (five, 2)
    graph.erase_node(norm)


def _only_rounded(rows: fx.Node) -> bool:
    """Whether nothing but integer products reads matrices of a half type."""
    value: Tensor = rows.meta["val"]
    product = torch.ops.draftwood.quantised_linear.default
    readers = [user.target == product and user.args[1] is not rows for user in rows.users]
    return value.dim() == 2 and value.dtype in _HALVES and bool(readers) and all(readers)


def _read_rounded(graph: fx.Graph, rows: fx.Node, rounding: fx.Node, scale: int) -> None:
    """Products of ``rows`` take outputs 0 and ``scale`` of the operator that has rounded them."""
    with graph.inserting_after(rounding):
        factor = graph.call_function(getitem, (rounding, scale))
        whole = graph.call_function(getitem, (rounding, 0))
    for product in list(rows.users):
        weight, weight_scale, bias = (argument(product, name) for name in ("weight", "weight_scale", "bias"))
        product.target = torch.ops.draftwood.rounded_linear.default
        product.args = (whole, factor, weight, weight_scale, bias, rows.meta["val"].dtype)
    graph.erase_node(rows)


def _before(graph: fx.Graph, node: fx.Node, target: Any, args: Any, options: dict[str, Any]) -> fx.Node:
    with graph.inserting_before(node):
        call = graph.call_function(target, args, options)
    call.meta = {"stack_trace": node.meta.get("stack_trace")}
    return call
