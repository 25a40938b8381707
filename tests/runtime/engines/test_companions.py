"""A row has the same bits in every launch: of any cut of a prompt, after any kept beginning, in a chain, and next to
other texts. So a text is a function of its request. Bits are compared, so a few layers will do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.trees import Topology, tensorize

TOKENS = np.random.default_rng(5).integers(3, 300, 120)
PROMPT = 70
# Rows of a launch: alone, an odd number, and such as leave one row for a last block of attention (16 dimensions a
# head: blocks of 32 rows).
CUTS = ((70,), (1,) * 70, (2,) * 35, (33, 33, 4), (65, 5), (49, 17, 3, 1), (69, 1))


@pytest.fixture(scope="module", params=["exact", "w8a8", "nbits"])
def bundle(
    request: pytest.FixtureRequest, save_tiny: Callable[..., Path], tiny_heads: Path, tmp_path_factory: object
) -> Bundle:
    folder: Path = tmp_path_factory.mktemp("companions")  # type: ignore[attr-defined]
    (folder / "teacher").mkdir()
    save_packed(save_tiny(folder / "teacher", num_hidden_layers=2), folder / "packed", "gptq")
    trees = (("plain", Topology.plain()), ("chain-2", Topology.chain(2)))
    asked = BuildRequest(
        model=folder / "packed", drafter=tiny_heads, trees=trees, slots=(256,), prefill_rows=(), texts=4,
        precision=request.param,
    )  # fmt: skip
    build(asked, folder / "bundle")
    return Bundle.open(folder / "bundle")


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> CpuEngine:
    return CpuEngine(bundle, Opening(threads=1))


@pytest.fixture(scope="module")
def expected(engine: CpuEngine) -> list[np.ndarray]:
    """Of every position from the prompt's last one on: its logits by plain steps."""
    state = engine.begin(256)
    return [bits(engine.prefill(state, TOKENS[:PROMPT]).logits_RV)[-1], *stepped(engine, [state], [1] * 12)[0]]


def bits(logits_RV: np.ndarray) -> np.ndarray:
    return logits_RV.view(np.int32).copy()


def stepped(engine: CpuEngine, states: list[SequenceState], chains: list[int]) -> list[list[np.ndarray]]:
    """Logits of all rows of steps whose trees are chains of that many rows and hold the text's own tokens."""
    found: list[list[np.ndarray]] = [[] for _ in states]
    for rows in chains:
        drafts = []
        for state in states:
            tree = tensorize(Topology.chain(rows - 1) if rows > 1 else Topology.plain())
            drafts.append(Draft(TOKENS[state.length : state.length + rows].copy(), np.zeros(0, np.float32), tree))
        outputs = engine.verify(states, drafts)
        for number, (state, draft, output) in enumerate(zip(states, drafts, outputs, strict=True)):
            found[number] += list(bits(output.logits_RV))
            state.branched(draft.tokens_T, output.features_RF.copy())
            state.commit(range(rows))
    return found


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    assert len(got) <= len(want)
    assert [int((a != b).sum()) for a, b in zip(got, want, strict=False)] == [0] * len(got)


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut[0]}x{len(cut)}")
def test_a_prompt_may_be_cut_anywhere(engine: CpuEngine, expected: list[np.ndarray], cut: tuple[int, ...]) -> None:
    state = engine.begin(256)
    for begin, end in pairwise(accumulate(cut, initial=0)):
        last = engine.append(state, TOKENS[begin:end].copy())
        logits_V = bits(last.logits_RV)[-1]
    assert_same([logits_V, *stepped(engine, [state], [1] * 3)[0]], expected)


def test_a_chain_has_the_bits_of_plain_steps(engine: CpuEngine, expected: list[np.ndarray]) -> None:
    state = engine.begin(256)
    engine.prefill(state, TOKENS[:PROMPT])
    assert_same(stepped(engine, [state], [3, 1, 2, 3, 1, 1])[0], expected[1:])


@pytest.mark.parametrize("texts", [2, 3, 4])
def test_a_text_has_the_same_bits_beside_others(engine: CpuEngine, expected: list[np.ndarray], texts: int) -> None:
    """The others are of other lengths, and places may be left over."""
    states = []
    for text in range(texts):
        states.append(engine.begin(256))
        engine.prefill(states[-1], TOKENS[: PROMPT - 11 * text])
    assert_same(stepped(engine, states, [1, 1, 3, 1, 2])[0], expected[1:])


def test_a_kept_beginning_changes_no_bit(engine: CpuEngine, expected: list[np.ndarray]) -> None:
    """However much of the prompt is kept, also all but its last token, in place and as a copy."""
    for kept in (17, 32, PROMPT - 2, PROMPT - 1):
        for copied in (False, True):
            state = engine.begin(256)
            engine.prefill(state, TOKENS[: PROMPT + 3])
            stepped(engine, [state], [3])
            if copied:
                state = state.copied(kept, 256)
            else:
                state.rewind(kept)
            last = bits(engine.prefill(state, TOKENS[kept:PROMPT]).logits_RV)[-1]
            assert_same([last, *stepped(engine, [state], [1] * 2)[0]], expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_is_a_function_of_its_request(bundle: Bundle, temperature: float) -> None:
    """Fresh, again, after a shared beginning, with seven others, by another gear, and by another engine."""
    prompts = [np.random.default_rng(seed).integers(3, 200, 20 + 3 * seed).tolist() for seed in range(8)]

    def text(model: OpenedBundle, number: int, policy: str = "plain") -> tuple[int, ...]:
        asked = {"max_new_tokens": 12, "temperature": temperature, "seed": number, "ignore_eos": True}
        return tuple(model.generate(prompts[number], policy=policy, **asked).token_ids)  # type: ignore[arg-type]

    fresh = OpenedBundle(bundle, CpuEngine(bundle, Opening(threads=1)), Opening(prefixes=False))
    want = [text(fresh, number) for number in range(8)]
    model = OpenedBundle(bundle, CpuEngine(bundle, Opening(threads=1)))
    for prompt in prompts:
        model.generate([*prompt[:18], 5, 6], policy="plain", max_new_tokens=2)
    for policy in ("plain", "chain-2-kv256"):
        assert [text(model, number, policy) for number in range(8)] == want  # after a shared beginning, and again
    assert model.figures().prefix_hits >= 8
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda number: text(model, number), range(8))) == want
