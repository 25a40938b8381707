"""What graphs say beside what they compute: it is there, it is what the rules allow, and it changes nothing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.compiler.bundle.request import BuildRequest, check_request
from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import HELD, PREFETCHES, Edge, Graph, Node
from draftwood.compiler.ge.hints import SUPER_KERNEL
from draftwood.compiler.ge.interpreter import Interpreter, shapes
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.errors import LoweringError, RequestError
from draftwood.manifest import Hints
from draftwood.trees import Topology

MOST = 10_000  # bytes, less than some and more than other weights of the tiny teacher


@pytest.fixture(scope="module")
def fetching(lowered_with: Callable) -> Any:
    return lowered_with(Hints(prefetch=MOST))


@pytest.fixture(scope="module")
def marked(lowered_with: Callable) -> Any:
    return lowered_with(Hints(super_kernels=True))


def products(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes.values() if node.type == "MatMulV2"]


@pytest.mark.parametrize("name", ["verify-t7-kv640", "draft"])
def test_each_product_fetches_the_weight_of_the_next(fetching: Any, name: str) -> None:
    graph = fetching.graphs[name]
    known, places = shapes(graph), list(graph.nodes)
    fetched = [node for node in graph.nodes.values() if node.type in PREFETCHES]
    for node, before, after in zip(fetched, products(graph)[:-1], products(graph)[1:], strict=True):
        weight = node.inputs[0]
        assert weight == after.inputs[1] and Edge(before.name, -1) in node.inputs
        kind, shape = known[weight.node][0]
        assert node.attributes["max_size"] == min(MOST, torch.Size(shape).numel() * kind.itemsize)
        assert places.index(before.name) < places.index(node.name) < places.index(after.name)
    assert len({node.attributes["max_size"] for node in fetched}) > 1 or name == "draft"


def test_a_layer_says_of_itself_that_it_is_one_kernel(marked: Any) -> None:
    graph = marked.graphs["verify-t7-kv640"]
    kernels = Counter(node.attributes.get(SUPER_KERNEL, "") for node in graph.kernels)
    assert set(kernels) == {"", "layer-0", "layer-1"} and kernels["layer-0"] == kernels["layer-1"] >= 12
    for layer in ("layer-0", "layer-1"):
        own = Counter(node.type for node in graph.kernels if node.attributes.get(SUPER_KERNEL) == layer)
        assert (own["MatMulV2"], own["ScatterNdUpdate"], own["FusedInferAttentionScore"]) == (4, 2, 1)
    outside = [node.name for node in products(graph) if SUPER_KERNEL not in node.attributes]
    assert len(outside) == 1, "the output matrix alone"
    assert not any(SUPER_KERNEL in node.attributes for node in marked.graphs["draft"].nodes.values())


def computed(graph: Graph) -> list[tuple]:
    """All nodes but prefetches, without notes and orders."""
    return [
        (node.name, node.type, node.operands, {k: str(v) for k, v in node.attributes.items() if not k.startswith("_")})
        for node in graph.nodes.values()
        if node.type not in PREFETCHES
    ]


@pytest.mark.parametrize("kind", ["fetching", "marked"])
def test_what_is_computed_stays_the_same(kind: str, lowered: Any, request: pytest.FixtureRequest) -> None:
    """Node by node; so the proofs, the rules and the number of kernels do, too."""
    hinted = request.getfixturevalue(kind)
    for name, graph in hinted.graphs.items():
        assert computed(graph) == computed(lowered.graphs[name])
        assert prove_in_place(graph, hinted.signatures[name]) == prove_in_place(
            lowered.graphs[name], lowered.signatures[name]
        )
        assert [f for f in check_constraints(graph, shapes(graph)) if f.level == "error"] == []
        assert len(graph.kernels) == len(lowered.graphs[name].kernels)


def test_the_interpreter_runs_past_prefetches(fetching: Any, lowered: Any) -> None:
    name, results = "draft", []
    for graph in (fetching.graphs[name], lowered.graphs[name]):
        make = torch.Generator().manual_seed(3)
        held = {n: known[0] for n, known in shapes(graph).items() if graph.nodes[n].type in ("FileConstant", "Data")}
        values = {
            n: torch.randn(shape, generator=make).to(kind) if kind.is_floating_point else torch.zeros(shape, dtype=kind)
            for n, (kind, shape) in sorted(held.items())
        }
        weights = {n: values.pop(n) for n in list(values) if graph.nodes[n].type == "FileConstant"}
        results.append(Interpreter(graph, weights).run(values))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def altered(graph: Graph, **changes: Any) -> list[str]:
    """What is found where the first prefetch is another."""
    node = next(node for node in graph.nodes.values() if node.type in PREFETCHES)
    odd = replace(graph, nodes=graph.nodes | {node.name: replace(node, **changes)})
    return [f.message for f in check_constraints(odd, shapes(graph)) if f.level == "error"]


def test_prefetches_that_break_a_rule_are_found(fetching: Any) -> None:
    graph = fetching.graphs["verify-t7-kv640"]
    node = next(node for node in graph.nodes.values() if node.type in PREFETCHES)
    weight, *waits = node.inputs
    size = node.attributes | {"max_size": 1 << 40}
    assert [m.partition(";")[0] for m in altered(graph, attributes=size)] == [f"max_size is {1 << 40}"]
    assert altered(graph, inputs=(weight,)) == ["waits for nothing that is computed; expected a dependency"]
    product = next(edge.node for edge in waits if graph.nodes[edge.node].type not in HELD)
    (message,) = altered(graph, inputs=(Edge(product, 0), *waits), attributes=node.attributes | {"max_size": 1})
    assert message == f"fetches MatMulV2 {product}; expected a weight"
    cache = next(n for n in graph.nodes.values() if n.type == "RefData").name
    odd = replace(graph, nodes=graph.nodes | {node.name: replace(node, inputs=(Edge(cache, 0), *waits))})
    with pytest.raises(LoweringError, match=f"cache {cache} must be read by one write alone"):
        prove_in_place(odd, fetching.signatures["verify-t7-kv640"])


@pytest.mark.parametrize(
    ("hints", "changed", "line"),
    [
        (Hints(prefetch=1), {"targets": ("onnx",)}, "--prefetch: is for the graphs of an NPU; expected --target ge"),
        (Hints(super_kernels=True), {}, "--super-kernels: CANN makes them for Atlas A3 alone, Ascend910B3 is none"),
        (
            Hints(prefetch=1, super_kernels=True),
            {"soc": "Ascend910_9391"},
            "--super-kernels: a prefetch inside of a layer",
        ),
    ],
)
def test_hints_that_no_device_takes_are_refused(hints: Hints, changed: dict, line: str, tmp_path: Path) -> None:
    plain = {"model": tmp_path, "drafter": None, "trees": (("plain", Topology.plain()),), "slots": (128,)}
    request = BuildRequest(**{**plain, "targets": ("ge",), "hints": hints, **changed})
    with pytest.raises(RequestError, match=line):
        check_request(request, tmp_path / "out")
