"""Drafts of several texts in one launch of the NPU's graphs: of each text what a launch of its own drafts."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import engines
from draftwood.compiler.ge.proofs import prove_in_place
from draftwood.compiler.targets.online import TorchairExecutor
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.npu import NpuEngine
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.rounding import HALF_TOLERANCE
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.tests.runtime.engines.acl.conftest import compiled, opened  # noqa: F401 (a fixture)
from draftwood.tools.comparison.batches import compare_texts
from draftwood.tools.comparison.compare import Comparison, Pair
from draftwood.tools.comparison.faults import Control
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine

PLACES = 3
GRAPH = "draft-budget-kv128"


@pytest.fixture(scope="module")
def bundle(eagle3_bundle: Path) -> Bundle:
    return Bundle.open(eagle3_bundle)


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> GeEngine:
    return GeEngine(bundle)


def begun(engine: StaticEngine, count: int = PLACES) -> list[SequenceState]:
    """Texts of different lengths at the places of a new pool; every other one is sampled."""
    if engine._pools:
        engine._pools._pools.clear()
    states = []
    for text in range(count):
        states.append(engine.begin(128, Sampling(temperature=0.9 * (text % 2), seed=text)))
        engine.start(states[-1], np.random.default_rng(text).integers(3, 100, 3 + 4 * text))
    return states


def launches(engine: GeEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the drafts that are launched from now on."""
    ran, honest = Counter[str](), engine.drafting._run

    def run(graph: GraphSignature, inputs: Any, buffers: Any) -> Any:
        ran[graph.name] += graph.kind != "extend"
        return honest(graph, inputs, buffers)

    monkeypatch.setattr(engine.drafting, "_run", run)
    return ran


def test_the_graphs_write_one_pool_once(bundle: Bundle) -> None:
    drafts = [graph for graph in bundle.manifest.graphs_of("ge") if graph.kind == "draft-texts"]
    assert {graph.name for graph in drafts} == {f"{GRAPH}-b{PLACES}"}
    for signature in drafts:
        graph = Graph.load(bundle.folder / signature.file)
        assert len(prove_in_place(graph, signature)) == 2
        assert engines(graph, shapes(graph)).keys() == {"AI Core"}


@pytest.mark.parametrize(("chosen", "launch"), [((0, 1, 2), 3), ((2, 0), 3), ((1, 2), 3), ((1,), 1)])
def test_one_launch_drafts_what_launches_of_each_do(
    engine: GeEngine, chosen: tuple[int, ...], launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of texts between which another lies, of which nothing is written."""
    gear = next(gear for gear in engine.bundle.manifest.gears if gear.draft)
    texts, others = begun(engine), begun(engine)
    before = [buffer.clone() for text in range(PLACES) for buffer in texts[text].draft.buffers]
    ran = launches(engine, monkeypatch)
    drafts = engine.draft([texts[text] for text in chosen], [gear] * len(chosen))
    assert +ran == {GRAPH + (f"-b{launch}" if launch > 1 else ""): 1}
    for text, got in zip(chosen, drafts, strict=True):
        (want,) = engine.draft([others[text]], [gear])
        assert got.tokens_T.tolist() == want.tokens_T.tolist()
        np.testing.assert_allclose(got.scores_M, want.scores_M, rtol=0, atol=HALF_TOLERANCE)
    for text in range(PLACES):
        alike = others if text in chosen else None
        for number, buffer in enumerate(texts[text].draft.buffers):
            want = alike[text].draft.buffers[number] if alike else before[2 * text + number]
            torch.testing.assert_close(buffer[:, :-1], want[:, :-1], rtol=0, atol=HALF_TOLERANCE if alike else 0)


def test_texts_of_other_trees_and_of_another_pool_have_launches_of_their_own(
    engine: GeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gears = {gear.tree: gear for gear in engine.bundle.manifest.gears}
    texts = begun(engine, PLACES + 1)
    ran = launches(engine, monkeypatch)
    engine.draft([*texts, texts[0]], [gears["budget"]] * len(texts) + [gears["plain"]])
    assert +ran == {f"{GRAPH}-b3": 1, GRAPH: 1}


def test_check_holds_them_to_eager_drafts_of_each(engine: GeEngine) -> None:
    pair = Pair("ge", EagerEngine(engine.bundle, npu=True), engine, HALF_TOLERANCE)
    found = list(compare_texts(pair, 2, [np.random.default_rng(i).integers(3, 100, 30) for i in range(2)]))
    compared = [one for one in found if isinstance(one, Comparison)]
    assert [one for one in compared if not one.ok] == []
    assert any(one.quantity == "draft tokens" for one in compared)
    assert [one.caught for one in found if isinstance(one, Control)] == [True] * 2


@pytest.mark.slow  # the usual run has a text's own drafts so: test_drafters
def test_the_program_for_a_device_is_the_one_that_was_proved(bundle: Bundle, engine: GeEngine) -> None:
    """Compiled as for a device, its graph compared with the file's, and then run on the CPU."""
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    online = NpuEngine(bundle, executor=executor)
    gear = next(gear for gear in bundle.manifest.gears if gear.draft)
    for got, want in zip(*(each.draft(begun(each)[:2], [gear] * 2) for each in (online, engine)), strict=True):
        assert got.tokens_T.tolist() == want.tokens_T.tolist()


def test_ascendcl_gets_no_memory_twice_in_a_launch(
    bundle: Bundle,
    engine: GeEngine,
    opened: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Also for texts that are not in it; the tokens are the interpreter's."""
    acl, library = opened(compiled(bundle.folder, tmp_path))
    gear = next(gear for gear in bundle.manifest.gears if gear.draft)
    sides = [(each, begun(each)) for each in (acl, engine)]
    for chosen in ((0, 1, 2), (2, 0), (1, 2)):
        for each, texts in sides:
            each.step([texts[text] for text in chosen], [gear] * len(chosen))
    assert [text.tokens for text in sides[0][1]] == [text.tokens for text in sides[1][1]]
    assert library.misuses == []
