"""A whole step in one launch: proved, the text of its parts and of plain decoding, and the bytes that cross to the
host."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import engines
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.steps.step import DTYPES
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

RAGGED = (("ragged", Topology.from_paths([(0,), (1,), (0, 0), (1, 0)])),)
# Kinds whose candidates depend on the path may grow their trees.
GROWN = (*RAGGED, ("budget", Budget(4, 3, 2)))
TREES = {"eagle3": GROWN, "dspark": GROWN}


def built(folder: Path, teacher: Path, drafter: Path, kind: str) -> Bundle:
    trees = (("plain", Topology.plain()), *TREES.get(kind, RAGGED))
    asked = BuildRequest(
        model=teacher, drafter=drafter, trees=trees, slots=(128,), prefill_rows=(8,), targets=("ge",), whole=True
    )
    build(asked, folder)
    return Bundle.open(folder)


ONE_PASS = ("peagle", "dflash", "dspark")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "fasteagle", *ONE_PASS)]


@pytest.fixture(scope="module", params=["medusa", *SLOW])
def bundle(request, tiny_teacher, tiny_drafters, whole_bundle, save_one_pass, tmp_path_factory) -> Bundle:
    if request.param == "medusa":
        return Bundle.open(whole_bundle)
    folder = tmp_path_factory.mktemp("whole")
    if request.param in ONE_PASS:
        save_one_pass[request.param](folder / "drafter")
    drafter = tiny_drafters.get(request.param, folder / "drafter")
    return built(folder / "bundle", tiny_teacher, drafter, request.param)


def gears(bundle: Bundle) -> list[Gear]:
    """Those that the device drafts for itself, or that draft nothing."""
    return [gear for gear in bundle.manifest.gears if not gear.looks_up]


@pytest.fixture(scope="module")
def engine(bundle: Bundle):
    from draftwood.tools.reference.ge import GeEngine

    return GeEngine(bundle)


def test_a_whole_step_copies_no_cache_and_runs_on_the_ai_core(bundle: Bundle) -> None:
    graphs = [graph for graph in bundle.manifest.graphs_of("ge") if graph.kind == "whole"]
    assert len(graphs) == 2 * len(gears(bundle))
    assert bundle.manifest.drafter is not None
    for signature in graphs:
        graph = Graph.load(bundle.folder / signature.file)
        assert engines(graph, shapes(graph)).keys() == {"AI Core"}, signature.name
        proof = prove_in_place(graph, signature)
        drafts = any(spec.name == "features.in" for spec in signature.inputs)
        of_drafter = bundle.manifest.drafter.buffers if drafts else ()
        assert len(proof) == len(bundle.manifest.teacher.buffers) + len(of_drafter)
        assert all(one.readers for one in proof)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.7}], ids=str)
def test_one_launch_changes_no_token(bundle: Bundle, engine, sampling: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(max_new_tokens=10, sampling=Sampling(seed=3, **sampling), ignore_eos=True)
    launched: list[str] = []
    run = engine.executor.run
    monkeypatch.setattr(engine.executor, "run", lambda graph, *given: launched.append(graph.kind) or run(graph, *given))
    for gear in gears(bundle):
        found = []
        for apart in (True, False):
            monkeypatch.setattr(engine.on_device, "apart", apart)
            launched.clear()
            found.append(Decoding(engine, list(range(5, 25)), options, FixedTree(bundle, gear.name)).run())
        steps = [kind for kind in launched if kind not in ("prefill", "decode", "extend")]
        assert steps == ["whole"] * found[1].steps
        assert found[0].token_ids == found[1].token_ids and found[0].steps == found[1].steps


HELD: list[dict[str, Any]] = [
    {"grammar": "start: /[a-z ]+/"},
    {"grammar": "start: /[a-z ]+/", "temperature": 1.0},
    {"presence_penalty": -2.0, "repetition_penalty": 0.6},
    {"frequency_penalty": -2.0, "repetition_penalty": 0.4, "temperature": 0.9},
    {"temperature": 1.5, "min_p": 0.3},
    {"logit_bias": {40: 6.0}, "min_tokens": 5},
    {"logprobs": 2, "temperature": 0.8},
]


@pytest.mark.parametrize("asked", HELD, ids=str)
def test_what_a_device_cannot_draw_the_host_draws(bundle: Bundle, engine, asked: dict) -> None:
    options = Options.of(max_new_tokens=8, seed=3, **asked)
    texts = []
    for gear in gears(bundle):
        decoding = Decoding(engine, list(range(5, 25)), options, FixedTree(bundle, gear.name))
        texts.append((decoding.run().token_ids, decoding.logprobs))
    (plain, logprobs), *others = texts
    assert all(tokens == plain for tokens, _ in others)
    free = Options.of(max_new_tokens=8, seed=3, temperature=options.sampling.temperature)
    free_text = Decoding(engine, list(range(5, 25)), free, FixedTree(bundle, bundle.manifest.gears[0].name)).run()
    if "logprobs" not in asked:
        assert plain != free_text.token_ids
    else:
        assert plain == free_text.token_ids and len(logprobs) == len(plain)
        for _, theirs in others:
            for one, other in zip(logprobs, theirs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)  # a tree sums in another order
                assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_less_than_four_kilobytes_cross(bundle: Bundle) -> None:
    """Both ways together; everything else stays on the device."""
    wholes = [graph for graph in bundle.manifest.graphs_of("ge") if graph.kind == "whole"]
    stays = {"branch", "branch.out", "logits", "features", "features.in", "features.out"}
    for graph in wholes:
        held = stays | set(graph.caches) | set(graph.aliases)
        crossing = [spec for spec in (*graph.inputs, *graph.outputs) if spec.name not in held]
        sizes = [DTYPES[spec.dtype].itemsize * prod(map(int, spec.shape)) for spec in crossing]
        assert 0 < sum(sizes) < 4096, graph.name
    assert len(wholes) == 2 * len(gears(bundle))


def test_check_holds_it_against_its_parts(bundle: Bundle, engine) -> None:
    """Bit for bit, since the interpreter runs equal operators; and a cache that is not written shows."""
    from draftwood.tools.comparison.compare import Pair
    from draftwood.tools.comparison.device_steps import compare_whole
    from draftwood.tools.comparison.faults import graph_mutations
    from draftwood.tools.reference.ge import GeEngine

    prompt, gear = np.arange(5, 25), gears(bundle)[-1]
    pair = Pair("ge", engine, engine, 0.0)
    assert all(one.ok for one in compare_whole(pair, bundle.manifest.gears[0], prompt))
    found = list(compare_whole(pair, gear, prompt))
    assert {"step", "branch", "cache", "features"} <= {one.quantity for one in found} and all(one.ok for one in found)
    for mutate in graph_mutations().values():
        broken = GeEngine(bundle, mutate=lambda graph, m=mutate: m(graph) if graph.name.startswith("whole") else graph)
        assert not all(one.ok for one in compare_whole(Pair("ge", broken, broken, 3e-2), gear, prompt))


def test_a_device_makes_the_graph_that_was_proved(bundle: Bundle) -> None:
    """Or the first launch would raise: what follows from a tree's tables is a value there, as it is in the file."""
    from draftwood.compiler.targets.online import TorchairExecutor

    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    graph = next(one for one in bundle.manifest.graphs_of("ge") if one.name == f"whole-greedy-{gears(bundle)[1].name}")
    executor.compiled(graph).compiled(*(torch.zeros(s.shape, dtype=DTYPES[s.dtype]) for s in graph.inputs))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_route_of_a_device_gives_the_same_text(bundle: Bundle, engine, temperature: float) -> None:
    """Traced and compiled by torchair as for the device, and run on the CPU."""
    from draftwood.compiler.targets.online import TorchairExecutor
    from draftwood.runtime.engines.npu import NpuEngine

    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    options = Options(max_new_tokens=6, sampling=Sampling(seed=3, temperature=temperature), ignore_eos=True)
    policy = gears(bundle)[-1].name
    texts = [
        Decoding(one, list(range(5, 25)), options, FixedTree(bundle, policy)).run().token_ids
        for one in (NpuEngine(bundle, executor=executor), engine)
    ]
    assert texts[0] == texts[1]
