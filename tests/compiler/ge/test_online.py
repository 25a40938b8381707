"""The route of a device: what torchair keeps of a compiled step, and that its graph is the one that was proved."""

import copy
import hashlib
import importlib
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.lowering import drop_dead, fold_constants
from draftwood.compiler.ge.torchair_bridge import device_of
from draftwood.compiler.steps.step import DTYPES
from draftwood.compiler.targets.online import TorchairExecutor, compile_cache
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.trees import Topology


@pytest.fixture(scope="module")
def bundle(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    trees = (("plain", Topology.plain()), ("pair", Topology.from_paths([(0,), (1,)])))
    request = BuildRequest(
        model=tiny_source, drafter=tiny_source / "heads", trees=trees, slots=(128,), prefill_rows=(8,), targets=("ge",)
    )
    folder = tmp_path_factory.mktemp("online") / "bundle"
    build(request, folder)
    return Bundle.open(folder)


def graphs(bundle: Bundle) -> tuple[GraphSignature, ...]:
    return bundle.manifest.graphs_of("ge")


def given(graph: GraphSignature) -> list[torch.Tensor]:
    return [torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in graph.inputs]


class NoDevice(Exception):
    """Where a compiled graph would start."""


def test_every_step_keeps_its_compiled_graph(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchair's own code, up to the point at which GE would compile what it has generated."""

    def kernel(*inputs: object) -> None:
        raise NoDevice

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu")
    for graph in graphs(bundle):
        step = executor.compiled(graph)
        monkeypatch.setattr("torchair.npu_fx_compiler._compile_py_code", lambda code: SimpleNamespace(kernel=kernel))
        with pytest.raises(NoDevice):
            step.compiled(*given(graph))
    kept = {compile_cache(bundle.folder, bundle.manifest, graph) for graph in graphs(bundle)}
    assert len(kept) == len(graphs(bundle)) == 8
    assert [len(list(folder.rglob("compiled_module"))) for folder in kept] == [1] * 8


def canonical(graph: Graph) -> tuple[list[str], int]:
    """What reaches the outputs and the written caches, named by how it is computed; and how many nodes that are.

    Inputs and weights are named by type and shape, for the two routes number them differently.
    """
    names: dict[str, str] = {}
    for node in graph.nodes.values():
        inputs = [f"{names[e.node]}:{e.output}" if e is not None else "-" for e in node.operands]
        if node.type in ("Data", "RefData", "FileConstant"):
            text = str(node.output_types[0][1:3])
        elif node.type == "Const":
            text = str(node.attributes["value"].tolist())
        else:
            own = {k: v for k, v in sorted(node.attributes.items()) if not k.startswith("_")}
            text = f"{node.type} {own} {inputs}"
        names[node.name] = hashlib.sha256(text.encode()).hexdigest()
    ends = [names[e.node] for e in graph.output.operands if e is not None]
    writes = [names[node.name] for node in graph.nodes.values() if node.type == "ScatterNdUpdate"]
    return ends + writes, len(graph.kernels)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list:
    """What torchair has converted on the route of a device, one GE graph after the other."""
    graphs: list = []
    converter = importlib.import_module("torchair.npu_fx_compiler")._NpuGraphConverter
    run = converter.run

    def noting(self: object, *inputs: object, **options: object) -> object:
        graphs.append(run(self, *inputs, **options))
        return graphs[-1]

    monkeypatch.setattr(converter, "run", noting)
    return graphs


def online(converted: list) -> Graph:
    """The last of them, with what GE folds and drops on a device folded and dropped."""
    graph = copy.deepcopy(converted[-1].graph._proto)
    fold_constants(graph)
    drop_dead(graph)
    return Graph.of(graph)


def test_the_graph_of_a_device_is_the_one_that_was_proved(bundle: Bundle, converted: list) -> None:
    """Node by node; GE folds constants on a device, as lowering has done already."""
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    for graph in graphs(bundle):
        executor.compiled(graph).compiled(*given(graph))
        proved = Graph.load(bundle.folder / graph.file)
        assert canonical(online(converted)) == canonical(proved), graph.name
        moved = any(spec.name == "branch" for spec in graph.inputs)
        assert online(converted).counts().get("Transpose", 0) == moved, "nothing but moved rows is turned around"


def test_weights_have_fixed_addresses_and_nothing_else(bundle: Bundle, converted: list) -> None:
    """A text has caches of its own: with their addresses fixed the next text would read those of the first."""
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    graph = next(graph for graph in graphs(bundle) if graph.kind == "verify")
    executor.compiled(graph).compiled(*given(graph))
    kinds = Counter(info.value_type.name for info in converted[-1].graph.named_inputs_info.values())
    counts = Graph.load(bundle.folder / graph.file).counts()
    assert kinds == {"PARAMETER": counts["FileConstant"], "TENSOR": len(graph.inputs)}


def test_the_engine_loads_torch_npu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            asked.append(name)

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert device_of("cpu").type == "cpu" and asked == []
    with pytest.raises(ModuleNotFoundError, match="torch_npu"):
        device_of("npu:0")
    assert asked == ["torch_npu"]
