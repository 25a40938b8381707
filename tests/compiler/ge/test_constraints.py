"""Every rule of the fused attention is found broken where it is, and nowhere else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwood.compiler.ge.constraints import Shapes, check_constraints
from draftwood.compiler.ge.graph import Edge, Graph, Node
from draftwood.compiler.ge.interpreter import shapes

NAME = "verify-t7-kv640"
FIA = "FusedInferAttentionScore_0"


@pytest.mark.parametrize("name", ["prefill-t8-kv640", "decode-kv640", NAME, "draft"])
def test_lowered_graphs_break_no_rule(lowered: Any, name: str) -> None:
    graph = lowered.graphs[name]
    assert [f for f in check_constraints(graph, shapes(graph)) if f.level == "error"] == []


def with_attributes(graph: Graph, **attributes: object) -> Graph:
    node = graph.nodes[FIA]
    return replace(graph, nodes=graph.nodes | {FIA: replace(node, attributes=node.attributes | attributes)})


def with_input(graph: Graph, name: str, edge: Edge | None, *added: Node) -> Graph:
    node = graph.nodes[FIA]
    inputs = tuple(edge if d.name == name else e for e, d in zip(node.inputs, node.input_types, strict=True))
    # In execution order: what is added comes before the attention that reads it.
    nodes = {n.name: n for n in added} | graph.nodes | {FIA: replace(node, inputs=inputs)}
    return replace(graph, nodes=nodes)


def shaped(port: str, dtype: torch.dtype, *shape: int) -> Callable[[Graph, Shapes], Shapes]:
    """Pretends that the attention's input has another type or shape."""

    def change(graph: Graph, known: Shapes) -> Shapes:
        edge = graph.nodes[FIA].input(port)
        assert edge is not None
        return {**known, edge.node: ((dtype, shape),)}

    return change


HALF, FLAG = torch.bfloat16, torch.bool


@pytest.mark.parametrize(
    ("attributes", "change", "rule"),
    [
        ({"input_layout": "TND"}, None, "layout"),
        ({"sparse_mode": 3}, None, "sparse_mode"),
        ({}, shaped("value0", HALF, 1, 128, 2, 16), "shapes"),
        ({}, shaped("query", torch.float32, 1, 7, 4, 16), "dtype"),
        ({}, shaped("atten_mask", torch.float16, 1, 1, 7, 640), "mask dtype"),
        ({"num_heads": 3}, None, "heads"),
        ({}, shaped("query", HALF, 1, 7, 4, 24), "head_dim"),
        ({}, shaped("atten_mask", FLAG, 1, 4, 7, 640), "mask shape"),
        ({}, shaped("atten_mask", FLAG, 1, 1, 7, 639), "mask shape"),
        ({}, shaped("atten_mask", FLAG, 1, 1, 6, 640), "mask shape"),
        ({}, shaped("query", HALF, 1, 1, 4, 16), "one row"),
    ],
)
def test_broken_rules(
    lowered: Any, attributes: dict[str, object], change: Callable[[Graph, Shapes], Shapes] | None, rule: str
) -> None:
    graph = with_attributes(lowered.graphs[NAME], **attributes)
    known = shapes(lowered.graphs[NAME])
    findings = check_constraints(graph, change(graph, known) if change else known)
    broken = [f for f in findings if f.level == "error"]
    assert {(f.node, f.rule) for f in broken} >= {(FIA, rule)}
    assert all(f.source and f.message for f in broken)


def test_an_absent_mask(lowered: Any) -> None:
    graph = with_input(lowered.graphs[NAME], "atten_mask", None)
    assert (FIA, "mask") in {(f.node, f.rule) for f in check_constraints(graph, shapes(lowered.graphs[NAME]))}


def test_a_mask_of_the_wrong_polarity(lowered: Any) -> None:
    graph = lowered.graphs[NAME]
    node = graph.nodes["LogicalNot_0"]
    flipped = replace(graph, nodes=graph.nodes | {node.name: replace(node, type="Identity")})
    rules = {f.rule for f in check_constraints(flipped, shapes(graph))}
    assert "mask polarity" in rules


def test_a_baked_length(lowered: Any) -> None:
    const = Node("lengths", "Const", (), {}, (), ())
    graph = with_input(lowered.graphs[NAME], "actual_seq_lengths_kv", Edge("lengths", 0), const)
    known = shapes(lowered.graphs[NAME]) | {"lengths": ((torch.int64, (1,)),)}
    assert "baked length" in {f.rule for f in check_constraints(graph, known)}


@pytest.mark.parametrize("source", ["committed", "accepted"])
def test_a_value_that_does_not_follow_its_input(lowered: Any, source: str) -> None:
    """The input is replaced by a constant wherever it is read."""
    graph = lowered.graphs[NAME]
    frozen = Node("frozen", "Const", (), {}, (), ())
    swap = {
        n.name: replace(n, inputs=tuple(Edge("frozen", 0) if e == Edge(source, 0) else e for e in n.inputs))
        for n in graph.nodes.values()
    }
    known = shapes(graph) | {"frozen": ((torch.int64, (1,)),)}
    findings = check_constraints(replace(graph, nodes={"frozen": frozen} | swap), known)
    assert any(f.rule == "baked value" and source in f.message for f in findings)


def test_row_tiles_are_warned_of(lowered: Any) -> None:
    """Two groups of 16 rows over a long cache fill two tiles; 17 rows take the other tiling and fill one."""
    graph = lowered.graphs[NAME]
    known = shapes(graph)
    for rows, warned in ((8, False), (16, False), (17, False)):
        query = shaped("query", HALF, 1, rows, 4, 16)(graph, known)
        key = shaped("key0", HALF, 1, 8192, 2, 16)(graph, query)
        found = {f.rule for f in check_constraints(graph, key) if f.node == FIA and f.level == "warning"}
        assert ("row tiles" in found) == warned
    wide = with_attributes(graph, num_heads=8)
    query = shaped("query", HALF, 1, 16, 8, 16)(wide, known)
    key = shaped("key0", HALF, 1, 8192, 2, 16)(wide, query)
    assert any(f.rule == "row tiles" and "2 tiles of 32" in f.message for f in check_constraints(wide, key))


def test_a_weight_that_is_declared_in_another_layout_than_its_bytes(lowered: Any) -> None:
    graph = lowered.graphs[NAME]
    weight = next(n for n in graph.nodes.values() if n.type == "FileConstant")
    turned = replace(weight, output_types=(weight.output_types[0]._replace(layout="FRACTAL_NZ"),))
    odd = replace(graph, nodes=graph.nodes | {weight.name: turned})
    (finding,) = (f for f in check_constraints(odd, shapes(graph)) if f.level == "error")
    assert (finding.node, finding.rule) == (weight.name, "layout in memory") and "FRACTAL_NZ" in finding.message
