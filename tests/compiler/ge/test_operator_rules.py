"""Operators' rules besides element types: each violation is found at its node."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import Declared, Edge, Graph, Node
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import RULES, Use

HALF, LONG = torch.bfloat16, torch.int64


def node(kind: str, *names: str, **attributes: object) -> Node:
    declared = tuple(Declared(name, None, None) for name in names)
    return Node("n", kind, tuple(Edge(name, 0) for name in names), attributes, declared, (Declared("y", None, None),))


def found(
    kind: str,
    result: tuple[int, ...] = (),
    *,
    dtype: torch.dtype = HALF,
    attributes: dict[str, object] | None = None,
    **given: tuple[int, ...],
) -> list[str]:
    """The violations of a single node besides its element types; its operands have these shapes."""
    one = node(kind, *given, **(attributes or {}), **({"layout": 1} if kind == "ApplyRotaryPosEmb" else {}))
    sources = {name: Node(name, "Add", (), {}, (), (Declared("y", None, None),)) for name in given}
    graph = Graph("g", {**sources, "n": one})
    typed = {name: (LONG if name in ("indices", "group_list") else dtype, shape) for name, shape in given.items()}
    return [message for _, message in RULES[kind].find(Use(graph, one, typed, ((dtype, result),)))]


def test_an_operator_that_nobody_read_about_is_a_finding(lowered: Any) -> None:
    graph = lowered.graphs["draft"]
    name = next(n.name for n in graph.nodes.values() if n.type == "MatMulV2")
    odd = replace(graph, nodes=graph.nodes | {name: replace(graph.nodes[name], type="Einsum")})
    (finding,) = (f for f in check_constraints(odd, shapes(graph)) if f.level == "error")
    assert finding.node == name and "no element types are known of operator Einsum" in finding.message


TABLE = (1, 7, 1, 128)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("RotaryMul", {"x": (7, 4, 128), "r1": (7, 1, 128), "r2": (7, 1, 128)}, "expected [B, T, N, D]"),
        ("RotaryMul", {"x": (1, 7, 4, 96), "r1": (1, 7, 1, 96), "r2": (1, 7, 1, 96)}, "multiple of 64"),
        ("RotaryMul", {"x": (1, 7, 4, 128), "r1": (1, 1, 7, 128), "r2": TABLE}, "r1 is"),
        ("ApplyRotaryPosEmb", {"query": (7, 4, 128), "key": (7, 2, 128), "cos": TABLE, "sin": TABLE}, "layout 1"),
        (
            "ApplyRotaryPosEmb",
            {"query": (1, 7, 4, 128), "key": (1, 7, 2, 128), "cos": (1, 1, 1, 128), "sin": TABLE},
            "no broadcast",
        ),
        (
            "ApplyRotaryPosEmb",
            {"query": (1, 7, 96, 128), "key": (1, 7, 8, 128), "cos": TABLE, "sin": TABLE},
            "of unified buffer",
        ),
        ("ScatterNdUpdate", {"var": (64, 32), "indices": (7,), "updates": (7, 32)}, "at least 2 dimensions"),
        ("ScatterNdUpdate", {"var": (64, 32), "indices": (7, 1), "updates": (6, 32)}, "updates are [6, 32]"),
        ("MatMul", {"x1": (1, 7, 32), "x2": (32, 64)}, "two matrices"),
        ("BatchMatMul", {"x1": (2, 7, 32), "x2": (32, 64)}, "2 to 8 dimensions"),
        ("AddRmsNorm", {"x1": (7, 32), "x2": (7, 32), "gamma": (7,)}, "gamma is [7]"),
        ("SwiGlu", {"x": (7, 33)}, "an even one"),
    ],
)
def test_broken_rules(kind: str, given: dict[str, tuple[int, ...]], message: str) -> None:
    assert any(message in text for text in found(kind, **given))


def test_what_keeps_the_rules_is_not_found() -> None:
    assert found("RotaryMul", x=(1, 7, 4, 128), r1=TABLE, r2=TABLE) == []
    assert found("ApplyRotaryPosEmb", query=(1, 7, 64, 128), key=(1, 7, 8, 128), cos=TABLE, sin=TABLE) == []
    assert found("ScatterNdUpdate", var=(64, 32), indices=(7, 1), updates=(7, 32)) == []


def test_a_place_among_the_best_is_a_rank() -> None:
    assert found("TopKV2", x=(7, 32)) == []
    assert "expected sorted" in found("TopKV2", x=(7, 32), attributes={"sorted": False})[0]


# Of 24 places, as our graphs have it.
ROUTING = {"active_num": 24, "expert_num": 128, "drop_pad_mode": 0, "expert_tokens_num_type": 1, "quant_mode": -1}
ROUTING |= {"expert_tokens_num_flag": True}


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"active_num": 3}, "active_num is 3; expected 24"),
        ({"expert_tokens_num_type": 0}, "expert_tokens_num_type is 0; expected 1 or 2"),
        ({"expert_tokens_num_flag": False}, "expert_tokens_num_flag is False"),
        ({"drop_pad_mode": 1}, "drop_pad_mode is 1; expected 0"),
        ({"expert_num": 20000}, "20000 experts; expected at most 10240"),
        ({}, ""),
    ],
)
def test_routing_is_that_of_the_document(odd: dict[str, object], message: str) -> None:
    messages = found("MoeInitRoutingV3", attributes=ROUTING | odd, x=(3, 32), expert_idx=(3, 8))
    assert messages == [] if not odd else [text for text in messages if message in text]


def test_experts_keep_the_rules() -> None:
    assert found("GroupedMatmul", x0=(24, 32), weight0=(8, 64, 32), group_list=(8,)) == []
    assert "2 and 3 dimensions" in found("GroupedMatmul", x0=(24, 32), weight0=(64, 32), group_list=(64,))[0]
    assert "less than 65536" in found("GroupedMatmul", x0=(24, 65536), weight0=(8, 64, 65536), group_list=(8,))[0]
    assert "at most 1024" in found("GroupedMatmul", x0=(24, 32), weight0=(2000, 64, 32), group_list=(2000,))[0]
    assert "expected int64[8]" in found("GroupedMatmul", x0=(24, 32), weight0=(8, 64, 32), group_list=(7,))[0]
    assert found("MoeGatingTopKSoftmax", attributes={"k": 8}, x=(3, 128)) == []
    assert "k is 9 of 8 experts" in found("MoeGatingTopKSoftmax", attributes={"k": 9}, x=(3, 8))[0]
    assert found("MoeFinalizeRoutingV2", expanded_x=(24, 32), scales=(3, 8)) == []


def test_shares_have_the_type_of_the_rows() -> None:
    given = {"expanded_x": (HALF, (24, 32)), "scales": (torch.float32, (3, 8))}
    one = node("MoeFinalizeRoutingV2", *given)
    (message,) = (text for _, text in RULES[one.type].find(Use(Graph("g", {"n": one}), one, given, ())))
    assert message == "scales are torch.float32; expected the type of the rows"


def test_a_value_that_is_written_over_has_one_reader(lowered: Any) -> None:
    """The rotary operator puts its results where its inputs lie."""
    use = node("ApplyRotaryPosEmb", "query", "key", "cos", "sin", layout=1)
    sources = {name: Node(name, "Add", (), {}, (), (Declared("y", None, None),)) for name in ("key", "cos", "sin")}
    given = {"query": (HALF, (1, 7, 4, 64)), "key": (HALF, (1, 7, 2, 64))}
    given |= dict.fromkeys(("cos", "sin"), (HALF, (1, 7, 1, 64)))
    reader = Node("late", "Neg", (Edge("query", 0),), {}, (), ())
    for query, extra in ((Node("query", "Data", (), {}, (), ()), []), (Node("query", "Add", (), {}, (), ()), [reader])):
        graph = Graph("g", {**sources, "query": query, "n": use, **{n.name: n for n in extra}})
        messages = [message for _, message in RULES[use.type].find(Use(graph, use, given, ()))]
        assert len(messages) == 1 and messages[0].startswith("writes over its query, which")
