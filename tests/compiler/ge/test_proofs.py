"""The proof that no cache is copied holds for lowered graphs, and breaks where it must."""

from dataclasses import replace
from typing import Any

import pytest

from draftwood.compiler.ge.graph import Edge, Graph, Node
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.errors import LoweringError

NAME = "verify-t7-kv640"


def changed(graph: Graph, **nodes: Node) -> Graph:
    """The graph with nodes added or replaced, by name."""
    return replace(graph, nodes=graph.nodes | {node.name: node for node in nodes.values()})


def node(name: str, kind: str, *inputs: str) -> Node:
    return Node(name, kind, tuple(Edge(i, 0) for i in inputs), {}, (), ())


@pytest.mark.parametrize("name", ["prefill-t8-kv640", "decode-kv640", NAME, "draft"])
def test_every_lowered_graph_is_proved(lowered: Any, name: str) -> None:
    graph, signature = lowered.graphs[name], lowered.signatures[name]
    proof = prove_in_place(graph, signature)
    assert [one.cache for one in proof] == signature.caches
    assert len({one.write for one in proof}) == len(proof)
    for one in proof:
        assert graph.nodes[one.write].type == "ScatterNdUpdate"
        assert [graph.nodes[reader].type for reader in one.readers] == ["FusedInferAttentionScore"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (node("copy", "TensorMove", "key_cache.0"), "must be read by one write alone; it is by .*TensorMove copy"),
        (node("again", "ScatterNdUpdate", "key_cache.0"), "must be read by one write alone"),
        (node("early", "FusedInferAttentionScore", "key_cache.0"), "must be read by one write alone"),
        (node("move", "TensorMove", "ScatterNdUpdate_0"), "TensorMove move reads the written cache key_cache.0"),
        (node("turn", "Transpose", "Reshape_4"), "Transpose turn reads the written cache"),
    ],
    ids=["copied", "written twice", "read before the write", "moved after it", "transposed after it"],
)
def test_broken_graphs(lowered: Any, extra: Node, message: str) -> None:
    graph, signature = lowered.graphs[NAME], lowered.signatures[NAME]
    if extra.name == "turn":  # the view after the write, of either kind
        view = next(n for n, _ in graph.readers("ScatterNdUpdate_0"))
        extra = node("turn", "Transpose", view.name)
    with pytest.raises(LoweringError, match=message):
        prove_in_place(changed(graph, extra=extra), signature)


def test_a_cache_that_is_the_rows_of_its_write(lowered: Any) -> None:
    graph, signature = lowered.graphs[NAME], lowered.signatures[NAME]
    write = graph.nodes["ScatterNdUpdate_0"]
    cache, indices, rows = write.inputs
    swapped = replace(write, inputs=(rows, indices, cache))
    with pytest.raises(LoweringError, match=r"key_cache\.0 must be read by one write alone; it is by ScatterNdUpdate "):
        prove_in_place(changed(graph, write=swapped), signature)


def test_a_cache_among_the_outputs(lowered: Any) -> None:
    graph, signature = lowered.graphs[NAME], lowered.signatures[NAME]
    output = replace(graph.output, inputs=(*graph.output.inputs, Edge("ScatterNdUpdate_0", 0)))
    with pytest.raises(LoweringError, match=r"cache key_cache\.0 is an output of the graph"):
        prove_in_place(changed(graph, output=output), signature)


def test_a_cache_that_is_plain_data(lowered: Any) -> None:
    graph, signature = lowered.graphs[NAME], lowered.signatures[NAME]
    plain = replace(graph.nodes["key_cache.0"], type="Data")
    with pytest.raises(LoweringError, match=r"key_cache\.0 is not a RefData"):
        prove_in_place(changed(graph, plain=plain), signature)
