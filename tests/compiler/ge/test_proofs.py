"""The proof that no cache is copied holds for lowered graphs, and breaks where it must."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood.compiler.ge.graph import Edge, Graph, Node
from draftwood.compiler.ge.interpreter import Interpreter
from draftwood.compiler.ge.proofs import prove, prove_in_place
from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.compiler.ge.weights import bundle_index, bundle_npu_weights
from draftwood.errors import LoweringError, UserError
from draftwood.runtime.bundle import Bundle

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


# Attributes that decide results, so that a comparison finds another value, and those that decide nothing here.
COMPARED = {"epsilon", "scale", "value", "dim", "dst_type", "keep_dims"}
NOTHING = {"inner_precise", "sparse_mode", "pre_tokens", "next_tokens", "negative_index_support", "_readable_value"}


def change_value(attribute: Any) -> None:
    """Another value of the same kind."""
    kind = attribute.WhichOneof("value")
    if kind == "t":
        attribute.t.data = bytes(byte ^ 1 for byte in attribute.t.data)
    elif kind == "list":
        held = next((values for values in (attribute.list.s, attribute.list.i) if values), attribute.list.i)
        held[:] = [value + (b"x" if isinstance(value, bytes) else 1) for value in held] or [0]
    else:
        old = getattr(attribute, kind)
        number = isinstance(old, int | float) and not isinstance(old, bool)
        setattr(attribute, kind, old + 1 if number else not old if isinstance(old, bool) else old + b"x")


def test_a_changed_attribute_is_refused_or_compared(npu_bundle: Path) -> None:
    """Else a device would compute what nobody has looked at: it reads weights by place, and inputs by number."""
    bundle = Bundle.open(npu_bundle)
    npu = bundle.npu_graphs()
    index, weights = bundle_index(bundle.folder, npu), bundle_npu_weights(bundle.folder, npu)
    signature = next(graph for graph in npu.graphs if graph.kind == "verify")
    model = ge_ir().ModelDef.FromString((bundle.folder / signature.file).read_bytes())
    taken, of_each = set(), {op.type: op for op in reversed(model.graph[0].op)}
    for op in of_each.values():
        for name in sorted(op.attr):
            before = op.attr[name].SerializeToString()
            change_value(op.attr[name])
            try:
                graph = Graph.of(model.graph[0])
                prove(graph, signature, index)
                Interpreter(graph, weights)
                taken.add(name)
            except UserError as error:
                assert "\n" not in str(error)
            op.attr[name].ParseFromString(before)
    assert taken <= COMPARED | NOTHING and len(of_each) > 15


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("Const", lambda op: setattr(op.attr["value"].t, "data", b"x")),
        ("Add", lambda op: op.input.__setitem__(0, "Sub_0:x")),
        ("Add", lambda op: op.input.__setitem__(0, "")),
        ("ScatterNdUpdate", lambda op: op.input.__setitem__(0, "")),
        ("Reshape", lambda op: op.input.__setitem__(0, "")),
        ("NetOutput", lambda op: op.input.__setitem__(0, "")),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(npu_bundle: Path, tmp_path: Path, kind: str, damage: Any) -> None:
    bundle = Bundle.open(npu_bundle)
    signature = next(graph for graph in bundle.npu_graphs().graphs if graph.kind == "verify")
    model = ge_ir().ModelDef.FromString((bundle.folder / signature.file).read_bytes())
    damage(next(op for op in model.graph[0].op if op.type == kind))
    (tmp_path / "verify.air").write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"graph|operand .* is missing") as caught:
        prove(Graph.load(tmp_path / "verify.air"), signature, bundle_index(bundle.folder, bundle.npu_graphs()))
    assert "\n" not in str(caught.value)
