"""The draw follows the processed distribution, and depends on logits, seed and position alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood.errors import NumericError, RequestError
from draftwood.noise import gumbel_row, gumbels, key_of
from draftwood.runtime.speculation import sampling as module
from draftwood.runtime.speculation.sampling import Sampling, distribution, draw, shortfall

SETTINGS = [
    pytest.param(Sampling(temperature=1.0), id="temperature"),
    pytest.param(Sampling(temperature=0.6, top_k=7), id="top_k"),
    pytest.param(Sampling(temperature=1.7, top_p=0.8), id="top_p"),
    pytest.param(Sampling(temperature=0.9, top_k=30, top_p=0.7), id="both"),
]
FILTERS = [
    *SETTINGS,
    pytest.param(Sampling(temperature=1.3, min_p=0.05), id="min_p"),
    pytest.param(Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02), id="all"),
]


def random_logits(size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def sorted_reference(logits_V, sampling):
    """The sampler's distribution by full sorts, written for reading: rank, cut, rank again, cut."""
    weights = np.exp((logits_V.astype(np.float64) - logits_V.max()) / sampling.temperature)
    kept = np.lexsort((np.arange(logits_V.size), -logits_V))[: sampling.top_k or None]
    kept = np.sort(kept)
    probs = weights[kept] / weights[kept].sum()
    if sampling.top_p < 1:
        ranked = np.lexsort((kept, -probs))
        before = np.concatenate([[0.0], np.cumsum(probs[ranked])[:-1]])
        inside = np.sort(ranked[before < sampling.top_p])
        kept, probs = kept[inside], probs[inside] / probs[inside].sum()
    out = np.zeros(logits_V.size)
    out[kept] = probs
    return out


@pytest.mark.parametrize("sampling", FILTERS)
def test_distribution_equals_transformers(sampling):
    for seed in range(20):
        logits = random_logits(500, seed)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            warpers.append(MinPLogitsWarper(sampling.min_p))
        expected = warpers(None, torch.from_numpy(logits)[None]).softmax(-1)[0].numpy()
        got = distribution(logits, sampling)
        assert np.array_equal(got > 0, expected > 0)
        # transformers computes in float32: 500 terms of relative error 6e-8 stay below 1e-6.
        np.testing.assert_allclose(got, expected, atol=1e-6, rtol=0)


@settings(max_examples=200, deadline=None)
@given(
    size=st.sampled_from([1, 2, 5, 255, 256, 257, 3000]),
    levels=st.integers(1, 4000),
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 5),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    top_k=st.integers(0, 3001),
)
def test_partial_selection_equals_the_full_sort(size, levels, seed, temperature, top_p, top_k):
    rng = np.random.default_rng(seed)
    logits = (rng.integers(0, levels, size) / 100).astype(np.float32)  # few levels give many ties
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    got, want = distribution(logits, sampling), sorted_reference(logits, sampling)
    assert np.array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=1e-13)  # the reference divides by its sum once more


def chi_square(counts, expected):
    """In its standard deviations above its mean; 6 are a false alarm in 3e5 of 39 degrees, 2e3 of 3 (top-k)."""
    seen = expected > 0
    assert not counts[~seen].any()
    freedom = seen.sum() - 1
    return (((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum() - freedom) / math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draws_over_positions_follow_the_distribution(sampling):
    logits, count = random_logits(40, scale=1.5), 3000  # a temperature 20 % off is found
    drawn = np.bincount([draw(logits, sampling, position) for position in range(count)], minlength=40)
    assert chi_square(drawn, distribution(logits, sampling) * count) < 6


@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[-1]])
def test_draws_over_seeds_follow_the_distribution(sampling):
    logits, count = random_logits(40, scale=1.5), 3000
    drawn = np.bincount([draw(logits, replace(sampling, seed=seed), 7) for seed in range(count)], minlength=40)
    assert chi_square(drawn, distribution(logits, sampling) * count) < 6


def test_neighbouring_positions_are_drawn_independently():
    """The joint law of two draws, and of one position under neighbouring seeds, over 3000 seeds."""
    logits, count = random_logits(8, scale=1.0), 3000
    probs = distribution(logits, Sampling(temperature=1.0))
    drawn = np.array([[draw(logits, Sampling(temperature=1.0, seed=s), p) for p in (5, 6)] for s in range(count)])
    for first, second in ((drawn[:, 0], drawn[:, 1]), (drawn[1:, 0], drawn[:-1, 0]), (drawn[1:, 0], drawn[:-1, 1])):
        pairs = np.bincount(8 * first + second, minlength=64)
        assert chi_square(pairs, np.outer(probs, probs).reshape(-1) * first.size) < 6


@pytest.mark.parametrize("size", [64 * 18, 20_000, 64 * 300 + 1])
def test_blocks_that_are_not_opened_cannot_win(size, monkeypatch):
    """Against the argmax over the noise of all tokens; flat logits open every block."""
    monkeypatch.setattr(module, "_WHOLE", 64 * 17)
    for position in range(60):
        logits = random_logits(size, position, scale=(0.0, 0.5, 3.0)[position % 3])
        want = logits / 0.8 + gumbel_row(size, key_of(3, position))
        assert draw(logits, Sampling(temperature=0.8, seed=3), position) == want.argmax()


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draw_is_the_greatest_of_logit_and_noise_among_the_kept(sampling):
    for position in range(50):
        logits = random_logits(300, position)
        kept = np.flatnonzero(distribution(logits, sampling)).astype(np.int32)
        heights = logits[kept] / sampling.temperature + gumbels(kept, key_of(0, position))
        assert draw(logits, sampling, position) == kept[heights.argmax()]


def test_rounding_of_the_logits_hardly_changes_draws_from_a_long_tail():
    """8000 rare tokens between 50 likely ones, logits off by rounding; each row of logits is drawn from 20 times."""
    sampling, random = Sampling(temperature=1.0), np.random.default_rng(0)
    changed = 0
    for position in range(1500):
        if position % 20 == 0:
            parts = [random.normal(mean, 1, count) for mean, count in ((0, 25), (-9, 8000), (0, 25))]
            logits = np.concatenate(parts).astype(np.float32)
            noisy = logits + random.normal(0, 2e-5, logits.size).astype(np.float32)
        changed += draw(logits, sampling, position) != draw(noisy, sampling, position)
    assert changed <= 1


def test_a_draw_depends_on_seed_and_position_alone():
    logits, one, two = random_logits(1000), Sampling(temperature=1, seed=1), Sampling(temperature=1, seed=2)
    forward = [draw(logits, one, p) for p in range(64)]
    assert forward == [draw(logits, one, p) for p in reversed(range(64))][::-1]
    assert forward != [draw(logits, two, p) for p in range(64)]


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = np.array([0, 3, 3, 1], dtype=np.float32)
    assert draw(logits, Sampling(top_p=0.5, top_k=1), 9) == 1
    assert distribution(logits, Sampling()).tolist() == [0, 1, 0, 0]


def test_ties_at_a_threshold_keep_the_lowest_ids():
    logits = np.array([1, 2, 1, 2, 1], dtype=np.float32)
    assert np.flatnonzero(distribution(logits, Sampling(temperature=1, top_k=3))).tolist() == [0, 1, 3]
    flat = np.zeros(8, dtype=np.float32)
    assert np.flatnonzero(distribution(flat, Sampling(temperature=1, top_p=0.5))).tolist() == [0, 1, 2, 3]


def test_a_forbidden_token_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf], dtype=np.float32)
    for sampling in (Sampling(), Sampling(temperature=1), Sampling(temperature=1, top_k=2, top_p=0.9)):
        assert draw(logits, sampling, 3) == 1
        assert [shortfall(logits, sampling, 3, token) for token in range(3)] == [math.inf, 0, math.inf]


@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_is_greedy():
    logits = random_logits(100)
    for temperature in (1e-3, 1e-300, 5e-324):
        assert draw(logits, Sampling(temperature=temperature), 0) == logits.argmax()


def test_a_greedy_shortfall_is_the_gap_to_the_best_logit():
    logits = np.array([1, 4, 2.5], dtype=np.float32)
    assert [shortfall(logits, Sampling(), 0, token) for token in range(3)] == [3, 0, 1.5]


def test_a_sampled_shortfall_is_the_gap_with_noise():
    sampling = Sampling(temperature=0.5)
    for position in range(100):
        noise = gumbels(np.arange(4, dtype=np.int32), key_of(0, position))
        short = [shortfall(np.zeros(4, dtype=np.float32), sampling, position, token) for token in range(4)]
        assert short == pytest.approx(0.5 * (noise.max() - noise), abs=1e-14)  # roundings of float64 near 10
    kept = [shortfall(np.zeros(4, dtype=np.float32), replace(sampling, top_k=1), 0, token) for token in range(4)]
    assert kept == [0, math.inf, math.inf, math.inf]


def test_a_lead_that_is_taken_away_turns_the_draw():
    for position in range(50):
        logits, sampling = random_logits(50, position), Sampling(temperature=1.3, seed=2)
        drawn = draw(logits, sampling, position)
        lead = min(shortfall(logits, sampling, position, token) for token in range(50) if token != drawn)
        for change, same in ((0.99, True), (1.01, False)):
            moved = logits.copy()
            moved[drawn] -= np.float32(change * lead)
            # 1 % of a lead below 1e-4 is near the rounding of a float32 logit.
            assert lead < 1e-4 or (draw(moved, sampling, position) == drawn) == same


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1)], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_are_refused(bad, sampling):
    with pytest.raises(NumericError, match="at token 2"):
        draw(np.array([0, 1, bad, 1], dtype=np.float32), sampling, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", True)],
        *[("top_p", value) for value in (0, -1, 1.01, math.nan, None)],
        *[("top_k", value) for value in (-1, 1.5, True)],
        *[("min_p", value) for value in (-0.1, 1.1, math.nan, None)],
        *[("seed", value) for value in (-1, 2**64, 0.5)],
    ],
)
def test_a_setting_out_of_range_is_refused(name, value):
    with pytest.raises(RequestError, match=rf"^sampling: {name}: expected .*, got .*; "):
        Sampling(**{name: value})
