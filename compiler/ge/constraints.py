"""The rules of Ascend's operators, checked on a lowered GE graph.

The rules here are those of ``npu_fused_infer_attention_score`` (FIA), those of all other operators in
``operator_rules``. Every finding names the document or source file that states its rule. An error is refused by the
device, or computes something else there; a warning costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from draftwood.compiler.ge.graph import FREE, HELD, Edge, Graph, Node
from draftwood.compiler.ge.operator_rules import broken, use_of
from draftwood.compiler.ge.operators import attribute
from draftwood.contract import ACCEPTED, COMMITTED, WAITING

# B batch, N query heads, K key/value heads, T query rows, C cache slots, D head dimension

Shapes = Mapping[str, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]

_FIA_DOCUMENT = "op-plugin docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md"
_MASK_CHECKER = "ops-transformer 9.1.0 attention/fused_infer_attention_score/op_host/checkers/mask_checker.cpp"
_MASK_REFERENCE = "ops-transformer tests/st/aclnnFusedInferAttentionScoreV4/executor_aclnnFusedInferAttentionScoreV4.py"
_TILING = "ops-transformer 9.1.0 attention/common/op_host/arch22/fia_tiling_nonquant.cpp"
_LAYOUTS = "GE, docs/en/design/features/external_weight.md: a FileConstant's bytes are taken as they lie in its file"
_IGNORED_MASK = "vllm-project/vllm-ascend issue 15503"


class Finding(NamedTuple):
    """One broken rule at one node."""

    level: Literal["error", "warning"]
    node: str
    rule: str
    message: str
    source: str


@dataclass(frozen=True, slots=True)
class AttentionNode:
    """One fused attention node with the values that the rules read; shapes of BNSD are [B, N|K, T|C, D]."""

    node: Node
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[torch.dtype, tuple[int, ...]] | None
    heads: int
    kv_heads: int
    layout: str
    mode: int


def check_constraints(graph: Graph, shapes: Shapes) -> list[Finding]:
    """All findings of a graph; ``shapes`` as ``interpreter.shapes`` infers them."""
    findings: list[Finding] = []
    for node in graph.nodes.values():
        if node.type == "FusedInferAttentionScore":
            attention = _attention(node, shapes)
            for rule in _RULES:
                findings += rule(attention, graph)
    return [*findings, *_operators(graph, shapes), *_layouts(graph), *_run_time_values(graph)]


def _layouts(graph: Graph) -> Iterator[Finding]:
    """Everything lies row by row, as checkpoints and the weights file have it; GE chooses other layouts itself."""
    for node in graph.nodes.values():
        for declared in (*node.input_types, *node.output_types):
            if declared.layout != "ND":
                message = f"{declared.name} is declared {declared.layout}, but its bytes lie row by row; expected ND"
                yield Finding("error", node.name, "layout in memory", message, _LAYOUTS)


def _operators(graph: Graph, shapes: Shapes) -> Iterator[Finding]:
    """The findings of the rules of single operators; nodes that only hold a value have none."""
    for node in graph.nodes.values():
        if node.type in HELD:
            continue
        for level, message, source in broken(use_of(graph, node, shapes)):
            yield Finding(level, node.name, node.type, message, source)


def _attention(node: Node, shapes: Shapes) -> AttentionNode:
    def of(name: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        edge = node.input(name)
        return shapes[edge.node][edge.output] if edge is not None else None

    # The lists of key and value tensors of the operator are named with a number; ours have one each.
    query, key, value = of("query"), of("key0"), of("value0")
    assert query is not None and key is not None and value is not None, node
    heads = int(attribute(node, "num_heads"))
    return AttentionNode(
        node=node,
        query=query[1],
        key=key[1],
        value=value[1],
        dtype=query[0],
        mask=of("atten_mask"),
        heads=heads,
        kv_heads=int(attribute(node, "num_key_value_heads")) or heads,
        layout=str(attribute(node, "input_layout")),
        mode=int(attribute(node, "sparse_mode")),
    )


def _error(attention: AttentionNode, rule: str, message: str, source: str) -> Finding:
    return Finding("error", attention.node.name, rule, message, source)


def _layout(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    if a.layout not in ("BNSD", "BSND", "BSH"):
        yield _error(a, "layout", f"{a.layout} takes no custom mask; expected BNSD, BSND or BSH", _FIA_DOCUMENT)
    if a.mask is not None and a.mode not in (0, 1):
        yield _error(a, "sparse_mode", f"mode {a.mode} ignores a full mask; expected 0 or 1", _FIA_DOCUMENT)
    if a.key != a.value:
        yield _error(a, "shapes", f"key {a.key} and value {a.value} differ", _FIA_DOCUMENT)


def _types(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    if a.dtype not in (torch.float16, torch.bfloat16):
        yield _error(a, "dtype", f"{a.dtype} queries; expected float16 or bfloat16", _FIA_DOCUMENT)
    if a.mask is not None and a.mask[0] not in (torch.bool, torch.int8, torch.uint8):
        yield _error(
            a, "mask dtype", f"{a.mask[0]}; expected bool, int8 or uint8", f"{_MASK_CHECKER} CheckDtypeAndFormat"
        )


def _heads(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    dim = a.query[-1] if a.layout != "BSH" else a.query[-1] // a.heads
    if a.heads % a.kv_heads or a.heads // a.kv_heads > 64 or a.heads > 256:
        yield _error(
            a, "heads", f"{a.heads} query and {a.kv_heads} key heads; expected a whole ratio up to 64", _FIA_DOCUMENT
        )
    if dim % 16 or dim > 512:
        yield _error(a, "head_dim", f"{dim}; expected a multiple of 16 up to 512", _FIA_DOCUMENT)
    if a.layout != "BNSD" and a.heads * dim >= 65535:
        yield _error(a, "width", f"{a.heads} x {dim}; expected below 65535 in {a.layout}", _FIA_DOCUMENT)


def _mask(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    rows, slots = _rows(a), _slots(a)
    if a.mask is None:
        yield _error(a, "mask", "no mask: rows would see each other and stale slots", _FIA_DOCUMENT)
        return
    shape = a.mask[1]
    if len(shape) != 4 or shape[0] not in (1, a.query[0]) or shape[1] != 1 or shape[2] < rows or shape[3] < slots:
        yield _error(
            a,
            "mask shape",
            f"{list(shape)}; expected [1 or {a.query[0]}, 1, >= {rows}, >= {slots}]",
            f"{_MASK_CHECKER} ValidateMaskDimAndShape",
        )
    edge = a.node.input("atten_mask")
    assert edge is not None
    if (producer := _through_views(graph, edge)).type != "LogicalNot":
        yield _error(
            a,
            "mask polarity",
            f"made by {producer.type} {producer.name}; expected LogicalNot of what is seen, for True means masked",
            _MASK_REFERENCE,
        )
    if slots % 32:
        yield Finding(
            "warning", a.node.name, "mask padding", f"{slots} columns, no multiple of 32: slower reads", _FIA_DOCUMENT
        )


def _one_row(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    if _rows(a) == 1 and a.mask is not None and _slots(a) > 512:
        yield _error(a, "one row", "a mask is ignored past 512 slots at one query row; pad to two rows", _IGNORED_MASK)


def _tiles(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    """The tiling of the A2 kernels: up to 16 rows a long KV tile with few rows of M, above it 512 rows of M."""
    rows, group, slots = _rows(a), a.heads // a.kv_heads, _slots(a)
    if rows > 16:
        return
    inner = min(slots, 8192 if group < 5 else 4096 if group < 10 else 2048)
    tile = next(m for limit, m in ((512, 512), (1024, 256), (2048, 128), (4096, 64), (8192, 32)) if inner <= limit)
    passes = -(-group * rows // tile)
    if passes > 1:
        yield Finding(
            "warning",
            a.node.name,
            "row tiles",
            f"{rows} rows of {group} heads fill {passes} tiles of {tile}: K and V are read {passes} times;"
            f" {tile // group} or fewer rows, or 17 and more, read them once",
            _TILING,
        )


def _baked(a: AttentionNode, graph: Graph) -> Iterator[Finding]:
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        edge = a.node.input(name)
        if edge is not None and graph.nodes[edge.node].type == "Const":
            yield _error(
                a, "baked length", f"{name} is a constant of the graph; expected the mask to tell", _FIA_DOCUMENT
            )


_RULES: tuple[Callable[[AttentionNode, Graph], Iterator[Finding]], ...] = (
    _layout,
    _types,
    _heads,
    _mask,
    _one_row,
    _tiles,
    _baked,
)


def _run_time_values(graph: Graph) -> Iterator[Finding]:
    """``committed`` and ``accepted`` change every step: mask, positions and written slots must follow them."""
    sources = {node.name for node in graph.sources()}
    followed = {
        "FusedInferAttentionScore": ("atten_mask", {COMMITTED}),
        "RotaryMul": ("r1", {COMMITTED}),
        "ApplyRotaryPosEmb": ("cos", {COMMITTED}),
        "ScatterNdUpdate": ("indices", {COMMITTED, ACCEPTED}),
    }
    reached: dict[str, frozenset[str]] = {}
    for node in graph.nodes.values():  # in execution order
        itself = frozenset({node.name}) if node.name in sources else frozenset()
        reached[node.name] = itself.union(*(reached[e.node] for e in node.inputs if e is not None))
        port, needed = followed.get(node.type, ("", set()))
        written = node.input("var") if WAITING in sources else None
        if written is not None and written.node.startswith("draft_"):
            needed = {COMMITTED, WAITING}  # a whole step writes the drafter's caches, too
        edge = node.input(port) if port else None
        if missing := {n for n in needed & sources if edge is not None and n not in reached[edge.node]}:
            yield Finding(
                "error",
                node.name,
                "baked value",
                f"{port} does not depend on {', '.join(sorted(missing))}, which changes from step to step",
                "deferred commit: one graph serves every length",
            )


def _rows(a: AttentionNode) -> int:
    return a.query[2] if a.layout == "BNSD" else a.query[1]


def _slots(a: AttentionNode) -> int:
    return a.key[2] if a.layout == "BNSD" else a.key[1]


def _through_views(graph: Graph, edge: Edge) -> Node:
    node = graph.nodes[edge.node]
    while node.type in FREE:
        first = node.inputs[0]
        assert first is not None
        node = graph.nodes[first.node]
    return node
