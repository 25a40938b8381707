"""What every operator of our graphs accepts on an Ascend 910B or 910C: element types, ranks, sizes, layouts.

The rules of the fused attention are in ``constraints``. An operator that is not in the table has not been read about
yet, which is a finding like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from draftwood.compiler.ge.graph import VIEWS, Edge, Graph, Node
from draftwood.compiler.ge.operators.table import ALL, BOOLS, FLOATS, INTEGERS, NUMBERS
from draftwood.kernels.rounded import SWIGLU_BYTES, SWIGLU_ROWS, swiglu_fits

# B batch, T rows, N query heads, K key/value heads, D head dimension

Typed = tuple[torch.dtype, tuple[int, ...]]
HALVES = FLOATS - {torch.float32}

DEFINITION = "CANN's operator definition (REG_OP), repeated in torchair's auto_generated_ge_raw_ops.py"
_ROTARY_MUL = "CANN 8.1.RC1, op_proto/inc/nn_other.h, RotaryMul: 4-D BNSD, BSND or SBND, D a multiple of 64"
_APPLY_ROTARY = "ops-transformer 9.1.0, posembedding/apply_rotary_pos_emb, README and op_host tiling for 910B"
_SCATTER = "ops-nn, index/scatter_nd_update: var of 1 to 8 dimensions, indices of 2 and more"
_WIDE = "GE's fusion passes for Concat, Pack and Split divide nodes of more than 63 tensors"
_JOIN = "GE, compiler/graph/passes/memory_optimize/concat_notask_pass.cc, CheckTensorAlign"
_HCOM = "GE, docs/en/design/constraints/memory-constraints.md and known_shape_runtime.md"
_HCCL = "CANN 8.5.0, API reference of HcclAllReduce and HcclAllGather: float16, float32 and bfp16 on A2 and A3"
_TOP_K = "ops-math, TopKV2's aclnn table: float16, float32 and bfloat16 on the AI Core, whole numbers on the AI CPU"
_GATING = "ops-transformer, moe/moe_gating_top_k_softmax/README: k of at most 1024"
_ROUTING = "ops-transformer, moe/moe_init_routing_v3/README, constraints for Atlas A2 and A3"
_GROUPED = "ops-transformer, gmm/grouped_matmul/README, constraints for Atlas A2 and A3, group type 0"
_FINALIZE = "ops-transformer, moe/moe_finalize_routing_v2, op_graph proto: scales in the rows' type before the 950"
_DYNAMIC_QUANT = "ops-nn, quant/dynamic_quant, README: float16 and bfloat16 of 2 dimensions and more"
_QUANT_MATMUL = "ops-nn, matmul/quant_batch_matmul_v3, op_graph and README, rows of the 910B for int8"
_NORM_QUANT = "ops-nn, norm/add_rms_norm_dynamic_quant, README, and its tiling for the 910B"
_SWIGLU_QUANT = "ops-nn, quant/dequant_swiglu_quant, README, constraints for Atlas A2 and A3"
# The last dimension of either operand of a quantised product (documents of 8.5.0 and 9.0.0; later ones lift it).
_WIDEST = 65535
_BITWISE = "ops-math, bitwise_and/op_api/bitwiseand.cpp: int16, uint16, int32 and int64 on the AI Core of a 910B"
# Bytes of the unified buffer of a 910B's vector core.
_UNIFIED_BUFFER = 192 * 1024


@dataclass(frozen=True, slots=True)
class Use:
    """One node of a graph with what it is given, by the operand's name, and the types of its results."""

    graph: Graph
    node: Node
    given: Mapping[str, Typed]
    results: tuple[Typed, ...]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.given[name][1]


# What is broken, and whether that is an error or costs time only.
Level = Literal["error", "warning"]
Broken = tuple[Level, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """Element types of the first operand; ``more`` finds what else is broken, (level, message) each."""

    types: frozenset[torch.dtype]
    source: str = DEFINITION
    more: Callable[[Use], Iterator[Broken]] = lambda use: iter(())


def broken(use: Use) -> Iterator[tuple[Level, str, str]]:
    """(level, message, source) of what a node breaks."""
    rule = RULES.get(use.node.type)
    if rule is None:
        yield "error", f"no rule is known for operator {use.node.type}; read what it accepts and add one", "this table"
        return
    first = next(iter(use.given.values()), None)
    if first is not None and first[0] not in rule.types:
        names = ", ".join(sorted(str(t).removeprefix("torch.") for t in rule.types))
        yield "error", f"{str(first[0]).removeprefix('torch.')}; expected one of {names}", rule.source
    for level, message in rule.more(use):
        yield level, message, rule.source


def _rotary_mul(use: Use) -> Iterator[Broken]:
    x, r1 = use.shape("x"), use.shape("r1")
    if len(x) != 4 or x[-1] % 64 or max(x[0], x[2]) >= 1000:
        yield "error", f"x is {list(x)}; expected [B, T, N, D], D a multiple of 64, B and N below 1000"
    elif r1 not in ((1, x[1], 1, x[3]), (x[0], x[1], 1, x[3]), x):
        yield "error", f"r1 is {list(r1)}; expected [1, {x[1]}, 1, {x[3]}]"


def _apply_rotary(use: Use) -> Iterator[Broken]:
    q, k, cos = (use.shape(name) for name in ("query", "key", "cos"))
    if use.node.attributes.get("layout", 1) != 1 or len(q) != 4 or q[-1] not in (64, 128):
        yield "error", f"query is {list(q)}; expected layout 1, [B, T, N, D] with D 64 or 128"
        return
    if (*q[:2], 1, q[3]) != cos or use.shape("sin") != cos or (*k[:2], k[3]) != (*q[:2], q[3]):
        yield "error", f"key is {list(k)}, cos {list(cos)}; expected no broadcast of B, T or D"
    width = torch.finfo(use.given["query"][0]).bits // 8
    needed = (5 * (q[2] + k[2]) * 4 + 4 * width + 8) * q[3]
    if needed > _UNIFIED_BUFFER:
        yield "error", f"{q[2]} + {k[2]} heads of {q[3]} need {needed} bytes of {_UNIFIED_BUFFER} of unified buffer"
    for name in ("query", "key"):
        edge = use.node.input(name)
        if edge is not None and (other := _other_reader(use.graph, edge, use.node.name)):
            yield "error", f"writes over its {name}, which {other} is or reads as well"


def _other_reader(graph: Graph, edge: Edge, name: str) -> str:
    """Who else has the memory behind an edge: another reader, or the world outside of the graph; "" if nobody."""
    while True:
        for reader, number in graph.readers(edge.node):
            if reader.name != name and reader.inputs[number] == edge:
                return reader.name
        node = graph.nodes[edge.node]
        if node.type not in VIEWS:
            return node.name if node.type in ("Data", "RefData", "Const", "FileConstant") else ""
        first = node.inputs[0]
        assert first is not None
        name, edge = node.name, first


def _scatter(use: Use) -> Iterator[Broken]:
    var, indices, updates = (use.shape(name) for name in ("var", "indices", "updates"))
    if not 1 <= len(var) <= 8 or len(indices) < 2:
        yield "error", f"var is {list(var)}, indices {list(indices)}; expected 1 to 8 and at least 2 dimensions"
    elif updates != (*indices[:-1], *var[indices[-1] :]):
        yield "error", f"updates are {list(updates)}; expected {[*indices[:-1], *var[indices[-1] :]]}"


def _matmul(use: Use) -> Iterator[Broken]:
    if (len(use.shape("x1")), len(use.shape("x2"))) != (2, 2):
        yield "error", f"operands are {list(use.shape('x1'))} and {list(use.shape('x2'))}; expected two matrices"
    bias = use.given.get("bias")
    if bias is not None and bias[1] != use.results[0][1][-1:]:
        yield "error", f"bias is {list(bias[1])}; expected {list(use.results[0][1][-1:])}"


def _dynamic_quant(use: Use) -> Iterator[Broken]:
    if len(use.shape("x")) < 2:
        yield "error", f"x is {list(use.shape('x'))}; expected 2 dimensions or more"


def _norm_quant(use: Use) -> Iterator[Broken]:
    kind, shape = use.given["x1"]
    if use.given["x2"] != (kind, shape) or use.given["gamma"] != (kind, shape[-1:]):
        yield "error", f"x2 is {use.given['x2']}, gamma {use.given['gamma']}; expected {kind} like x1, {list(shape)}"
    if use.node.attributes["epsilon"] <= 0:
        yield "error", f"epsilon is {use.node.attributes['epsilon']}; expected more than 0"


def _swiglu_quant(use: Use) -> Iterator[Broken]:
    *rows, width = use.shape("x")
    if not rows or width % 2:
        yield "error", f"x is {[*rows, width]}; expected 2 dimensions or more, the last one even"
    elif not swiglu_fits(width // 2, math.prod(rows)):
        yield "error", f"{SWIGLU_ROWS} rows of {width} are more than the {SWIGLU_BYTES} bytes of a vector core"


def _quant_matmul(use: Use) -> Iterator[Broken]:
    x1, x2 = use.shape("x1"), use.shape("x2")
    kind, result = use.results[0]
    if len(x1) != 2 or len(x2) != 2 or kind not in HALVES:
        yield "error", f"operands are {list(x1)} and {list(x2)}, the result {kind}; expected matrices, and a half type"
        return
    if max(x1[-1], x2[-1]) > _WIDEST:
        yield "warning", f"{max(x1[-1], x2[-1])} columns; CANN before 9.1 takes {_WIDEST} at most"
    for name, shape in (("scale", result[-1:]), ("pertoken_scale", result[:1])):
        if use.given.get(name) != (torch.float32, shape):
            yield "error", f"{name} is {use.given.get(name)}; expected float32 {list(shape)}"
    bias = use.given.get("bias")
    if bias is not None and (bias[1] != result[-1:] or bias[0] not in (kind, torch.float32)):
        yield "error", f"bias is {bias[0]} {list(bias[1])}; expected {kind} or float32 {list(result[-1:])}"


def _batch_matmul(use: Use) -> Iterator[Broken]:
    if not 2 <= len(use.shape("x1")) <= 8 or len(use.shape("x1")) != len(use.shape("x2")):
        yield "error", f"operands are {list(use.shape('x1'))} and {list(use.shape('x2'))}; expected 2 to 8 dimensions"


def _norm(use: Use) -> Iterator[Broken]:
    x = use.shape("x1" if "x1" in use.given else "x")
    if use.shape("gamma") != x[-1:]:
        yield "error", f"gamma is {list(use.shape('gamma'))}; expected {list(x[-1:])}"


def _swiglu(use: Use) -> Iterator[Broken]:
    if use.shape("x")[-1] % 2:
        yield "error", f"the last dimension is {use.shape('x')[-1]}; expected an even one"


def _wide(use: Use) -> Iterator[Broken]:
    most = max(len(use.node.operands) - (use.node.type == "ConcatV2"), len(use.results))
    if most > 63:
        yield "warning", f"{most} tensors in one node: becomes {-(-most // 63) + 1} kernels ({_WIDE})"


def _join(use: Use) -> Iterator[Broken]:
    for kind, shape in use.given.values():
        if math.prod(shape) * kind.itemsize % 32:
            yield "warning", f"a part {list(shape)} is no multiple of 32 bytes: GE runs a kernel that copies"


def _gather(use: Use) -> Iterator[Broken]:
    if len(use.shape("indices")) > 1 or use.node.attributes.get("batch_dims", 0):
        yield "warning", f"indices are {list(use.shape('indices'))}; a list of rows is the fast form"


def _top_k(use: Use) -> Iterator[Broken]:
    if use.given["x"][0] not in FLOATS:
        yield "warning", "whole numbers are ranked on the AI CPU"


def _bitwise(use: Use) -> Iterator[Broken]:
    if use.given["x1"][0] not in (torch.int32, torch.int64):
        yield "warning", "bytes are computed on the AI CPU"


def _log_sum_exp(use: Use) -> Iterator[Broken]:
    if use.given["x"][0] is torch.bfloat16:
        yield "warning", "no AI Core kernel takes bfloat16; it is widened to float32"


def _gating(use: Use) -> Iterator[Broken]:
    experts, k = use.shape("x")[-1], use.node.attributes["k"]
    if not 1 <= k <= min(experts, 1024):
        yield "error", f"k is {k} of {experts} experts; expected 1 to {min(experts, 1024)}"


def _routing(use: Use) -> Iterator[Broken]:
    places, given = math.prod(use.shape("expert_idx")), use.node.attributes
    wanted = {"active_num": (places,), "drop_pad_mode": (0,), "expert_tokens_num_type": (1, 2), "quant_mode": (-1, 1)}
    for name, values in {**wanted, "expert_tokens_num_flag": (True,)}.items():
        if given[name] not in values:
            yield "error", f"{name} is {given[name]}; expected {' or '.join(map(str, values))}"
    if not 0 <= given["expert_num"] <= 10240:
        yield "error", f"{given['expert_num']} experts; expected at most 10240"


def _grouped(use: Use) -> Iterator[Broken]:
    x, weight, groups = use.shape("x0"), use.shape("weight0"), use.given["group_list"]
    if (len(x), len(weight)) != (2, 3):
        yield "error", f"x is {list(x)}, weight {list(weight)}; expected 2 and 3 dimensions"
    elif max(x[-1], weight[-1]) >= 65536:
        yield "error", f"the last dimensions are {x[-1]} and {weight[-1]}; expected less than 65536"
    if groups != (torch.int64, (weight[0],)) or weight[0] > 1024:
        yield "error", f"group_list is {list(groups[1])}; expected int64[{weight[0]}], at most 1024 groups"


def _finalize(use: Use) -> Iterator[Broken]:
    if "scales" in use.given and use.given["scales"][0] != use.given["expanded_x"][0]:
        yield "error", f"scales are {use.given['scales'][0]}; expected the type of the rows"


def _collective(use: Use) -> Iterator[Broken]:
    group = str(use.node.attributes.get("group", ""))
    if not group or len(group) > 128:
        yield "error", f"a group's name of {len(group)} characters; expected 1 to 128"
    edge = use.node.input("x")
    if edge is not None and (held := _held(use.graph, edge)):
        yield (
            "error",
            f"sends {held}, whose address a static graph cannot refresh; expected a computed tensor ({_HCOM})",
        )
    if any(reader.type == "NetOutput" for reader, _ in use.graph.readers(use.node.name)):
        yield "error", f"its result is an output of the graph; expected another operator behind it ({_HCOM})"
    if use.node.type == "HcomAllReduce" and use.given["x"][0] is torch.bfloat16:
        yield "warning", "the operator's definition lists no bfloat16, which HCCL itself adds up"


def _held(graph: Graph, edge: Edge) -> str:
    """What of the graph's inputs and weights an edge is a view of; "" if it is computed."""
    node = graph.nodes[edge.node]
    while node.type in VIEWS:
        first = node.inputs[0]
        assert first is not None
        node = graph.nodes[first.node]
    return f"{node.type} {node.name}" if node.type in ("Data", "RefData", "Const", "FileConstant") else ""


_ANY = Rule(ALL)
RULES: Mapping[str, Rule] = {
    "RotaryMul": Rule(FLOATS, _ROTARY_MUL, _rotary_mul),
    "ApplyRotaryPosEmb": Rule(FLOATS, _APPLY_ROTARY, _apply_rotary),
    "ScatterNdUpdate": Rule(ALL - {torch.uint8}, _SCATTER, _scatter),
    "MatMul": Rule(FLOATS, DEFINITION, _matmul),
    "MatMulV2": Rule(FLOATS, DEFINITION, _matmul),
    "DynamicQuant": Rule(HALVES, _DYNAMIC_QUANT, _dynamic_quant),
    "AddRmsNormDynamicQuant": Rule(HALVES, _NORM_QUANT, _norm_quant),
    "DequantSwigluQuant": Rule(HALVES, _SWIGLU_QUANT, _swiglu_quant),
    "QuantBatchMatmulV3": Rule(frozenset({torch.int8}), _QUANT_MATMUL, _quant_matmul),
    "BatchMatMul": Rule(FLOATS, DEFINITION, _batch_matmul),
    "BatchMatMulV2": Rule(FLOATS, DEFINITION, _batch_matmul),
    "RmsNorm": Rule(FLOATS, DEFINITION, _norm),
    "AddRmsNorm": Rule(FLOATS, DEFINITION, _norm),
    "SwiGlu": Rule(FLOATS, DEFINITION, _swiglu),
    "FusedInferAttentionScore": Rule(FLOATS, "the rules of constraints"),
    "MoeGatingTopKSoftmax": Rule(FLOATS, _GATING, _gating),
    "MoeInitRoutingV3": Rule(FLOATS, _ROUTING, _routing),
    "GroupedMatmul": Rule(FLOATS, _GROUPED, _grouped),
    "MoeFinalizeRoutingV2": Rule(FLOATS, _FINALIZE, _finalize),
    "GatherV2": Rule(ALL, DEFINITION, _gather),
    "TopKV2": Rule(NUMBERS, _TOP_K, _top_k),
    "ReduceLogSumExp": Rule(FLOATS, "CANN 8.1.RC1, operator information of the 910B", _log_sum_exp),
    "ConcatD": Rule(ALL, _JOIN, _join),
    **dict.fromkeys(("ConcatV2", "Pack", "SplitV", "Unpack"), Rule(ALL, DEFINITION, _wide)),
    **dict.fromkeys(("Reshape", "Squeeze", "Unsqueeze", "Cast", "Transpose"), _ANY),
    **dict.fromkeys(("BroadcastTo", "Tile", "GatherElements", "StridedSliceV2", "Fill", "ZerosLike"), _ANY),
    "SelectV2": Rule(BOOLS),  # of the condition
    "Range": Rule(FLOATS | {torch.int32, torch.int64}),
    **dict.fromkeys(("LogicalAnd", "LogicalOr", "LogicalNot", "ReduceAny", "ReduceAll"), Rule(BOOLS)),
    **dict.fromkeys(("Add", "Sub", "Mul", "FloorDiv", "ClipByValueV2"), Rule(NUMBERS)),
    "Neg": Rule(FLOATS | {torch.int32, torch.int64}),
    "Abs": Rule(NUMBERS - {torch.uint8}),
    "ReduceMax": Rule(NUMBERS),
    **dict.fromkeys(("Maximum", "Minimum"), Rule(NUMBERS - {torch.int8, torch.uint8, torch.bfloat16})),
    "BitwiseAnd": Rule(INTEGERS, _BITWISE, _bitwise),
    "PadV3": Rule(ALL),
    **dict.fromkeys(("Less", "LessEqual", "Greater", "GreaterEqual", "ReduceSum"), Rule(NUMBERS)),
    "Sort": Rule(NUMBERS - {torch.bfloat16}),
    **dict.fromkeys(("Equal", "NotEqual"), Rule(ALL)),
    **dict.fromkeys(("SoftmaxV2", "Swish", "Sigmoid", "Tanh", "Div", "RealDiv", "Exp", "Log"), Rule(FLOATS)),
    # By its definition it takes no bfloat16, but none is left where it would run.
    "Identity": Rule(ALL, "GE takes it out before it compiles"),
    **dict.fromkeys(("HcomAllReduce", "HcomAllGather"), Rule(FLOATS, _HCCL, _collective)),
    "MaskedFill": Rule(NUMBERS - {torch.uint8}),
    "ArgMaxV2": Rule(FLOATS),
}
