"""Every node runs on the AI Core of a 910B, by CANN's own lists; and torch_npu infers what our operators say."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge import torchair_bridge
from draftwood.compiler.ge.element_types import element_types, place
from draftwood.compiler.ge.graph import FREE, HELD, Declared, Edge, Graph, Node
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import Use, broken, engines, use_of
from draftwood.compiler.ge.operators import OPERATORS
from draftwood.environment import torch_npu_folder
from draftwood.runtime.bundle import Bundle
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

HALF, WIDE, SHORT, LONG = torch.bfloat16, torch.float32, torch.int32, torch.int64
# What torchair makes a bf16 log-sum-exp of, one number a row but for the sum itself: GE widens it to float32.
WIDENED = ("ReduceLogSumExp", "MaskedFill")
# Medusa's heads are those of the experts' bundle, the teacher is test_texts'. Where the graphs of EAGLE-3 and FastEagle
# run, test_drafters asks in the usual run; whether they get casts, only the slow one.
SLOW = ("medusa", "eagle3", "fasteagle", "peagle", "dflash", "dspark", "w8a8")
KINDS = ("experts", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW))


@dataclass
class Built:
    """The NPU's graphs of a bundle, and the programs that they were lowered from."""

    graphs: dict[str, Graph] = field(default_factory=dict)
    programs: list[fx.GraphModule] = field(default_factory=list)


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Greedy and sampled; whole steps and several texts are looked at where they are built (test_whole, test_texts)."""
    folder, found = tmp_path_factory.mktemp(request.param), Built()
    model, drafter = sources(request.param, folder, request.getfixturevalue)
    # Trees of as many rows as another has share its graphs; every kind of graph is there.
    trees: Any = (("plain", Topology.plain()), ("chain", Topology.chain(1)))
    if request.param == "eagle3":
        trees = (("plain", Topology.plain()), ("fixed", Topology.backbone(2, 2)), ("budget", Budget(4, 3, 2)))
    asked = BuildRequest(model=model, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(8,), targets=("ge",))
    with pytest.MonkeyPatch.context() as patched:
        decomposed = torchair_bridge.decomposed

        def noting(program: Any) -> fx.GraphModule:
            found.programs.append(decomposed(program))
            return found.programs[-1]

        patched.setattr(torchair_bridge, "decomposed", noting)
        build(asked, folder / "bundle")
    for graph in Bundle.open(folder / "bundle").manifest.graphs_of("ge"):
        found.graphs[graph.name] = Graph.load(folder / "bundle" / graph.file)
    yield found


def sources(kind: str, folder: Path, fixture: Callable[[str], Any]) -> tuple[Path, Path]:
    """Teacher and drafter of a kind."""
    if kind == "w8a8":
        return fixture("quantised_teacher"), fixture("tiny_heads")
    if kind == "experts":
        few = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
        fixture("save_llama")(folder / "teacher", family="Qwen3Moe", **few)
        return folder / "teacher", fixture("tiny_heads")
    if kind == "medusa":
        return fixture("tiny_source"), fixture("tiny_source") / "heads"
    if kind in fixture("tiny_drafters"):
        return fixture("tiny_teacher"), fixture("tiny_drafters")[kind]
    fixture("save_one_pass")[kind](folder / "drafter")
    return fixture("tiny_teacher"), folder / "drafter"


def test_nothing_runs_on_the_ai_cpu_and_no_cast_is_added(built: Built) -> None:
    draws = {name.split("-")[1] for name in built.graphs if name.startswith("accept")}
    assert draws == {"greedy", "sampled"}
    for name, graph in built.graphs.items():
        known = shapes(graph)
        assert engines(graph, known).keys() == {"AI Core"}, name
        said = [
            (node.name, message)
            for node in graph.nodes.values()
            if node.type not in HELD
            for level, message, _ in broken(use_of(graph, node, known))
            if level == "error" or message.startswith(("AI CPU", "GE casts"))
            if node.type not in WIDENED
        ]
        assert said == [], name


def test_the_wheel_infers_what_our_operators_say(built: Built, infers: dict[str, Callable[..., Any]]) -> None:
    """Shapes and element types of every node of torch_npu's, held against its own registrations."""
    held = Counter(kind for program in built.programs for kind in differing(program, infers))
    assert held["npu_fused_infer_attention_score"] and held["npu_add_rms_norm"] + held["npu_rms_norm"]


def differing(program: fx.GraphModule, infers: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """Asserts; yields the operators that were held against the wheel's registration."""
    for node in program.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "npu":
            continue
        name = node.target._schema.name.partition("::")[2]
        if name not in infers:
            continue  # the wheel lets its C++ infer them
        args, options = fx.map_arg((node.args, node.kwargs), lambda one: on_meta(one.meta["val"]))
        got, want = infers[name](*args, **options), node.meta["val"]
        assert described(got) == described(want), f"{name} at {torchair_bridge.source_line(node)}"
        yield name


def on_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def described(value: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(one.dtype, tuple(one.shape)) for one in (value if isinstance(value, tuple | list) else (value,))]


@pytest.fixture(scope="module")
def infers() -> dict[str, Callable[..., Any]]:
    """The functions by which torch_npu infers shapes, read from the wheel without CANN."""
    folder = torch_npu_folder()
    assert folder is not None
    path, found = folder / "op_plugin" / "meta" / "_meta_registrations.py", {}

    def impl(library: object, name: str, *_: object) -> Callable[..., Any]:
        return lambda function: found.setdefault(name, function)

    with pytest.MonkeyPatch.context() as patched:
        for name in ("", ".utils", ".utils._error_code", ".npu", ".npu.utils", ".npu._backends"):
            patched.setitem(sys.modules, f"torch_npu{name}", Anything(f"torch_npu{name}"))
        patched.setattr(torch.library, "impl", impl)
        patched.setattr(torch.library, "Library", lambda *_: None)
        # What has side effects is said of operators that are registered on a device alone.
        text = re.sub(r"^has_side_effect\(.*$", "", path.read_text(), flags=re.MULTILINE)
        exec(compile(text, str(path), "exec"), {"__name__": "registrations"})
    return found


class Anything(ModuleType):
    """A module whose names are there and do nothing: only text of errors is made of them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *_: object, **__: object) -> str:
        return ""


@pytest.mark.parametrize(
    ("kind", "given", "results", "engine", "raised"),
    [
        # N1: torchair's int64 k; N6: a slice; N5: a bf16 bias; bf16 sums of exponentials.
        ("TopKV2", {"x": HALF, "k": LONG}, (HALF, SHORT), "AI CPU", ()),
        ("TopKV2", {"x": HALF, "k": SHORT}, (HALF, SHORT), "AI Core", ()),
        ("MatMulV2", {"x1": HALF, "x2": HALF, "bias": HALF}, (HALF,), "AI Core", ("bias",)),
        ("MatMulV2", {"x1": HALF, "x2": HALF, "bias": WIDE}, (HALF,), "AI Core", ()),
        ("MatMulV2", {"x1": HALF, "x2": HALF}, (HALF,), "AI Core", ()),
        ("MatMulV2", {"x1": LONG, "x2": LONG}, (LONG,), "none", ()),
        ("ReduceLogSumExp", {"x": HALF, "axes": LONG}, (HALF,), "AI Core", ("x", "y")),
        ("Add", {"x1": LONG, "x2": LONG}, (LONG,), "AI Core", ()),
        ("ConcatD", {"x0": HALF, "x1": HALF}, (HALF,), "AI Core", ()),
    ],
)
def test_where_a_node_runs(
    kind: str, given: dict[str, torch.dtype], results: tuple[torch.dtype, ...], engine: str, raised: tuple[str, ...]
) -> None:
    found = place(kind, given, results)
    assert found is not None and (found.engine, found.raised) == (engine, raised), found


def test_what_the_table_lacks_is_no_kernel() -> None:
    assert place("StridedSliceV2", {"x": HALF}, (HALF,)) is None
    assert {*OPERATORS} - set(FREE) <= element_types().operators.keys()


def test_what_is_said_of_a_node_names_engine_price_and_source() -> None:
    node = Node(
        "n", "TopKV2", (Edge("x", 0), Edge("k", 0)), {}, (Declared("x", None, None), Declared("k", None, None)), ()
    )
    given = {"x": (HALF, (5, 153376)), "k": (LONG, ())}
    use = Use(Graph("g", {"n": node}), node, given, ((HALF, (5, 4)), (SHORT, (5, 4))))
    ((level, message, source),) = broken(use)
    assert level == "warning" and message.startswith("AI CPU, about 1584 us: no kernel of the AI Core takes")
    assert "x bfloat16, k int64" in message and "CANN 8.1.RC1" in source
