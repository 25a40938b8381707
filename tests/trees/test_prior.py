"""Priors of a text before its first step, by its length."""

import random

import pytest

from draftwood.planned import log_odds
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration, Contexts
from draftwood.trees.prior import counted_prior

from .samples import accept_length

CHAIN = Topology.chain(4)


def texts(*kinds: tuple[int, int, float], seed: int = 0) -> Contexts:
    """So many texts of each kind: 40 steps after so many tokens, with candidates that are right at that rate."""
    source, found = random.Random(seed), Calibration()
    for number, tokens, accuracy in kinds:
        for text in range(number):
            for step in range(40):
                levels = next((level for level in range(4) if source.random() >= accuracy), 4)
                found.add((0,) * levels, group=f"{tokens} {text}", context=tokens + step)
    return found.contexts


def first(contexts: Contexts) -> float:
    return accept_length(contexts, Topology.chain(1)).tokens - 1


def test_a_tree_reaches_what_was_counted_of_it() -> None:
    contexts = texts((60, 100, 0.8))
    prior = counted_prior(contexts, {"chain": CHAIN})
    assert 1 + sum(prior.reached["chain"]) == pytest.approx(accept_length(contexts, CHAIN).tokens, abs=1e-5)
    assert prior.first == prior.reached["chain"][0] == pytest.approx(first(contexts), abs=1e-6)


def test_texts_of_a_length_have_the_ease_that_was_counted_of_them() -> None:
    contexts = texts((60, 100, 0.8), (60, 1500, 0.4))
    prior = counted_prior(contexts, {"chain": CHAIN})
    assert [one.tokens for one in prior.lengths] == [0, 1024]
    for one, octave_N in zip(prior.lengths, (contexts.steps_N < 16, contexts.steps_N >= 16), strict=True):
        # Of the ease that these texts show a sixtieth is not believed.
        assert log_odds(prior.first) + one.ease == pytest.approx(log_odds(first(contexts.where(octave_N))), abs=0.05)
        assert prior.ease_at(one.tokens) == prior.ease_at(one.tokens + 200) == one.ease


@pytest.mark.parametrize(("number", "share"), [(1, 1 / 2), (60, 60 / 61)])
def test_one_text_of_a_length_is_half_believed(number: int, share: float) -> None:
    contexts = texts((60, 100, 0.8), (number, 1500, 0.4), seed=3)
    counted = log_odds(first(contexts.where(contexts.steps_N >= 16))) - log_odds(first(contexts))
    # A text counts whole from 16 contexts on, and folds may split one.
    assert counted_prior(contexts, {}).lengths[1].ease == pytest.approx(share * counted, rel=0.02)


def test_a_few_steps_of_a_length_are_hardly_believed() -> None:
    few = Calibration()
    few.add((), group="one", context=3000)
    both = Calibration()
    both.merge(few)
    for ranks, count in (((0,), 900), ((), 100)):
        for text in range(count // 10):
            both.add(ranks, group=f"text {text}", context=100)
    (_, long) = counted_prior(both.contexts, {}).lengths
    # A sixteenth of a text, all of whose drafts failed.
    assert long.tokens == 2048 and -0.6 < long.ease < -0.4


def test_where_lengths_are_alike_or_unknown_no_length_is_named() -> None:
    assert counted_prior(texts((20, 100, 0.7)), {}).lengths == ()
    unknown = Calibration()
    for text in range(20):
        unknown.add((0, 0), group=f"text {text}")
    assert counted_prior(unknown.contexts, {}).lengths == ()
    assert counted_prior(Calibration().contexts, {"plain": Topology.plain()}).lengths == ()
