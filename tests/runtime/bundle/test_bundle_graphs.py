"""A graph's file is read for its inputs and outputs, and for the places of its weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from draftwood.errors import BundleError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.graphs import check_graph
from draftwood.runtime.bundle.weights import read_header

WEIGHTS = "onnx/weights.safetensors"


def bytes_to(bundle: Bundle) -> dict[int, int]:
    """The first bytes of the tensors of bytes in its weights, by their ends."""
    tensors = read_header(bundle.folder / WEIGHTS).values()
    return {tensor.data_offsets[1]: tensor.data_offsets[0] for tensor in tensors if tensor.dtype == "U8"}


def altered(bundle: Bundle, tmp_path: Path, change: Callable[[onnx.GraphProto], object]) -> Path:
    """A folder that has the step graph with a change."""
    model = onnx.load(str(bundle.folder / "onnx" / "step.onnx"), load_external_data=False)
    change(model.graph)
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "step.onnx").write_bytes(model.SerializeToString())
    return tmp_path


def first(graph: onnx.GraphProto) -> onnx.TypeProto.Tensor:
    return graph.input[0].type.tensor_type


def located(graph: onnx.GraphProto) -> onnx.StringStringEntryProto:
    return next(e for t in graph.initializer for e in t.external_data if e.key == "location")


def laid_out(graph: onnx.GraphProto, offset: int, length: int) -> None:
    """Moves a layout of the graph."""
    entry = next(e for t in graph.initializer for e in t.external_data if e.key == "prepacked_0")
    name, part = entry.value.split("|")
    at, size, checksum = map(int, part.split(";"))
    entry.value = f"{name}|{at + offset};{size + length};{checksum}"


def elsewhere(name: str = "t") -> onnx.TensorProto:
    """A tensor in another file of the bundle."""
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[1], data_location=1)
    tensor.external_data.add(key="location", value="other.bin")
    return tensor


def branched(graph: onnx.GraphProto) -> None:
    inner = onnx.helper.make_graph([], "inner", [], [], [elsewhere()])
    graph.node.append(onnx.helper.make_node("If", ["c"], [], then_branch=inner, else_branch=inner))


def twice(graph: onnx.GraphProto) -> None:
    """The second of two places counts for a reader, and onnxruntime may take the first."""
    next(t for t in graph.initializer if t.external_data).external_data.add(key="location", value=WEIGHTS[5:])


def test_every_graph_of_a_build_is_what_it_says(bundle: Bundle, tiny_draft_bundles: dict[str, Path]) -> None:
    for one in (bundle, *map(Bundle.open, tiny_draft_bundles.values())):
        for graph in one.manifest.graphs_of("onnx"):
            check_graph(one.folder, graph, WEIGHTS, bytes_to(one))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: setattr(g.input[0], "name", "ids"), "input rows: expected int64 .*, got none"),
        (lambda g: setattr(first(g), "elem_type", 6), "input rows: expected int64 .*, got int32"),
        (lambda g: setattr(first(g).shape.dim[0], "dim_value", 3), r"expected int64 \['R'\] .* got int64 \[3\]"),
        (lambda g: first(g).shape.dim.add(), r"got int64 \['R', ''\]"),
        (lambda g: g.output.pop(), "output value_cache.1.out: expected .* got none"),
        (lambda g: setattr(located(g), "value", "../outside"), "reads weights from '../outside'; expected onnx/w"),
        (lambda g: setattr(located(g), "value", "/dev/zero"), "reads weights from '/dev/zero'"),
        (lambda g: g.node.append(onnx.helper.make_node("Constant", [], ["x"], value=elsewhere())), "lie outside"),
        (branched, "lie outside"),
        (twice, "lie outside"),
        # onnxruntime takes a layout that is too short, and reads what comes after it.
        (lambda g: laid_out(g, 0, -64), "reads a layout from bytes .*; expected a tensor of onnx/weights.safetensors"),
        (lambda g: laid_out(g, -64, 0), "reads a layout from bytes"),
        (lambda g: laid_out(g, 64, -64), "reads a layout from bytes"),
        (lambda g: laid_out(g, 1 << 40, 0), "reads a layout from bytes"),
    ],
)
def test_a_difference_is_named(change: Callable, message: str, bundle: Bundle, tmp_path: Path) -> None:
    folder = altered(bundle, tmp_path, change)
    with pytest.raises(BundleError, match=f"step.onnx: .*{message}"):
        check_graph(folder, bundle.graph("step"), WEIGHTS, bytes_to(bundle))


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 11, b"\x3a\xff\x01"])
def test_what_is_no_model_is_refused(data: bytes, bundle: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "copy"))
    (folder / "onnx" / "step.onnx").write_bytes(data)
    with pytest.raises(BundleError, match=r"step\.onnx: no ONNX model"):
        check_graph(folder, bundle.graph("step"), WEIGHTS, bytes_to(bundle))


def test_a_second_graph_adds_to_the_first_and_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    """As protobuf merges messages that are there twice."""
    folder = altered(bundle, tmp_path, lambda graph: None)
    path = folder / "onnx" / "step.onnx"
    more = onnx.ModelProto(graph=onnx.helper.make_graph([], "", [], [], [elsewhere()])).SerializeToString()
    path.write_bytes(more + path.read_bytes())
    with pytest.raises(BundleError, match=r"step\.onnx: no ONNX model \(tensors that lie outside"):
        check_graph(folder, bundle.graph("step"), WEIGHTS, bytes_to(bundle))
