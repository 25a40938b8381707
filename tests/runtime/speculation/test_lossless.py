"""Whatever tree is drafted by whatever drafter, reading the shared noise or not, the text for a seed is one text."""

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftwood.noise import gumbel_row, key_of
from draftwood.runtime.speculation.sampling import Sampling, distribution, draw
from draftwood.trees import Topology, tensorize, tree_tokens, walk

VOCABULARY, LENGTH = 8, 6


def all_trees(most):
    """Every ordered tree of one to ``most`` draft nodes: non-decreasing parents that precede their children."""
    for nodes in range(1, most + 1):
        for parents in itertools.product(*(range(row) for row in range(1, nodes + 1))):
            if all(left <= right for left, right in itertools.pairwise(parents)):
                ranks = [parents[:row].count(parent) for row, parent in enumerate(parents)]
                yield Topology((0, *parents), (0, *ranks))


TREES = list(all_trees(5))


def teacher(prefix):
    """Logits that follow from the whole prefix."""
    return _teacher(tuple(prefix))


@cache
def _teacher(prefix):
    return np.random.default_rng((5, *prefix)).normal(0, 1.5, VOCABULARY).astype(np.float32)


def coupled(prefix, level, sampling):
    """A drafter that knows the teacher nearly, and shares its noise."""
    logits = teacher(prefix) + np.random.default_rng(level).normal(0, 0.5, VOCABULARY)
    return logits + sampling.temperature * gumbel_row(VOCABULARY, key_of(sampling.seed, len(prefix) + level))


def uncoupled(prefix, level, sampling):
    return teacher(prefix)


def adverse(prefix, level, sampling):
    """Reads the noise to propose tokens that will not be drawn."""
    return -coupled(prefix, level, sampling)


@cache
def drawn(prefix, sampling):
    """The token after a prefix; texts of one seed have most of their prefixes in common, whatever drafts them."""
    return draw(teacher(prefix), sampling, len(prefix))


def plain(sampling, length):
    text = [0]
    while len(text) <= length:
        text.append(draw(teacher(text), sampling, len(text)))
    return text[1:]


def speculative(tree, drafter, sampling, length):
    """The text in steps of a tree whose levels the drafter ranks, and the steps that it took."""
    text, steps, buffers = [0], 0, tensorize(tree)
    text.append(drawn((0,), sampling))
    while len(text) <= length:
        levels = [np.argsort(-drafter(text, level, sampling)) for level in range(tree.depth)]
        tokens = tree_tokens(buffers, text[-1], np.array(levels))

        def at(row, depth, tokens=tokens, text=tuple(text)):
            path = tuple(tokens[buffers.paths[row, 1 : depth + 1]].tolist())
            return drawn(text + path, sampling)

        done = walk(buffers, tokens, at)
        text += [*tokens[list(done.rows[1:])].tolist(), done.bonus]
        steps += 1
    return text[1 : length + 1], steps


@pytest.mark.parametrize("drafter", [coupled, uncoupled, adverse])
def test_every_tree_of_up_to_five_nodes_gives_the_plain_text(drafter):
    """For temperature, top-k and top-p; 64 trees with 3 seeds each."""
    assert len(TREES) == 64
    for number, tree in enumerate(TREES):
        for seed in range(3):
            filters = ({}, {"top_k": 3}, {"top_p": 0.8})[seed]
            sampling = Sampling(temperature=0.9, seed=64 * seed + number, **filters)
            assert speculative(tree, drafter, sampling, LENGTH)[0] == plain(sampling, LENGTH)


def test_a_drafter_that_shares_the_noise_takes_fewer_steps():
    steps = {}
    for drafter in (coupled, uncoupled, adverse):
        texts = (speculative(Topology.chain(3), drafter, Sampling(temperature=1.0, seed=s), 12) for s in range(40))
        steps[drafter] = sum(count for _, count in texts)
    assert steps[coupled] < 0.8 * steps[uncoupled] < 0.8 * steps[adverse]


@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.9}], ids=["all", "filtered"])
def test_texts_have_the_teachers_law(filters):
    """All 512 texts of three tokens by the product of their exact probabilities, against 2000 seeds."""
    exact, count, one = np.zeros((VOCABULARY,) * 3), 2000, Sampling(temperature=0.9, **filters)
    for first, second in itertools.product(range(VOCABULARY), repeat=2):
        shares = [distribution(teacher([0, first, second][:n]), one) for n in (1, 2, 3)]
        exact[first, second] = shares[0][first] * shares[1][second] * shares[2]
    assert exact.sum() == pytest.approx(1)
    seen = np.zeros_like(exact)
    for seed in range(count):
        seen[tuple(plain(replace(one, seed=seed), 3))] += 1
    assert not seen[exact == 0].any()
    # Rare texts are one cell, so that five or more are expected in each.
    rare = exact * count < 5
    got = np.append(seen[~rare], seen[rare].sum())
    want = np.append(exact[~rare], max(exact[rare].sum(), 1e-9)) * count
    freedom = got.size - 1
    # Six standard deviations: a false alarm in 2e6, filtered in 2e5.
    assert ((got - want) ** 2 / want).sum() < freedom + 6 * math.sqrt(2 * freedom)
