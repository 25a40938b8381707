"""Our own GE forms of operators whose form in torchair would cost kernels.

A converter is registered with torchair as its documentation tells makers of operators to. So a graph compiled on a
device and one lowered here have the same form of it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

# Attributes of a mark in a cut trace: the block that begins there, and the number of the marked input.
BORDER_NUMBER, BORDER_SIDE = "_border_number", "_border_side"
# GE's numbers of element types.
_FLOAT, _FLOAT16, _INT64, _UINT64, _BF16 = 0, 1, 9, 10, 27


def register_converters(torchair: ModuleType, ge: Any, promote: Any) -> None:
    """Registers the converters of all operators of ours, with torchair's GE operators and its casts to one type."""

    def rotary_pair(q: Any, k: Any, cos: Any, sin: Any, meta_outputs: Any = None) -> Any:
        return ge.ApplyRotaryPosEmb(q, k, cos, sin, layout=1, rotary_mode="half")

    def linear(x: Any, weight: Any, bias: Any = None, meta_outputs: Any = None) -> Any:
        return ge.MatMulV2(x, weight, bias, None, transpose_x2=True)

    def batched_linear(x: Any, weight: Any, meta_outputs: Any = None) -> Any:
        return ge.BatchMatMul(x, weight, adj_x2=True)

    def grouped_linear(x: Any, weight: Any, counts: Any, meta_outputs: Any = None) -> Any:
        # As in torchair's own converter, inputs that a product in float does not use are empty.
        bias = _FLOAT if x.dtype == _BF16 else x.dtype
        empty = ([ge.Fill([0], ge.Cast(0.0, dst_type=t))] for t in (bias, _UINT64, _FLOAT, _FLOAT16, _FLOAT16))
        # One result of all groups, along the rows, whose numbers are given and not their sums.
        groups = {"split_item": 3, "group_type": 0, "group_list_type": 1}
        (out,) = ge.GroupedMatmul([x], [weight], *empty, counts, None, dtype=-1, transpose_weight=True, **groups)
        return out

    def quantised_linear(x: Any, weight: Any, weight_scale: Any, bias: Any = None, meta_outputs: Any = None) -> Any:
        whole, scale = ge.DynamicQuant(x, None, None, dst_type=ge.DataType.DT_INT8)
        whole.desc.dtype = ge.ProtoDataType.DT_INT8
        return product(whole, scale, weight, weight_scale, bias, x.dtype)

    def rounded_linear(
        x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: Any, meta_outputs: Any = None
    ) -> Any:
        return product(x, x_scale, weight, weight_scale, bias, meta_outputs.dtype)

    def product(x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, dtype: int) -> Any:
        # The weights lie as the product reads them, so that nothing is transposed.
        out = ge.QuantBatchMatmulV3(x, weight, weight_scale, None, bias, x_scale, dtype=dtype)
        out.desc.dtype = {_FLOAT16: ge.ProtoDataType.DT_FLOAT16, _BF16: ge.ProtoDataType.DT_BF16}[dtype]
        return out

    def join_rows(first: Any, second: Any, meta_outputs: Any = None) -> Any:
        return ge.ConcatD([first, second], concat_dim=0, N=2)

    def amax(x: Any, dim: Any = (), keepdim: bool = False, meta_outputs: Any = None) -> Any:
        return ge.ReduceMax(x, ge.Const(list(dim)), keep_dims=keepdim)

    def topk(
        x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, meta_outputs: Any = None
    ) -> tuple[Any, Any]:
        values, places = ranked(x, k, sorted=sorted, dim=dim, largest=largest)
        return values, ge.Cast(places, dst_type=_INT64)

    def best(x: Any, k: int, meta_outputs: Any = None) -> Any:
        return ranked(x, k, sorted=True, dim=-1, largest=True)

    def ranked(x: Any, k: int, **how: Any) -> tuple[Any, Any]:
        # With torchair's int64 k no kernel of the AI Core takes it, and GE would leave it to the AI CPU.
        values, places = ge.TopKV2(x, ge.Const(k, dtype=ge.DataType.DT_INT32), **how)
        # torch_npu 2.13 alone writes it, no CANN knows it, and without it all releases make one graph.
        values.node.attr.pop("sort_policy", None)
        return values, places

    def picked(x: Any, places: Any, meta_outputs: Any = None) -> Any:
        return ge.GatherElements(x, places, dim=x.rank - 1)

    def multiply_add(added: Any, x: Any, y: Any, meta_outputs: Any = None) -> Any:
        return typed(ge.Addcmul(added, x, y, ge.Const(1, dtype=meta_outputs.dtype)), meta_outputs)

    def add_scaled(x: Any, y: Any, factor: float, meta_outputs: Any = None) -> Any:
        return typed(ge.Axpy(x, y, alpha=factor), meta_outputs)

    def typed(out: Any, meta_outputs: Any) -> Any:
        # torchair names no type of a result, and casts it to the one that it has.
        out.desc.dtype = ge._ge_dtype_to_ge_proto_dtype(meta_outputs.dtype)
        return out

    def mul(x: Any, y: Any, meta_outputs: Any = None) -> Any:
        return typed(ge.Mul(*promote(x, y, target_dtype=meta_outputs.dtype)), meta_outputs)

    def cat(tensors: Any, dim: int = 0, meta_outputs: Any = None) -> Any:
        # Of ConcatV2, torchair's form, a kernel takes float32 alone, until GE has made the axis an attribute.
        return ge.ConcatV2D(tensors, concat_dim=dim, N=len(tensors))

    def border(x: Any, number: int, side: int, meta_outputs: Any = None) -> Any:
        out = ge.Identity(x)
        out.node.attr[BORDER_NUMBER].i, out.node.attr[BORDER_SIDE].i = number, side
        return out

    # torchair has a converter of amax, which only says that there is none.
    for name, theirs in {"amax": amax, "topk": topk, "cat": cat}.items():
        torchair.register_fx_node_ge_converter(getattr(torch.ops.aten, name).default)(theirs)
    torchair.register_fx_node_ge_converter(torch.ops.aten.mul.Tensor)(mul)
    products = (linear, batched_linear, grouped_linear, quantised_linear, rounded_linear)
    for converter in (rotary_pair, *products, join_rows, best, picked, multiply_add, add_scaled, border):
        operator = getattr(torch.ops.draftwood, converter.__name__).default
        torchair.register_fx_node_ge_converter(operator)(converter)


__all__ = ["BORDER_NUMBER", "BORDER_SIDE", "register_converters"]
