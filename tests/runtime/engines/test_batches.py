"""Several texts in one launch: every text is its own plain text, next to any others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tests.decoded import ended

TEXTS = 7
TOKENS = 24


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def engine(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> CpuEngine:
    return CpuEngine(Bundle.open(tiny_bundles[request.param]), Opening(threads=1))


def options(text: int, temperature: float) -> Options:
    sampling = Sampling(temperature=temperature * (text % 3 > 0), top_p=0.9 if text % 2 else 1.0, seed=text)
    return Options(max_new_tokens=TOKENS - text, sampling=sampling, ignore_eos=True)


def prompt(text: int) -> list[int]:
    return np.random.default_rng(text).integers(3, 200, 3 + 5 * text).tolist()


def decodings(engine: CpuEngine, policies: Sequence[Policies], temperature: float) -> list[Decoding]:
    found = []
    for text in range(TEXTS):
        asked = options(text, temperature)
        policy = policies[text % len(policies)].new(asked.sampling.greedy, asked.max_new_tokens)
        found.append(Decoding(engine, prompt(text), asked, policy))
    return found


@pytest.fixture(scope="module")
def alone(engine: CpuEngine) -> dict[float, list[tuple[int, ...]]]:
    """Plain texts, each decoded by itself, by temperature."""
    plain = [Policies(engine.bundle, "plain")]
    return {t: [one.run().token_ids for one in decodings(engine, plain, t)] for t in (0.0, 0.8)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(2))
def test_texts_that_come_and_go_are_plain_texts(
    engine: CpuEngine, alone: dict[float, list[tuple[int, ...]]], temperature: float, seed: int
) -> None:
    """Trees of all gears and greedy and sampled texts in one launch, joining and leaving at every step."""
    names = ["adaptive", *(gear.name for gear in engine.bundle.manifest.gears)]
    waiting = decodings(engine, [Policies(engine.bundle, name) for name in names], temperature)
    texts, rng, going, sizes = list(waiting), random.Random(seed), list[Decoding](), set[int]()
    while waiting or going:
        while waiting and (not going or rng.random() < 0.5):
            going.append(waiting.pop(rng.randrange(len(waiting))))
            going[-1].start()
        group = rng.sample(going, rng.randint(1, min(len(going), engine.max_batch)))
        sizes.add(len(group))
        advance(engine, group)
        for text in group:
            text.state.check()
        going = [text for text in going if not text.finished]
    for text, plain in zip(texts, alone[temperature], strict=True):
        assert ended(text).token_ids == plain
    assert {1, 3} <= sizes  # also an odd number, next to a place that nobody has


def test_a_launch_takes_the_smallest_graph_with_room(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    honest = engine._bindings
    monkeypatch.setattr(engine, "_bindings", lambda graph: opened.append(graph.name) or honest(graph))
    going = decodings(engine, [Policies(engine.bundle, "plain")], 0.0)
    for text in going:
        text.start()
    opened.clear()
    for count in range(1, 6):
        advance(engine, going[:count])
    # Those of several are opened before a step is timed.
    names = {1: "grouped", 2: "grouped-b2", 4: "grouped-b4"}
    assert opened == [names[texts] for texts in (1, 2, 2, 4, 4, 4, 4, 4, 4, 1)]


def test_texts_reach_the_end_of_the_context_together(engine: CpuEngine) -> None:
    """Heads as rows need more slots than there are positions; the last rows of a text go without them."""
    context = engine.bundle.manifest.dims.context
    asked, texts = Options(max_new_tokens=40, ignore_eos=True), list[Decoding]()
    plain, adaptive = (Policies(engine.bundle, name) for name in ("plain", "adaptive"))
    prompts = [np.random.default_rng(at).integers(3, 200, context - 20 - at).tolist() for at in range(3)]
    for tokens in prompts:
        texts.append(Decoding(engine, tokens, asked, adaptive.new(True, 40)))
        texts[-1].start()
    while going := [text for text in texts if not text.finished]:
        advance(engine, going)
    for text, tokens in zip(texts, prompts, strict=True):
        wanted = Decoding(engine, tokens, asked, plain.new(True, 40)).run()
        assert ended(text).token_ids == wanted.token_ids and len(wanted.token_ids) >= 20


def test_logits_do_not_depend_on_who_is_beside(engine: CpuEngine) -> None:
    """Of every row, in every number of texts; nothing of another text or of an empty place is seen."""
    gears = [gear for gear in engine.bundle.manifest.gears if gear.slots == 128]
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    for count in range(1, engine.max_batch + 1):
        for shift in range(len(gears)):
            states = []
            for text in range(count):
                state = engine.begin(128)
                engine.start(state, np.array(prompt(text)))
                states.append(state)
            chosen: list[Gear] = [gears[(text + shift) % len(gears)] for text in range(count)]
            outputs = engine.verify(states, engine.draft(states, chosen))
            for text, (gear, output) in enumerate(zip(chosen, outputs, strict=True)):
                found.setdefault((text, gear.name), []).append(output.logits_RV.copy())
    for rows in found.values():
        for other in rows[1:]:
            # Products of more rows round otherwise in the last bits; another text would change values by 1e-1.
            np.testing.assert_allclose(other, rows[0], rtol=0, atol=2e-5)


def test_one_launch_drafts_for_texts_of_the_same_tree(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three texts, two of them sampled, and a place that nobody has: each drafts as it would alone."""
    states = [engine.begin(128, options(text, 0.8).sampling) for text in range(3)]
    for text, state in enumerate(states):
        engine.start(state, np.array(prompt(text)))
    ran: list[str] = []
    honest = engine.drafting._run
    monkeypatch.setattr(engine.drafting, "_run", lambda graph, *given: ran.append(graph.name) or honest(graph, *given))
    for gear in [gear for gear in engine.bundle.manifest.gears if gear.slots == 128 and gear.neural]:
        alone = [engine.draft([state], [gear])[0] for state in states]
        ran.clear()
        together = engine.draft(states, [gear] * 3)
        assert ran == [f"{gear.draft}-b4"]
        for one, other in zip(alone, together, strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist()
            assert one.tree.parents.tolist() == other.tree.parents.tolist()
            # In fp32 more rows may be added up in another order; here none differed.
            assert np.allclose(one.scores_M, other.scores_M, atol=1e-5)
