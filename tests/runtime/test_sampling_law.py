"""The ground of equal texts: the sampler's law with every small tree, and the freedom of a larger tree."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.trees import Topology, TreeBuffers, tensorize, walk

# Tokens, texts a tree, and the chance that the test fails though nothing is wrong.
VOCABULARY, TEXTS, CHANCE = 4, 400, 1e-6


def test_pairs_of_sampled_tokens_follow_the_teachers_law_with_every_tree() -> None:
    assert failures(draw) == 0


def test_a_draw_that_depends_on_nothing_is_caught() -> None:
    assert failures(lambda logits_V, sampling, position: int(np.argmax(logits_V))) == len(list(small_trees(3)))


def failures(drawn: Callable[..., int]) -> int:
    """How many small trees emit pairs of tokens that do not follow the teacher's own law: chi-square.

    The teacher is a table of logits by the token before. A pair takes one step or two, as the tree has it.
    """
    logits_VV = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    law_VV = _softmax(logits_VV)
    expected = TEXTS * law_VV[0][:, None] * law_VV
    trees = list(small_trees(3))
    failed = 0

    @cache  # the same for every tree
    def next_token(token: int, seed: int, position: int) -> int:
        return drawn(logits_VV[token], Sampling(temperature=1.0, seed=seed), position)

    for tree in trees:
        counts_VV = np.zeros((VOCABULARY, VOCABULARY))
        buffers = tensorize(tree)
        for seed in range(TEXTS):
            first, second = _pair(buffers, partial(next_token, seed=seed))
            counts_VV[first, second] += 1
        chance = chi_square_chance(float(((counts_VV - expected) ** 2 / expected).sum()), VOCABULARY**2 - 1)
        failed += chance < CHANCE / len(trees)
    return failed


def test_adding_a_node_never_shortens_what_is_accepted() -> None:
    """Adding a node to a tree never shortens the accepted path: every small tree, every draw of a small vocabulary."""
    cases = failed = 0
    drafted_IK = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    for larger in small_trees(4):
        for smaller in _without_a_leaf(larger):
            for drawn in product(range(VOCABULARY), repeat=larger.depth + 1):
                lengths = [len(_walked(tree, drafted_IK, drawn)) for tree in (smaller, larger)]
                cases, failed = cases + 1, failed + (lengths[0] > lengths[1])
    assert cases > 1000 and not failed


def test_small_trees_are_all_of_them() -> None:
    assert [tree.paths for tree in small_trees(1)] == [((0,),), ((1,),)]
    trees = list(small_trees(3))
    assert len(trees) == len(set(trees)) and max(tree.nodes for tree in trees) == 3
    assert Topology.chain(3) in trees and Topology.from_paths([(0,), (1,), (0, 0)]) in trees


def test_the_chance_of_a_chi_square_is_the_known_one() -> None:
    # Tables: 95 % of 15 degrees of freedom is 24.996.
    assert chi_square_chance(24.996, 15) == pytest.approx(0.05, abs=1e-4)


def small_trees(nodes: int, width: int = 2, depth: int = 3) -> Iterator[Topology]:
    """Every tree of 1 to ``nodes`` nodes within ``width`` ranks and ``depth`` levels."""
    seen: set[frozenset[tuple[int, ...]]] = set()
    layer: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        layer = {
            paths | {(*parent, rank)}
            for paths in layer
            for parent in ((), *paths)
            for rank in range(width)
            if len(parent) < depth and (*parent, rank) not in paths
        }
        seen |= layer
    for paths in sorted(seen, key=lambda paths: (len(paths), sorted(paths))):
        yield Topology.from_paths(sorted(paths))


def _without_a_leaf(tree: Topology) -> Iterator[Topology]:
    for leaf in tree.paths:
        if tree.nodes > 1 and not any(path[:-1] == leaf for path in tree.paths):
            yield Topology.from_paths(path for path in tree.paths if path != leaf)


def _walked(tree: Topology, drafted_IK: NDArray[np.int64], drawn: Sequence[int]) -> tuple[int, ...]:
    buffers = tensorize(tree)
    tokens_T = np.array([0, *(drafted_IK[len(path) - 1, path[-1]] for path in tree.paths)])
    return walk(buffers, tokens_T, lambda row, depth: drawn[depth]).rows


def _pair(tree: TreeBuffers, next_token: Callable[..., int]) -> tuple[int, int]:
    """The two tokens after token 0, decoded with the tree; candidates of a level are the tokens by number."""

    def step(root: int, position: int) -> list[int]:
        tokens_T = np.where(tree.depths > 0, (tree.ranks + tree.depths) % VOCABULARY, root)
        accepted = walk(
            tree, tokens_T, lambda row, depth: next_token(token=int(tokens_T[row]), position=position + depth)
        )
        return [*tokens_T[list(accepted.rows[1:])].tolist(), accepted.bonus]

    emitted = [0]
    while len(emitted) < 3:
        emitted += step(emitted[-1], len(emitted))
    return emitted[1], emitted[2]


def _softmax(logits_VV: NDArray[np.float32]) -> NDArray[np.float64]:
    raised = np.exp(logits_VV.astype(np.float64) - logits_VV.max(1, keepdims=True))
    found: NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return found


def chi_square_chance(statistic: float, freedom: int) -> float:
    """The chance of a statistic so large or larger under the law."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
