"""Lowered graphs: inputs as the signature lists them, weights outside, caches in place, equal bytes."""

import hashlib
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftwood.compiler.ge import torchair_bridge
from draftwood.compiler.ge.graph import HELD
from draftwood.compiler.ge.lowering import fold_constants, lower_to_ge
from draftwood.compiler.ge.torchair_bridge import convert
from draftwood.compiler.ge.weights import plan_weights
from draftwood.compiler.steps.noise import level_noise
from draftwood.compiler.steps.step import Step
from draftwood.compiler.steps.tracing import trace
from draftwood.errors import LoweringError
from draftwood.manifest import StepSignature, TensorSignature
from draftwood.noise import ROUNDS

NAMES = ("prefill-t8-kv640", "decode-kv640", "verify-t7-kv640", "draft")
SOME = ("verify", "draft")


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_those_of_the_signature(lowered: Any, name: str) -> None:
    graph, signature = lowered.graphs[name], lowered.signatures[name]
    sources = graph.sources()
    assert [node.name for node in sources] == [spec.name for spec in signature.inputs]
    assert [node.attributes["index"] for node in sources] == list(range(len(sources)))
    for node, spec in zip(sources, signature.inputs, strict=True):
        (declared,) = node.output_types
        assert (declared.dtype, declared.shape) == (getattr(torch, spec.dtype), tuple(spec.shape)), spec.name
    written = set(signature.aliases.values())
    assert {node.name for node in sources if node.type == "RefData"} == written


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_that_are_not_written_in_place(lowered: Any, name: str) -> None:
    graph, signature = lowered.graphs[name], lowered.signatures[name]
    kept = [spec for spec in signature.outputs if spec.name not in signature.aliases]
    assert len(graph.output.inputs) == len(kept)
    for declared, spec in zip(graph.output.input_types, kept, strict=True):
        assert declared.dtype == getattr(torch, spec.dtype), spec.name
        assert declared.shape == tuple(spec.shape), spec.name


def test_weights_are_shared_and_lie_apart(lowered: Any) -> None:
    places: dict[str, tuple[int, int]] = {}
    for graph in lowered.graphs.values():
        for node in graph.nodes.values():
            if node.type == "FileConstant":
                place = (node.attributes["offset"], node.attributes["length"])
                assert places.setdefault(node.name, place) == place
                assert node.attributes["location"] == "weights.bin" and place[0] % 512 == 0
    assert places.keys() == lowered.index.constants.keys()  # every weight is used by some graph
    spans = sorted(places.values())
    assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))


@pytest.mark.parametrize("name", NAMES)
def test_operands_are_described_as_inputs_and_weights_lie(lowered: Any, name: str) -> None:
    """A cache is bf16 for the node that writes it, whatever the trace took it for."""
    graph, seen = lowered.graphs[name], set()
    for node in graph.nodes.values():
        for edge, declared in zip(node.operands, node.input_types, strict=False):
            if edge is not None and graph.nodes[edge.node].type in HELD:
                seen.add(graph.nodes[edge.node].type)
                assert declared.dtype == graph.nodes[edge.node].output_types[0].dtype, (node.name, declared.name)
    assert {"Data", "FileConstant"} <= seen and (name == "draft") != ("RefData" in seen)


def test_graphs_name_no_object_and_no_dead_node(lowered: Any) -> None:
    for graph in lowered.graphs.values():
        read = {edge.node for node in graph.nodes.values() for edge in node.inputs if edge is not None}
        # A write in place is read through its cache, and a graph's outputs and inputs stand by themselves.
        ends = ("NetOutput", "Data", "RefData", "ScatterNdUpdate")
        assert [n.name for n in graph.nodes.values() if n.name not in read and n.type not in ends] == []


def test_another_process_gives_equal_bytes(lowered: Any, tiny_source: Path, python: Callable[..., str]) -> None:
    code = f"""
import hashlib, importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("lowering_of_the_test", {str(Path(__file__).parent / "conftest.py")!r})
module = importlib.util.module_from_spec(spec)
import sys; sys.modules[spec.name] = module
spec.loader.exec_module(module)
for name, air in module.lower_tiny(Path({str(tiny_source)!r}), {SOME}).airs.items():
    print(name, hashlib.sha256(air).hexdigest())
"""
    lines = python(code, environment={"PYTHONHASHSEED": "7"}).splitlines()
    want = {name: air for name, air in lowered.airs.items() if lowered.signatures[name].kind in SOME}
    assert len(want) == 2 and lines == [f"{name} {hashlib.sha256(air).hexdigest()}" for name, air in want.items()]


class OneOperator(nn.Module):
    """A step whose only operator is the function given."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def one_step(function: Callable[[Tensor], Tensor], dtype: str = "float32") -> Step:
    x = TensorSignature(name="x", dtype=dtype, shape=(4, 4))  # type: ignore[arg-type]
    y = TensorSignature(name="y", dtype=dtype, shape=(4, 4))  # type: ignore[arg-type]
    signature = StepSignature(name="lonely", kind="draft", rows=1, slots=0, inputs=(x,), outputs=(y,), aliases={})
    return Step(OneOperator(function), signature)


NOTHING = plan_weights({}, torch.float32, "weights.bin", {}, {})


def test_an_operator_without_a_converter_is_named_with_step_and_line() -> None:
    step = one_step(lambda x: torch.cumprod(x, 0))
    with pytest.raises(LoweringError) as raised:
        lower_to_ge(step, trace(step), NOTHING)
    message = str(raised.value)
    assert message.startswith("step lonely: operator aten.cumprod.default at ")
    assert "test_lowering.py:" in message and "converter is not implemented" in message
    assert "\n" not in message


def test_an_input_that_is_not_used_is_refused() -> None:
    step = one_step(lambda x: torch.ones(4, 4))
    with pytest.raises(LoweringError, match="step lonely: input x is not used"):
        lower_to_ge(step, trace(step), NOTHING)


class WholeNoise(nn.Module):
    """Noise of all tokens of openPangu's vocabulary, at five positions."""

    def forward(self, numbers: Tensor) -> Tensor:
        return level_noise(numbers, 153376)


def test_noise_of_a_large_vocabulary_is_made_on_the_ai_core() -> None:
    """Range of int64, which is what torchair makes of an arange, is one of the AI CPU unless it is folded."""
    graph = convert(torch.export.export(WholeNoise(), (torch.zeros(2, ROUNDS, 5, dtype=torch.int32),)), {}, "noise")
    fold_constants(graph)
    assert {"Log", "SelectV2"} <= {op.type for op in graph.op} and "Range" not in {op.type for op in graph.op}


def test_a_signal_that_comes_while_torchair_is_imported_is_ours() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with torchair_bridge._signals_left():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # as torchair does with its own
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
