"""What is believed of a text before its first step, by its length."""

import random

import numpy as np
import pytest

from draftwood.planned import Prior
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration, Contexts
from draftwood.trees.measure import expected_accept_length
from draftwood.trees.prior import counted_prior

CHAIN = Topology.chain(4)


def texts(*kinds: tuple[int, int, float], seed: int = 0) -> Contexts:
    """Of every kind so many texts of 40 steps behind so many tokens, whose candidates are right so often."""
    source, found = random.Random(seed), Calibration()
    for number, tokens, accuracy in kinds:
        for text in range(number):
            for step in range(40):
                levels = next((level for level in range(4) if source.random() >= accuracy), 4)
                found.add((0,) * levels, group=f"{tokens} {text}", context=tokens + step)
    return found.contexts


def promised(prior: Prior, weights: tuple[float, ...]) -> float:
    """Accept length of the chain: hazards multiply along it, and classes mix."""
    rows = [one.hazards for one in prior.classes]
    return 1 + float(np.dot(weights, [np.cumprod(hazards).sum() for (hazards,) in rows]))


def of_any(prior: Prior) -> tuple[float, ...]:
    return tuple(one.weight for one in prior.classes)


def accept_length(contexts: Contexts) -> float:
    found = expected_accept_length(contexts, CHAIN)
    assert found is not None
    return found.tokens


def test_texts_of_a_length_are_promised_what_was_counted_of_them() -> None:
    contexts = texts((60, 100, 0.8), (60, 1500, 0.4))
    prior = counted_prior(contexts, [CHAIN], ())
    (short, before), (long, behind) = ((one.tokens, one.weights) for one in prior.lengths)
    assert (short, long) == (0, 1024) and all(sum(weights) == pytest.approx(1) for weights in (before, behind))
    assert promised(prior, of_any(prior)) == pytest.approx(accept_length(contexts), rel=1e-3)
    for weights, octave_N in ((before, contexts.steps_N < 16), (behind, contexts.steps_N >= 16)):
        # Of the ease that these texts show a sixtieth is not believed.
        assert promised(prior, weights) == pytest.approx(accept_length(contexts.where(octave_N)), rel=0.02)


@pytest.mark.parametrize(("number", "least", "most"), [(1, 0.3, 0.75), (60, 0.9, 1.02)])
def test_one_text_of_a_length_is_half_believed(number: int, least: float, most: float) -> None:
    contexts = texts((60, 100, 0.8), (number, 1500, 0.4), seed=3)
    prior = counted_prior(contexts, [CHAIN], ())
    counted, of_all = accept_length(contexts.where(contexts.steps_N >= 16)), promised(prior, of_any(prior))
    believed = (promised(prior, prior.lengths[1].weights) - of_all) / (counted - of_all)
    assert least < believed < most


def test_a_few_steps_of_a_length_are_hardly_believed() -> None:
    few = Calibration()
    few.add((), group="one", context=3000)
    both = Calibration()
    both.merge(few)
    for ranks, count in (((0,), 900), ((), 100)):
        for text in range(count // 10):
            both.add(ranks, group=f"text {text}", context=100)
    prior = counted_prior(both.contexts, [CHAIN], ())
    assert prior.lengths[1].tokens == 2048
    np.testing.assert_allclose(prior.lengths[1].weights, of_any(prior), atol=0.1)


def test_where_lengths_are_alike_or_unknown_there_is_one_set_of_weights() -> None:
    assert counted_prior(texts((20, 100, 0.7)), [CHAIN], ()).lengths == ()
    unknown = Calibration()
    for text in range(20):
        unknown.add((0, 0), group=f"text {text}")
    assert counted_prior(unknown.contexts, [CHAIN], ()).lengths == ()
    assert counted_prior(Calibration().contexts, [Topology.plain()], ()).lengths == ()
