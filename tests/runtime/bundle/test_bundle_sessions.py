"""A graph that takes or gives something else than its signature is refused when it is opened."""

from pathlib import Path

import msgspec
import onnxruntime as ort
import pytest

from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature, TensorSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.sessions import check_session
from draftwood.runtime.engines.sessions import session


def opened(bundle: Bundle, graph: GraphSignature) -> ort.InferenceSession:
    return session(bundle, graph, 1)


def altered(graph: GraphSignature, **fields: object) -> GraphSignature:
    """The signature with its first input changed."""
    first = msgspec.structs.replace(graph.inputs[0], **fields)
    return msgspec.structs.replace(graph, inputs=(first, *graph.inputs[1:]))


def test_every_graph_of_a_build_is_what_it_says(tiny_draft_bundles: dict[str, Path], bundle: Bundle) -> None:
    for one in (bundle, *map(Bundle.open, tiny_draft_bundles.values())):
        for graph in one.manifest.graphs_of("onnx"):
            opened(one, graph)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "ids"}, "input ids: expected int64 .*, got none in the graph"),
        ({"dtype": "int32"}, "input tokens: expected int32 .*, got int64"),
        ({"shape": (8,)}, r"input tokens: expected int64 \[8\] by the manifest, got int64 \[7\]"),
        ({"shape": ("T",)}, r"input tokens: expected int64 \['T'\]"),
    ],
)
def test_a_difference_is_named(fields: dict[str, object], message: str, bundle: Bundle) -> None:
    graph = next(graph for graph in bundle.manifest.graphs_of("onnx") if graph.kind == "verify" and graph.rows == 7)
    with pytest.raises(BundleError, match=f"onnx: {message}"):
        opened(bundle, altered(graph, **fields))


def test_an_output_too_many_is_named(bundle: Bundle) -> None:
    graph = bundle.graph("step")
    extra = TensorSignature(name="more", dtype="float32", shape=(1,))
    found = opened(bundle, graph)
    with pytest.raises(BundleError, match=r"output more: expected float32 \[1\] by the manifest, got none"):
        check_session(found, msgspec.structs.replace(graph, outputs=(*graph.outputs, extra)), Path("x.onnx"))
