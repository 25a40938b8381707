"""The draw follows the processed distribution, and depends on logits, seed and position alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwood.errors import NumericError, RequestError
from draftwood.runtime.speculation.sampling import Sampling, distribution, draw, margin, uniform

SETTINGS = [
    pytest.param(Sampling(temperature=1.0), id="temperature"),
    pytest.param(Sampling(temperature=0.6, top_k=7), id="top_k"),
    pytest.param(Sampling(temperature=1.7, top_p=0.8), id="top_p"),
    pytest.param(Sampling(temperature=0.9, top_k=30, top_p=0.7), id="both"),
]


def random_logits(size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def sorted_reference(logits_V, sampling):
    """The same distribution by full sorts, written for reading: rank, cut, rank again, cut."""
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


@pytest.mark.parametrize("sampling", SETTINGS)
def test_distribution_equals_transformers(sampling):
    for seed in range(20):
        logits = random_logits(500, seed)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
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
    assert np.array_equal(distribution(logits, sampling), sorted_reference(logits, sampling))


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draws_over_positions_follow_the_distribution(sampling):
    logits, count = random_logits(40, scale=1.5), 20_000
    drawn = np.bincount([draw(logits, sampling, p) for p in range(count)], minlength=40)
    expected = distribution(logits, sampling) * count
    seen = expected > 0
    assert not drawn[~seen].any()
    # Chi-square has mean n and variance 2n: six sigma is far beyond chance, far below any wrong rule.
    freedom = seen.sum() - 1
    chi = ((drawn[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    assert chi < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draw_is_the_inverse_of_the_cdf(sampling):
    for position in range(50):
        logits = random_logits(300, position)
        probs = distribution(logits, sampling)
        order = sorted(np.flatnonzero(probs), key=lambda token: (math.frexp(probs[token])[1], token))
        edges = np.cumsum(probs[order])
        assert draw(logits, sampling, position) == order[np.argmax(edges > uniform(0, position))]


def test_rounding_of_the_logits_hardly_changes_draws_from_a_long_tail():
    """8000 rare tokens between 50 likely ones, logits off by rounding: in index order 32 of these draws change."""
    sampling, random = Sampling(temperature=1.0), np.random.default_rng(0)
    changed = 0
    for position in range(3000):
        parts = [random.normal(mean, 1, count) for mean, count in ((0, 25), (-9, 8000), (0, 25))]
        logits = np.concatenate(parts).astype(np.float32)
        noisy = logits + random.normal(0, 2e-5, logits.size).astype(np.float32)
        changed += draw(logits, sampling, position) != draw(noisy, sampling, position)
    assert changed <= 5


def test_uniform_is_the_philox_stream_of_numpy():
    for seed, position in [(0, 0), (1, 2), (2**64 - 1, 5), (7, 2**40)]:
        bits = np.random.Philox(key=seed, counter=position)
        assert uniform(seed, position) == np.random.Generator(bits).random()


def test_uniform_neighbours_are_independent():
    u = np.array([[uniform(seed, position) for position in range(4000)] for seed in (3, 4)])
    assert u.min() >= 0 and u.max() < 1
    # 4000 samples: standard error of the mean 0.0046, of a correlation 0.016; five of each.
    assert abs(u.mean(axis=1) - 0.5).max() < 0.023
    pairs = [(u[0, 1:], u[0, :-1]), (u[0, 2:], u[0, :-2]), (u[0], u[1]), (u[0, 1:], u[1, :-1])]
    assert max(abs(np.corrcoef(a, b)[0, 1]) for a, b in pairs) < 0.08


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
        assert margin(logits, sampling, 3) == math.inf


@pytest.mark.filterwarnings("error")
def test_a_tiny_temperature_is_greedy():
    logits = random_logits(100)
    for temperature in (1e-3, 1e-300, 5e-324):
        assert draw(logits, Sampling(temperature=temperature), 0) == logits.argmax()


def test_the_end_of_the_cdf_falls_on_a_token_that_can_be_drawn(monkeypatch):
    monkeypatch.setattr("draftwood.runtime.speculation.sampling.uniform", lambda seed, position: 1 - 2.0**-53)
    for seed in range(20):
        logits = np.append(random_logits(1000, seed), np.float32(-np.inf))
        assert draw(logits, Sampling(temperature=1), 0) <= 999


def test_greedy_margin_is_the_gap_of_the_two_best_logits():
    assert margin(np.array([1, 4, 2.5], dtype=np.float32), Sampling(), 0) == 1.5
    assert margin(np.array([4, 4], dtype=np.float32), Sampling(), 0) == 0
    assert margin(np.array([1], dtype=np.float32), Sampling(), 0) == math.inf


def test_sampled_margin_is_the_distance_to_the_nearest_inner_edge():
    logits, sampling = np.zeros(4, dtype=np.float32), Sampling(temperature=1)
    for position in range(100):
        gaps = np.abs(np.array([0.25, 0.5, 0.75]) - uniform(0, position))
        # one rounding of float64 near 1
        assert margin(logits, sampling, position) == pytest.approx(gaps.min(), abs=2e-16)
    assert margin(logits, Sampling(temperature=1, top_k=1), 0) == math.inf


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
        *[("seed", value) for value in (-1, 2**64, 0.5)],
    ],
)
def test_a_setting_out_of_range_is_refused(name, value):
    with pytest.raises(RequestError, match=rf"^sampling: {name}: expected .*, got .*; "):
        Sampling(**{name: value})
