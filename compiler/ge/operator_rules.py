"""Rules of every operator of our graphs on an Ascend 910B or 910C: element types, ranks, sizes, layouts.

Element types and engines have their own table (``element_types``). An operator that it lacks has not been read about
yet, which is a finding like any other. The rules of the fused attention are in ``constraints``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from draftwood.compiler.device.constants import AI_CPU_BANDWIDTH, AI_CPU_OVERHEAD
from draftwood.compiler.ge.element_types import Placed, element_types, place
from draftwood.compiler.ge.graph import FREE, HELD, VIEWS, Edge, Graph, Node
from draftwood.compiler.ge.operators import attribute
from draftwood.kernels.int4 import GROUPS, OUTPUTS
from draftwood.kernels.rounded import SWIGLU_BYTES, SWIGLU_ROWS, swiglu_fits

# B batch, T rows, N query heads, K key/value heads, D head dimension

Typed = tuple[torch.dtype, tuple[int, ...]]
HALVES = (torch.float16, torch.bfloat16)

DEFINITION = "CANN's operator definition (REG_OP), repeated in torchair's auto_generated_ge_raw_ops.py"
_ROTARY_MUL = "CANN 8.1.RC1, op_proto/inc/nn_other.h, RotaryMul: 4-D BNSD, BSND or SBND, D a multiple of 64"
_APPLY_ROTARY = "ops-transformer 9.1.0, posembedding/apply_rotary_pos_emb, README and op_host tiling for 910B"
_SCATTER = "ops-nn, index/scatter_nd_update: var of 1 to 8 dimensions, indices of 2 and more"
_WIDE = "GE's fusion passes for Concat, Pack and Split divide nodes of more than 63 tensors"
_JOIN = "GE, compiler/graph/passes/memory_optimize/concat_notask_pass.cc, CheckTensorAlign"
_HCOM = "GE, docs/en/design/constraints/memory-constraints.md and known_shape_runtime.md"
_HCCL = "CANN 8.5.0, API reference of HcclAllReduce and HcclAllGather: float16, float32 and bfp16 on A2 and A3"
_GATING = "ops-transformer, moe/moe_gating_top_k_softmax/README: k of at most 1024"
_ROUTING = "ops-transformer, moe/moe_init_routing_v3/README, constraints for Atlas A2 and A3"
_GROUPED = "ops-transformer, gmm/grouped_matmul/README, constraints for Atlas A2 and A3, group type 0"
_FINALIZE = "ops-transformer, moe/moe_finalize_routing_v2, op_graph proto: scales in the rows' type before the 950"
_DYNAMIC_QUANT = "ops-nn, quant/dynamic_quant, README: float16 and bfloat16 of 2 dimensions and more"
_QUANT_MATMUL = "ops-nn, matmul/quant_batch_matmul_v3, op_graph and README, rows of the 910B for int8"
_INT4_MATMUL = "ops-nn 9.1.0, matmul/weight_quant_batch_matmul_v2, README, documents and tilings for the 910B"
_NORM_QUANT = "ops-nn, norm/add_rms_norm_dynamic_quant, README, and its tiling for the 910B"
_SWIGLU_QUANT = "ops-nn, quant/dequant_swiglu_quant, README, constraints for Atlas A2 and A3"
# The last dimension of either operand of a quantised product (documents of 8.5.0 and 9.0.0; later ones lift it).
_WIDEST = 65535
# Bytes of the unified buffer of a 910B's vector core.
_UNIFIED_BUFFER = 192 * 1024


@dataclass(frozen=True, slots=True)
class Use:
    """One node of a graph with its operands by name, and the types of its results."""

    graph: Graph
    node: Node
    operands: Mapping[str, Typed]
    results: tuple[Typed, ...]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.operands[name][1]


# The broken rule, and whether that is an error or costs time only.
Level = Literal["error", "warning"]
Broken = tuple[Level, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """A demand besides the element types, and where it was read."""

    source: str
    find: Callable[[Use], Iterator[Broken]]


def broken(use: Use) -> Iterator[tuple[Level, str, str]]:
    """(level, message, source) of each rule that a node breaks."""
    if not _taken_out(use):
        for level, message in _types(use):
            yield level, message, _listed(use.node.type)
    if (rule := RULES.get(use.node.type)) is not None:
        for level, message in rule.find(use):
            yield level, message, rule.source


def engines(graph: Graph, shapes: Mapping[str, tuple[Typed, ...]]) -> Counter[str]:
    """How many nodes run on which engine, those aside that run on none because they only hold or reshape values."""
    counted: Counter[str] = Counter()
    for node in graph.nodes.values():
        if node.type in HELD or _taken_out(use := use_of(graph, node, shapes)):
            continue
        placed = placed_use(use)
        counted[placed.engine if placed is not None else "none"] += 1
    return counted


def use_of(graph: Graph, node: Node, shapes: Mapping[str, tuple[Typed, ...]]) -> Use:
    """A node with the types that it is given; ``shapes`` as ``interpreter.shapes`` infers them."""
    named = zip(node.operands, node.input_types, strict=False)
    operands = {declared.name: shapes[edge.node][edge.output] for edge, declared in named if edge is not None}
    return Use(graph, node, operands, shapes[node.name])


def placed_use(use: Use) -> Placed | None:
    """Where GE runs a node, by its types; None if the table lacks its operator."""
    types = {name: dtype for name, (dtype, _) in use.operands.items()}
    return place(use.node.type, types, [dtype for dtype, _ in use.results])


def _taken_out(use: Use) -> bool:
    """Whether GE runs nothing for a node: a view, or a Cast to the type that the value has (cast_remove_pass.cc)."""
    return use.node.type in FREE or (use.node.type == "Cast" and use.operands["x"][0] == use.results[0][0])


def _types(use: Use) -> Iterator[Broken]:
    """No row of the table: an error. The AI CPU alone, or a Cast that GE adds: a warning, because it costs time."""
    placed = placed_use(use)
    operands = ", ".join(f"{name} {_short(dtype)}" for name, (dtype, _) in use.operands.items())
    if placed is None:
        yield "error", f"no element types are known of operator {use.node.type}; read what it takes, and distil them"
    elif placed.engine == "none":
        nearest = f"; nearest: {placed.nearest}" if placed.nearest else ""
        yield "error", f"no kernel takes {operands} for {_results(use)}{nearest}"
    elif placed.engine == "AI CPU":
        yield (
            "warning",
            f"AI CPU, about {_ai_cpu_s(use) * 1e6:.0f} us: no kernel of the AI Core takes {operands}"
            f" for {_results(use)}",
        )
    elif placed.raised:
        yield (
            "warning",
            f"GE casts {', '.join(placed.raised)} to float32, a kernel each: none takes {operands} for {_results(use)}",
        )


def _results(use: Use) -> str:
    return ", ".join(_short(dtype) for dtype, _ in use.results)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ai_cpu_s(use: Use) -> float:
    """Modelled: its start, and its operands and results once through an Arm core."""
    moved = sum(math.prod(shape) * dtype.itemsize for dtype, shape in (*use.operands.values(), *use.results))
    return AI_CPU_OVERHEAD.value + moved / AI_CPU_BANDWIDTH.value


def _listed(kind: str) -> str:
    """Where the operator's element types were read."""
    known = element_types().operators.get(kind)
    if known is None:
        return "compiler/ge/element_types.json"
    places = ", ".join(f"CANN {release}" for release in known.rows) or "CANN 8.1.RC1"
    return f"{places}: {known.read or 'operator store and definitions'}"


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
    width = torch.finfo(use.operands["query"][0]).bits // 8
    needed = (5 * (q[2] + k[2]) * 4 + 4 * width + 8) * q[3]
    if needed > _UNIFIED_BUFFER:
        yield "error", f"{q[2]} + {k[2]} heads of {q[3]} need {needed} bytes of {_UNIFIED_BUFFER} of unified buffer"
    for name in ("query", "key"):
        edge = use.node.input(name)
        if edge is not None and (other := _other_reader(use.graph, edge, use.node.name)):
            yield "error", f"writes over its {name}, which {other} is or reads as well"


def _other_reader(graph: Graph, edge: Edge, name: str) -> str:
    """The other user of an edge's memory: another reader, or the world outside of the graph; "" if nobody."""
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
    bias = use.operands.get("bias")
    if bias is not None and bias[1] != use.results[0][1][-1:]:
        yield "error", f"bias is {list(bias[1])}; expected {list(use.results[0][1][-1:])}"


def _dynamic_quant(use: Use) -> Iterator[Broken]:
    if len(use.shape("x")) < 2:
        yield "error", f"x is {list(use.shape('x'))}; expected 2 dimensions or more"


def _norm_quant(use: Use) -> Iterator[Broken]:
    kind, shape = use.operands["x1"]
    if use.operands["x2"] != (kind, shape) or use.operands["gamma"] != (kind, shape[-1:]):
        yield (
            "error",
            f"x2 is {use.operands['x2']}, gamma {use.operands['gamma']}; expected {kind} like x1, {list(shape)}",
        )
    if (epsilon := attribute(use.node, "epsilon")) <= 0:
        yield "error", f"epsilon is {epsilon}; expected more than 0"


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
        if use.operands.get(name) != (torch.float32, shape):
            yield "error", f"{name} is {use.operands.get(name)}; expected float32 {list(shape)}"
    bias = use.operands.get("bias")
    if bias is not None and (bias[1] != result[-1:] or bias[0] not in (kind, torch.float32)):
        yield "error", f"bias is {bias[0]} {list(bias[1])}; expected {kind} or float32 {list(result[-1:])}"


def _int4_matmul(use: Use) -> Iterator[Broken]:
    x, words, scale = use.shape("x"), use.shape("weight"), use.shape("antiquant_scale")
    group, outputs = attribute(use.node, "antiquant_group_size"), 8 * words[-1]
    if len(x) != 2 or len(words) != 2 or x[-1] != words[0] or max(x[-1], outputs) > _WIDEST:
        yield "error", f"operands are {list(x)} and {list(words)}; expected matrices, at most {_WIDEST} wide and high"
    elif group not in GROUPS or words[0] % group or group == words[0] or outputs % OUTPUTS:
        yield "error", f"groups of {group} of {words[0]} inputs, {outputs} outputs; expected {GROUPS}, and {OUTPUTS}"
    elif scale != (words[0] // group, outputs) or use.operands.get(
        "antiquant_offset", use.operands["antiquant_scale"]
    ) != (
        use.operands["x"][0],
        scale,
    ):
        yield "error", f"scales are {list(scale)}; expected {[words[0] // group, outputs]}, offsets like them"
    bias = use.operands.get("bias")
    kind = torch.float32 if use.operands["x"][0] is torch.bfloat16 else torch.float16
    if bias is not None and bias != (kind, (outputs,)):
        yield "error", f"bias is {bias[0]} {list(bias[1])}; expected {kind} {[outputs]}"


def _batch_matmul(use: Use) -> Iterator[Broken]:
    if not 2 <= len(use.shape("x1")) <= 8 or len(use.shape("x1")) != len(use.shape("x2")):
        yield "error", f"operands are {list(use.shape('x1'))} and {list(use.shape('x2'))}; expected 2 to 8 dimensions"


def _norm(use: Use) -> Iterator[Broken]:
    x = use.shape("x1" if "x1" in use.operands else "x")
    if use.shape("gamma") != x[-1:]:
        yield "error", f"gamma is {list(use.shape('gamma'))}; expected {list(x[-1:])}"


def _swiglu(use: Use) -> Iterator[Broken]:
    if use.shape("x")[-1] % 2:
        yield "error", f"the last dimension is {use.shape('x')[-1]}; expected an even one"


def _wide(use: Use) -> Iterator[Broken]:
    most = max(len(use.node.operands), len(use.results))
    if most > 63:
        yield "warning", f"{most} tensors in one node: becomes {-(-most // 63) + 1} kernels"


def _join(use: Use) -> Iterator[Broken]:
    for kind, shape in use.operands.values():
        if math.prod(shape) * kind.itemsize % 32:
            yield "warning", f"a part {list(shape)} is no multiple of 32 bytes: GE runs a kernel that copies"


def _gather(use: Use) -> Iterator[Broken]:
    if len(use.shape("indices")) > 1 or attribute(use.node, "batch_dims"):
        yield "warning", f"indices are {list(use.shape('indices'))}; a list of rows is the fast form"


def _gating(use: Use) -> Iterator[Broken]:
    experts, k = use.shape("x")[-1], attribute(use.node, "k")
    if not 1 <= k <= min(experts, 1024):
        yield "error", f"k is {k} of {experts} experts; expected 1 to {min(experts, 1024)}"


def _ranked(use: Use) -> Iterator[Broken]:
    if not attribute(use.node, "sorted"):  # which the interpreter does sort
        yield "error", "its values come in any order; expected sorted, for a place is a rank"


def _routing(use: Use) -> Iterator[Broken]:
    places = math.prod(use.shape("expert_idx"))
    covered = {"active_num": (places,), "drop_pad_mode": (0,), "expert_tokens_num_type": (1, 2), "quant_mode": (-1, 1)}
    for name, values in {**covered, "expert_tokens_num_flag": (True,)}.items():
        if (value := attribute(use.node, name)) not in values:
            yield "error", f"{name} is {value}; expected {' or '.join(map(str, values))}"
    if not 0 <= (experts := attribute(use.node, "expert_num")) <= 10240:
        yield "error", f"{experts} experts; expected at most 10240"


def _grouped(use: Use) -> Iterator[Broken]:
    x, weight, groups = use.shape("x0"), use.shape("weight0"), use.operands["group_list"]
    if (len(x), len(weight)) != (2, 3):
        yield "error", f"x is {list(x)}, weight {list(weight)}; expected 2 and 3 dimensions"
    elif max(x[-1], weight[-1]) >= 65536:
        yield "error", f"the last dimensions are {x[-1]} and {weight[-1]}; expected less than 65536"
    if groups != (torch.int64, (weight[0],)) or weight[0] > 1024:
        yield "error", f"group_list is {list(groups[1])}; expected int64[{weight[0]}], at most 1024 groups"


def _finalize(use: Use) -> Iterator[Broken]:
    if "scales" in use.operands and use.operands["scales"][0] != use.operands["expanded_x"][0]:
        yield "error", f"scales are {use.operands['scales'][0]}; expected the type of the rows"


def _collective(use: Use) -> Iterator[Broken]:
    group = str(use.node.attributes.get("group", ""))
    if not group or len(group) > 128:
        yield "error", f"a group's name of {len(group)} characters; expected 1 to 128"
    edge = use.node.input("x")
    if edge is not None and (source := _held(use.graph, edge)):
        yield (
            "error",
            f"sends {source}, whose address a static graph cannot refresh; expected a computed tensor ({_HCOM})",
        )
    if any(reader.type == "NetOutput" for reader, _ in use.graph.readers(use.node.name)):
        yield "error", f"its result is an output of the graph; expected another operator after it ({_HCOM})"
    if use.node.type == "HcomAllReduce" and use.operands["x"][0] is torch.bfloat16:
        yield "warning", "the operator's definition lists no bfloat16, which HCCL itself adds up"


def _held(graph: Graph, edge: Edge) -> str:
    """The input or weight that an edge is a view of; "" if it is computed."""
    node = graph.nodes[edge.node]
    while node.type in VIEWS:
        first = node.inputs[0]
        assert first is not None
        node = graph.nodes[first.node]
    return f"{node.type} {node.name}" if node.type in ("Data", "RefData", "Const", "FileConstant") else ""


RULES: Mapping[str, Rule] = {
    "RotaryMul": Rule(_ROTARY_MUL, _rotary_mul),
    "ApplyRotaryPosEmb": Rule(_APPLY_ROTARY, _apply_rotary),
    "ScatterNdUpdate": Rule(_SCATTER, _scatter),
    **dict.fromkeys(("MatMul", "MatMulV2"), Rule(DEFINITION, _matmul)),
    "DynamicQuant": Rule(_DYNAMIC_QUANT, _dynamic_quant),
    "AddRmsNormDynamicQuant": Rule(_NORM_QUANT, _norm_quant),
    "DequantSwigluQuant": Rule(_SWIGLU_QUANT, _swiglu_quant),
    "QuantBatchMatmulV3": Rule(_QUANT_MATMUL, _quant_matmul),
    "WeightQuantBatchMatmulV2": Rule(_INT4_MATMUL, _int4_matmul),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2"), Rule(DEFINITION, _batch_matmul)),
    **dict.fromkeys(("RmsNorm", "AddRmsNorm"), Rule(DEFINITION, _norm)),
    "SwiGlu": Rule(DEFINITION, _swiglu),
    "MoeGatingTopKSoftmax": Rule(_GATING, _gating),
    "TopKV2": Rule(DEFINITION, _ranked),
    "MoeInitRoutingV3": Rule(_ROUTING, _routing),
    "GroupedMatmul": Rule(_GROUPED, _grouped),
    "MoeFinalizeRoutingV2": Rule(_FINALIZE, _finalize),
    "GatherV2": Rule(DEFINITION, _gather),
    "ConcatD": Rule(_JOIN, _join),
    **dict.fromkeys(("ConcatV2D", "Pack", "SplitV", "Unpack"), Rule(_WIDE, _wide)),
    **dict.fromkeys(("HcomAllReduce", "HcomAllGather"), Rule(_HCCL, _collective)),
}
