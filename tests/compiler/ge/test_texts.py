"""Several texts in one launch of the NPU's graphs: every text is the same as alone, next to any others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.compiler.bundle.request import BuildRequest, check_request
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.operator_rules import engines
from draftwood.compiler.steps.accept import AcceptStep
from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.steps.texts import AcceptTextsStep, accept_texts_step
from draftwood.compiler.teachers.block import place_rows, place_texts
from draftwood.contract import DRAWS
from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.inputs import fill_settings
from draftwood.runtime.engines.sessions import allocate
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.runtime.rounding import HALF_TOLERANCE
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.restriction import Wishes
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.tests.decoded import ended
from draftwood.tools.comparison.batches import compare_texts
from draftwood.tools.comparison.compare import Comparison, Pair
from draftwood.tools.comparison.faults import Control
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine
from draftwood.trees import Topology, tensorize, walk_tables

from .conftest import PLACES

TEXTS = 6
TOKENS = 9


@pytest.fixture(scope="module")
def engine(pangu_bundle: Path) -> GeEngine:
    return GeEngine(Bundle.open(pangu_bundle))


def prompt(text: int) -> list[int]:
    return np.random.default_rng(text).integers(3, 100, 3 + 4 * text).tolist()


def decodings(engine: GeEngine, names: Sequence[str]) -> list[Decoding]:
    found = []
    for text in range(TEXTS):
        sampling = Sampling(temperature=(0.0, 0.8, 1.3)[text % 3], top_p=0.9 if text % 2 else 1.0, seed=text)
        # Some are drawn by the host alone.
        wishes = Wishes(repetition_penalty=0.6, logit_bias={5: 2.0}) if text % 4 == 3 else Wishes()
        asked = Options(max_new_tokens=TOKENS + text, sampling=sampling, wishes=wishes, ignore_eos=True)
        policy = Policies(engine.bundle, names[text % len(names)]).new(sampling.greedy, asked.max_new_tokens)
        found.append(Decoding(engine, prompt(text), asked, policy))
    return found


@pytest.fixture(scope="module")
def alone(engine: GeEngine) -> list[tuple[int, ...]]:
    return [one.run().token_ids for one in decodings(engine, ["plain"])]


def test_the_graphs_are_of_two_and_four_texts(engine: GeEngine) -> None:
    files = {g.name: g.file for g in engine.bundle.manifest.graphs_of("ge") if g.batch > 1}
    for file in files.values():
        graph = Graph.load(engine.bundle.folder / file)
        assert engines(graph, shapes(graph)).keys() == {"AI Core"}, file
    rows, draws = (2, 5), ("greedy", "sampled")
    assert files.keys() == {f"verify-b{b}-t{t}-kv128" for b in (2, 4) for t in rows} | {
        f"accept-{d}-b{b}-t{t}" for b in (2, 4) for t in rows for d in draws
    } | {f"draft-b{b}" for b in (2, 4)}
    assert engine.max_batch == PLACES


@pytest.mark.parametrize("count", [2, 3])
def test_check_holds_them_to_eager_texts_alone(engine: GeEngine, count: int) -> None:
    pair = Pair("ge", EagerEngine(engine.bundle, npu=True), engine, HALF_TOLERANCE)
    found = list(compare_texts(pair, count, [np.array(prompt(text)) for text in range(2)]))
    compared = [one for one in found if isinstance(one, Comparison)]
    assert [one for one in compared if not one.ok] == []
    # Those of one pool share a launch, so three may be two and one.
    verified = {f"verify-b{b}-t{t}-kv128" for b in (2, 4) for t in (2, 5)}
    assert {"draft"} < {one.graph for one in compared} <= {"draft", *verified}
    assert [one.caught for one in found if isinstance(one, Control)] == [True, True]  # of a step, and of a draft


@pytest.mark.parametrize("seed", range(2))
def test_texts_that_come_and_go_are_plain_texts(engine: GeEngine, alone: list[tuple[int, ...]], seed: int) -> None:
    """Trees of all gears, greedy and sampled texts in one step, joining and leaving at every step."""
    waiting = decodings(engine, [gear.name for gear in engine.bundle.manifest.gears])
    texts, rng, going, sizes = list(waiting), random.Random(seed), list[Decoding](), set[int]()
    while waiting or going:
        while waiting and len(going) < PLACES + 1 and (not going or rng.random() < 0.6):
            going.append(waiting.pop(rng.randrange(len(waiting))))
            going[-1].start()
        group = rng.sample(going, rng.randint(1, min(len(going), engine.max_batch)))
        sizes.add(len(group))
        advance(engine, group)
        for text in group:
            text.state.check()
        going = [text for text in going if not text.finished]
    for text, plain in zip(texts, alone, strict=True):
        assert ended(text).token_ids == plain
    assert {1, 3} <= sizes  # also an odd number, with an unused place


def begun(engine: GeEngine, count: int) -> list[SequenceState]:
    states = []
    for text in range(count):
        states.append(engine.begin(128))
        engine.start(states[-1], np.array(prompt(text)))
    return states


def logits(engine: GeEngine, count: int, shift: int = 0) -> list[np.ndarray]:
    """Of every row of ``count`` texts with different trees, at the second step, so that rows were moved."""
    states = begun(engine, count)
    gears: Sequence[Gear] = engine.bundle.manifest.gears
    chosen = [gears[(text + shift) % len(gears)] for text in range(count)]
    parts, ragged, path = engine.on_device, next(gear for gear in gears if gear.draft), [0, 2, 4]
    for number, state in enumerate(states):
        ((draft,), (left,)) = ((found := parts.draft([state], [ragged])), parts.verify([state], found))
        features = engine.executor.read(left.buffers["features"])[path]
        state.branched(draft.tokens_T)
        state.commit(path, 7 + number, features)  # whatever was drawn: rows that have to be moved
    drafts = parts.draft(states, chosen)
    verified = parts.verify(states, drafts)
    return [
        engine.executor.read(one.buffers["logits"])[one.first : one.first + draft.tree.rows].copy()
        for one, draft in zip(verified, drafts, strict=True)
    ]


def apart(engine: GeEngine, count: int, shift: int) -> list[np.ndarray]:
    """Each text in a launch of its own."""
    honest = engine.on_device._verified
    verify = engine.on_device.verify
    try:
        engine.on_device._verified = lambda states, drafts: [  # type: ignore[method-assign]
            one._replace(buffers={"logits": one.buffers["logits"].clone()})
            for state, draft in zip(states, drafts, strict=True)
            for one in verify([state], [draft])
        ]
        return logits(engine, count, shift)
    finally:
        engine.on_device._verified = honest  # type: ignore[method-assign]


# bf16 has eight bits: another order of a sum is some 2^-8 of a logit of about 1; another text's cache changes 1e-1.
ROUNDING = 2e-2


@pytest.mark.parametrize("count", [2, 3, 4])
def test_logits_do_not_depend_on_who_is_beside(engine: GeEngine, count: int) -> None:
    for shift in range(2):
        for got, want in zip(logits(engine, count, shift), apart(engine, count, shift), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING)


def rolled(values: torch.Tensor) -> torch.Tensor:
    """A pool in which every place holds the rows of its neighbour."""
    return values.swapaxes(0, 1).roll(128, 0).swapaxes(0, 1)


FAULTS: dict[str, Callable[[dict, dict], None]] = {
    "another text's cache": lambda inputs, buffers: buffers.update(
        {name: rolled(value) for name, value in buffers.items() if name.startswith(("key", "value"))}
    ),
    "another text's branch": lambda inputs, buffers: buffers.update(
        {"text0.branch": buffers["text1.branch"], "text1.branch": buffers["text0.branch"]}
    ),
    "another text's length": lambda inputs, buffers: inputs.update(committed=np.roll(inputs["committed"], 1)),
    "another text's tree": lambda inputs, buffers: inputs.update(visible=np.roll(inputs["visible"], 1, 0)),
    "another text's tokens": lambda inputs, buffers: inputs.update(tokens=np.roll(inputs["tokens"], 1, 0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(engine: GeEngine, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    honest = engine.executor.run

    def run(graph, inputs, buffers):  # type: ignore[no-untyped-def]
        if graph.kind == "texts":
            inputs, buffers = dict(inputs), dict(buffers)
            FAULTS[fault](inputs, buffers)
        return honest(graph, inputs, buffers)

    want = apart(engine, PLACES, 0)
    monkeypatch.setattr(engine.executor, "run", run)
    got = logits(engine, PLACES, 0)
    differ = max(np.abs(one - other).max() for one, other in zip(got, want, strict=True))
    assert differ > 5 * ROUNDING, differ


def test_a_launch_writes_nothing_of_texts_that_are_not_in_it(engine: GeEngine) -> None:
    """The spare slot aside; nor do a failed text's rows reach a neighbour."""
    states = begun(engine, PLACES)
    gear = next(gear for gear in engine.bundle.manifest.gears if gear.draft)
    for buffer in states[2].kv.buffers:
        buffer[:] = torch.nan
    before = [buffer[:, :127].clone() for buffer in states[1].kv.buffers]
    engine.step([states[0], states[3]], [gear, gear])
    assert all(torch.equal(one, other[:, :127]) for one, other in zip(before, states[1].kv.buffers, strict=True))
    assert not any(buffer.isnan().any() for text in (0, 1, 3) for buffer in states[text].kv.buffers)


def test_rows_are_placed_as_those_of_one_text_each_in_its_place() -> None:
    rng = np.random.default_rng(2)
    texts, rows, moved, slots = 3, 4, 2, 16
    visible = torch.from_numpy(rng.random((texts, rows, rows)) < 0.5)
    committed, accepted = torch.tensor([5, 0, 14]), torch.tensor([2, -1, 1])  # the third is full, the second nobody's
    found = place_texts(visible, committed, accepted, moved, slots)
    moved_BP, new_BT = (part.view(texts, -1) for part in found.index.split([texts * moved, texts * rows]))
    for text, first in enumerate(range(0, texts * slots, slots)):
        own = torch.cat((moved_BP[text], new_BT[text])) - first
        alone = place_rows(visible[text], committed[text, None], accepted[text, None].clamp(min=0), moved, slots)
        want = alone.index[:, 0].clamp(max=slots - 1) if text != 1 else torch.full((moved + rows,), slots - 1)
        assert torch.equal(own, want)
        assert torch.equal(found.masked[text : text + 1], alone.masked)


@pytest.mark.parametrize("draws", ["greedy", "sampled"])
def test_acceptance_in_a_launch_is_the_walk_of_every_text(draws: str) -> None:
    rng = np.random.default_rng(5)
    texts, rows, places, vocabulary = 3, 4, 3, 9
    parents, ranks = ((0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0)), ((0, 0, 1, 0), (0, 0, 1, 0), (0, 0, 1, 2))
    buffers = [tensorize(Topology(*tree)) for tree in zip(parents, ranks, strict=True)]
    walks = [(tree.depths, tree.parents, *walk_tables(tree, rows, places)) for tree in buffers]
    tree = [torch.from_numpy(np.stack(tables)) for tables in zip(*walks, strict=True)]
    tokens = torch.from_numpy(rng.integers(0, vocabulary, (texts, rows)))
    logits = torch.from_numpy(rng.standard_normal((texts * rows, vocabulary)).astype(np.float32))
    how = [Sampling(temperature=0.7), Sampling(temperature=1.0, top_k=4, seed=1), Sampling(temperature=1.3, top_p=0.8)]
    signature = accept_texts_step("sampled", StepSizes(branch_rows=rows, path_rows=places), texts, rows, vocabulary)
    given = {spec.name: allocate(spec) for spec in signature.signature.inputs}
    for text, sampling in enumerate(how):
        levels = slice(text * places, (text + 1) * places)
        of_text = {name: given[name][text : text + 1] for name in ("temperature", "free")}
        of_text |= {name: given[name][text] for name in ("mass", "limit")} | {"keys": given["keys"][..., levels]}
        fill_settings(of_text, sampling, 5, vocabulary)
    keys, *numbers = (torch.from_numpy(given[end.name]) for end in DRAWS)
    settings = (keys, *numbers) if draws == "sampled" else ()
    drawn, sure, path, length = AcceptTextsStep(draws, texts, 0)(logits, tokens, *tree, *settings)  # type: ignore[arg-type]
    for text in range(texts):
        own = logits[text * rows : (text + 1) * rows]
        levels = slice(text * places, (text + 1) * places)
        alone = AcceptStep(
            draws, 0
        )(  # type: ignore[arg-type]
            own,
            *(each[text] for each in (tokens, *tree)),
            *((keys[..., levels], *(n[text : text + 1] for n in numbers)) if settings else ()),
        )
        for got, want in zip((drawn[text], sure[text], path[text], length[text : text + 1]), alone, strict=True):
            assert torch.equal(got, want)


def test_several_texts_on_several_ranks_are_refused(pangu_request: BuildRequest, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="2 ranks take one text a launch"):
        check_request(replace(pangu_request, ranks=2), tmp_path / "out")
