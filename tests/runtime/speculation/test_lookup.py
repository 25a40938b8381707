"""Drafts looked up in the text itself: against counting by hand, and as drafts that change no token."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draftwood
from draftwood.errors import RequestError
from draftwood.noise import gumbels, key_of
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gears import PLAIN
from draftwood.runtime.speculation.lookup import NOTHING, TextIndex, levels, match_class
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.comparison.check import check, sample_prompts
from draftwood.trees import Topology
from draftwood.trees.spec import read_specs

GREEDY = Sampling()
TEXTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)


def indexed(tokens: list[int]) -> TextIndex:
    index = TextIndex()
    index.extend(tokens)
    return index


def longest_match(text: list[int]) -> int:
    """By trying: the longest end of the text that stands in it once before."""
    for size in range(len(text) - 1, 0, -1):
        if any(text[at : at + size] == text[-size:] for at in range(len(text) - size)):
            return size
    return 0


def followers(text: list[int], end: list[int]) -> Counter[int]:
    """By looking: the tokens after every occurrence of ``end``."""
    places = range(len(text) - len(end))
    return Counter(text[at + len(end)] for at in places if text[at : at + len(end)] == end)


@given(TEXTS)
def test_the_match_is_the_longest(text: list[int]) -> None:
    assert indexed(text).match == longest_match(text)


@given(TEXTS)
def test_token_by_token_is_as_all_at_once(text: list[int]) -> None:
    index = TextIndex()
    for token in text:
        index.extend([token])
    tree = levels(Topology.full((2, 2)))
    assert index.draft(tree, GREEDY, 0).tolist() == indexed(text).draft(tree, GREEDY, 0).tolist()


@given(TEXTS)
def test_the_best_candidate_followed_most_often(text: list[int]) -> None:
    index = indexed(text)
    if not index.match:
        return
    token = int(index.draft(levels(Topology.chain(1)), GREEDY, 0)[1])
    counts = followers(text, text[-index.match :])
    assert counts[token] == max(counts.values())


@given(TEXTS)
def test_a_chain_goes_on_as_the_text_did(text: list[int]) -> None:
    """Every token of a chain stood after those before it, as long as one is proposed."""
    index = indexed(text)
    drafted = index.draft(levels(Topology.chain(5)), GREEDY, 0)[1:].tolist()
    so_far = list(text)
    for token in drafted:
        if token == NOTHING:
            break
        assert any([*so_far[-size:], token] == text[at : at + size + 1] for size in (1,) for at in range(len(text)))
        so_far.append(token)


@pytest.mark.parametrize(("early", "late"), [(2, 3), (3, 2)])
def test_of_tokens_that_followed_as_often_the_latest_goes_first(early: int, late: int) -> None:
    # After 1 stood the late one first and last, the early one in between.
    index = indexed([1, late, 7, 1, early, 8, 1, early, 9, 1, late, 6, 1])
    assert index.draft(levels(Topology.full((2,))), GREEDY, 0).tolist() == [1, late, early]


def test_shorter_ends_give_what_the_longest_does_not() -> None:
    # After "1 2" stood 3, after "2" alone also 4.
    index = indexed([1, 2, 3, 9, 2, 4, 1, 2])
    assert index.match == 2
    assert index.draft(levels(Topology.full((2,))), GREEDY, 0).tolist() == [2, 3, 4]


def test_of_equal_counts_the_latest_goes_first() -> None:
    assert indexed([5, 1, 6, 5, 2, 7, 5]).draft(levels(Topology.full((2,))), GREEDY, 0).tolist() == [5, 2, 1]


def test_a_text_that_never_repeats_proposes_nothing() -> None:
    index = indexed([1, 2, 3])
    assert index.match == 0
    assert index.draft(levels(Topology.full((2, 1))), GREEDY, 0).tolist() == [3, *[NOTHING] * 4]


def test_sampled_text_is_proposed_with_the_teachers_own_noise() -> None:
    index, sampling = indexed([5, 1, 5, 2, 5]), Sampling(temperature=1.0, seed=3)
    for position in range(20):
        noise = gumbels(np.array([1, 2], np.int32), key_of(3, position + 1))
        expected = [1, 2] if noise[0] > noise[1] else [2, 1]
        assert index.draft(levels(Topology.full((2,))), sampling, position)[1:].tolist() == expected


@given(TEXTS, TEXTS)
def test_the_longer_match_wins_in_text_or_corpus(text: list[int], corpus: list[int]) -> None:
    beside = TextIndex(TextIndex.corpus_of(corpus))
    beside.extend(text)
    sizes = range(1, min(len(text), len(corpus)) + 1)
    there = [n for n in sizes if any(corpus[at : at + n] == text[-n:] for at in range(len(corpus)))]
    own = longest_match(text)
    assert beside.match == max(own, *there, 0)
    if own >= max(there, default=0):
        tree = levels(Topology.full((2, 2)))
        assert beside.draft(tree, GREEDY, 0).tolist() == indexed(text).draft(tree, GREEDY, 0).tolist()


def test_a_corpus_goes_on_where_the_text_does_not() -> None:
    index = TextIndex(TextIndex.corpus_of([1, 2, 3, 4, 5, 6]))
    index.extend([9, 2, 3])
    assert index.draft(levels(Topology.chain(3)), GREEDY, 0).tolist() == [3, 4, 5, 6]


def test_classes_of_matches() -> None:
    assert [match_class(n) for n in (0, 1, 2, 3, 4, 8, 15, 16, 500)] == [0, 1, 2, 2, 3, 4, 4, 5, 5]


@pytest.fixture(scope="module")
def looking(tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without a drafter whose trees are looked up."""
    out = tmp_path_factory.mktemp("lookup") / "bundle"
    trees = read_specs("lookup:chain:4,lookup:full:2x1").trees  # of five rows both: one graph verifies them
    asked = draftwood.BuildRequest(model=tiny_teacher, drafter=None, trees=trees, slots=(256,), prefill_rows=())
    draftwood.build(asked, out)
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_those_of_plain_decoding(looking: Path, temperature: float) -> None:
    prompt = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11, 7, 8]
    with draftwood.open(looking) as model:
        _, *names = [gear.name for gear in model.manifest.gears]
        assert [gear.looks_up for gear in model.manifest.gears] == [False, True, True]
        for seed in range(3 if temperature else 1):
            told = {"temperature": temperature, "seed": seed, "max_new_tokens": 60, "ignore_eos": True}
            plain = model.generate(prompt, policy=PLAIN, **told)
            for policy in (*names, "adaptive"):
                assert model.generate(prompt, policy=policy, **told).token_ids == plain.token_ids
            if temperature == 0:  # a greedy text of a tiny model runs in circles, which are looked up
                assert model.generate(prompt, policy=names[0], **told).steps < plain.steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_grammar_are_those_of_plain_decoding(looking: Path, temperature: float) -> None:
    """Forbidden tokens are not looked up: the text is in the prompt, after what may not come first."""
    pytest.importorskip("llguidance")
    with draftwood.open(looking) as model:
        prompt, lark = "the cat sat on the mat and the hat and", 'start: (" the cat" | " sat" | " on the mat") ~ 8'
        _, *names = [gear.name for gear in model.manifest.gears]
        for seed in range(3 if temperature else 1):
            told = {"temperature": temperature, "seed": seed, "max_new_tokens": 120, "grammar": lark}
            plain = model.generate(prompt, policy=PLAIN, **told)
            assert plain.finish_reason == "stop"
            for policy in names:
                assert model.generate(prompt, policy=policy, **told).token_ids == plain.token_ids
            assert model.generate(prompt, policy=names[0], **told).steps < plain.steps
    index = indexed([5, 1, 5, 2, 5, 3, 5])
    first = levels(Topology.full((2,)))
    assert index.draft(first, Sampling(), 6).tolist() == [5, 3, 2]
    assert index.draft(first, Sampling(), 6, allowed=lambda path, tokens: set(tokens) - {3}).tolist() == [5, 2, 1]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_corpus_of_the_bundle_changes_no_text(
    looking: Path, tiny_teacher: Path, tmp_path: Path, temperature: float
) -> None:
    prompt = "the cat sat on the mat"
    told = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    steps = []
    with draftwood.open(looking) as model:
        answer = model.generate(prompt, policy=PLAIN, **told)
        gear = next(one.name for one in model.manifest.gears if one.looks_up)
        steps.append(model.generate(prompt, policy=gear, **told).steps)
        assert answer.text is not None
    (tmp_path / "corpus.txt").write_text(f"{prompt}{answer.text}")
    asked = draftwood.BuildRequest(
        model=tiny_teacher,
        drafter=None,
        trees=read_specs("lookup:chain:4").trees,
        slots=(256,),
        prefill_rows=(),
        corpus=tmp_path / "corpus.txt",
    )
    draftwood.build(asked, tmp_path / "with")
    with draftwood.open(tmp_path / "with") as model:
        assert model.bundle.corpus
        found = model.generate(prompt, policy=gear, **told)
        steps.append(found.steps)
    assert found.token_ids == answer.token_ids
    assert steps[1] < steps[0] if temperature else steps[1] <= steps[0]  # a greedy text runs in circles


@pytest.mark.parametrize(
    ("trees", "content", "message"),
    [("chain:1", b"text", "no tree looks tokens up"), ("lookup:chain:1", b"\xff", "expected UTF-8 text up to 1 MiB")],
)
def test_a_corpus_that_serves_nobody_is_one_line(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, trees: str, content: bytes, message: str
) -> None:
    (tmp_path / "corpus.txt").write_bytes(content)
    request = draftwood.BuildRequest(
        model=tiny_teacher,
        drafter=tiny_heads,
        trees=read_specs(trees).trees,
        slots=(128,),
        corpus=tmp_path / "corpus.txt",
    )
    with pytest.raises(RequestError, match=message):
        draftwood.build(request, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_text_that_is_taken_back_is_forgotten(looking: Path) -> None:
    with draftwood.open(looking) as model:
        gear = next(gear for gear in model.manifest.gears if gear.looks_up)
        state = model.engine.begin(256)
        model.engine.start(state, np.array([1, 2, 3, 1, 2], np.int64))
        state.root = 3
        assert state.index().match == 3
        state.rollback(3)
        state.root = 4
        assert state.index().match == 0
        assert len(model.engine.step([state], [gear])[0].tokens) >= 1


def test_check_holds_their_graphs_to_eager_pytorch(looking: Path) -> None:
    bundle = Bundle.open(looking)
    report = check(bundle, list(sample_prompts(bundle, None, 1)))
    assert report["ok"] and report["mutations_caught"] == report["mutations"] > 0
    assert not any(c["quantity"].startswith("draft") for c in report["comparisons"])
    assert set(report["trees"]) == {"plain", "lookup-chain-4", "lookup-full-2x1"}
