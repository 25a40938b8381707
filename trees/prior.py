"""What a run should believe of a text before its first step, from counted contexts: kinds of text, easy to hard.

Texts differ more from each other than their steps do. Of each text there is thought to be an *ease*, which moves every
node alike: the log-odds of each question "is the next token this candidate, given that it is none of the better ones?"
are those that were counted, plus the ease (the model of Rasch, 1960, with nodes for items). A class is a value of it.

Long texts are drafted worse than short ones, or better: so there may be weights of the classes for texts of a length.

Shape suffixes: F folds, T rows of the union of all trees, C classes, N contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.planned import LengthWeights, Prior, TextClass
from draftwood.trees.calibration import LENGTH_STEP, Contexts
from draftwood.trees.confidence import split
from draftwood.trees.measure import visits
from draftwood.trees.topology import Topology

# Values of the ease in log-odds, and how frequent they are thought to be: a normal distribution of standard deviation
# 0.6, as much as texts of one kind were found to differ (docs/policy.md). Texts of another kind than was counted lie
# one to two of them off, all on one side, so the values reach to three.
SPREAD = 0.6
EASES = (-1.8, -1.2, -0.6, 0.0, 0.6, 1.2, 1.8)
WEIGHTS = (0.004, 0.054, 0.242, 0.4, 0.242, 0.054, 0.004)
# A node that was seldom asked for is thought to be like its level's node of equal rank, and that like its rank, with
# the weight of so many questions.
SHRINKAGE = 8.0
# Halvings of an interval of 6: what is left is far below any standard error.
HALVINGS = 16
# Texts of so many tokens and more, up to the next, are alike in length: octaves, as far as calibrations count.
LENGTHS = (0, *(256 << octave for octave in range(14)))
# A text of which fewer contexts were counted tells less of its ease.
ENOUGH = 16
# Share of the texts of a length that are like those of any: no class is ever ruled out.
LIKE_ANY = 0.1


def counted_prior(contexts: Contexts, trees: Iterable[Topology], bounds: tuple[int, ...]) -> Prior:
    """The prior of contexts over all nodes of ``trees``; without any node, a prior of no paths."""
    union = Topology.from_paths({path for tree in trees for path in tree.paths})
    parts = split(contexts, bounds)
    total = sum(part.total for part in parts)
    every_T = sum((visits(part, union).sum(0) for part in parts), np.zeros(union.rows))
    pooled = _odds(union, every_T, _by_rank(union, every_T))
    odds = [_odds(union, visits(part, union).sum(0), pooled) for part in parts]
    shares = tuple(part.total / total if total else 1 / len(parts) for part in parts)
    shift = _centre(union, odds, shares, float(every_T[1:].sum()) / total) if total else 0.0
    hazards = tuple(tuple(hazards_at(union, one, ease + shift) for one in odds) for ease in EASES)
    accepted_C = np.array([_accepted(union, shares, rows) for rows in hazards])
    return Prior(
        paths=union.paths,
        confidence=_rounded(shares),
        classes=tuple(TextClass(weight=w, hazards=rows) for w, rows in zip(WEIGHTS, hazards, strict=True)),
        lengths=tuple(_by_length(contexts, union, accepted_C)),
    )


def _centre(tree: Topology, odds: Sequence[NDArray[np.float64]], shares: Sequence[float], accepted: float) -> float:
    """The shift of all eases with which the mixture expects so many accepted tokens of a step of the whole tree.

    Accept length is convex in the ease at its low end, so classes around what was counted would promise more of it.
    """

    def promised(shift: float) -> float:
        at = [_accepted(tree, shares, [hazards_at(tree, one, ease + shift) for one in odds]) for ease in EASES]
        return float(np.dot(WEIGHTS, at))

    return _where(promised, accepted)


def _by_length(contexts: Contexts, tree: Topology, accepted_C: NDArray[np.float64]) -> Iterator[LengthWeights]:
    """Weights of the classes in texts of so many tokens and more, up to the next; none where all are of one length.

    Texts of a length are thought to differ from all by an ease of their own, as much as texts do: n texts tell it with
    n / (n + 1) of the truth's variance, and so much of what they say is believed (a normal prior's posterior mean).
    """
    known = contexts.where(contexts.steps_N > 0)
    octave_N = np.searchsorted(LENGTHS, known.steps_N.astype(np.int64) * LENGTH_STEP, side="left") - 1
    octaves = np.unique(octave_N)
    for octave in octaves if len(octaves) > 1 else ():
        visits_FT = visits(known.where(octave_N == octave), tree)
        texts = float(np.minimum(visits_FT[:, 0] / ENOUGH, 1).sum())
        accepted = visits_FT[:, 1:].sum() / visits_FT[:, 0].sum()
        ease = _where(lambda ease: float(_leaning(ease) @ accepted_C), accepted)
        weights = _rounded(_leaning(ease * texts / (texts + 1)).tolist())
        yield LengthWeights(tokens=LENGTHS[octave], weights=weights)


def _leaning(ease: float) -> NDArray[np.float64]:
    """float64[C]: the weights where most eases lie around another one: a normal density is tilted to be shifted."""
    weights_C = np.array(WEIGHTS) * np.exp(np.array(EASES) * ease / SPREAD**2)
    return (1 - LIKE_ANY) * weights_C / weights_C.sum() + LIKE_ANY * np.array(WEIGHTS)


def _where(promised: Callable[[float], float], accepted: float) -> float:
    """The ease, within 3 of 0, at which as much is promised."""
    low, high = -3.0, 3.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if promised(middle) < accepted else (low, middle)
    return (low + high) / 2


def _accepted(tree: Topology, shares: Sequence[float], hazards: Sequence[Sequence[float]]) -> float:
    """Accepted tokens of a step of the whole tree in a class, from its hazards by confidence class."""
    return sum(share * _expected(tree, one) for share, one in zip(shares, hazards, strict=True))


def _expected(tree: Topology, hazards: Sequence[float]) -> float:
    """Accepted tokens of a step, the bonus left out."""
    reach = [1.0]
    for row, hazard in enumerate(hazards, 1):
        reach.append(reach[tree.parents[row]] * hazard)
    return sum(reach[1:])


def _questions(tree: Topology, visits_T: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often each row was asked for, being none of its elder siblings, and how often it was the answer."""
    asked_T = np.zeros(tree.rows)
    for row in range(tree.rows):
        left = visits_T[row]
        for child in tree.children(row):
            asked_T[child] = left
            left -= visits_T[child]
    return asked_T, visits_T


def _by_rank(tree: Topology, visits_T: NDArray[np.float64]) -> NDArray[np.float64]:
    """The log-odds of rows of equal rank taken together, and of equal rank and depth behind them."""
    asked_T, taken_T = _questions(tree, visits_T)
    ranks_T, depths_T = np.array(tree.ranks), np.array(tree.depths)
    found_T = np.full(tree.rows, 0.5)
    for rank in range(tree.width):
        rows = (ranks_T == rank) & (depths_T > 0)
        found_T[rows] = (taken_T[rows].sum() + 1) / (asked_T[rows].sum() + 2)
        for depth in range(1, tree.depth + 1):
            level = rows & (depths_T == depth)
            found_T[level] = _shrunk(taken_T[level].sum(), asked_T[level].sum(), found_T[level])
    return _logit(found_T)


def _odds(tree: Topology, visits_T: NDArray[np.float64], like_T: NDArray[np.float64]) -> NDArray[np.float64]:
    asked_T, taken_T = _questions(tree, visits_T)
    return _logit(_shrunk(taken_T, asked_T, 1 / (1 + np.exp(-like_T))))


def _shrunk(taken: Any, asked: Any, like: Any) -> Any:
    return (taken + SHRINKAGE * like) / (asked + SHRINKAGE)


def _logit(share: NDArray[np.float64]) -> NDArray[np.float64]:
    share = np.clip(share, 1e-4, 1 - 1e-4)
    return np.log(share / (1 - share))


def hazards_at(tree: Topology, odds_T: NDArray[np.float64], ease: float) -> tuple[float, ...]:
    """The probability of each row's rank, its parent given, in a text of an ease; the root left out."""
    yes_T = 1 / (1 + np.exp(-(odds_T + ease)))
    hazard_T = np.zeros(tree.rows)
    for row in range(tree.rows):
        left = 1.0
        for child in tree.children(row):
            hazard_T[child] = left * yes_T[child]
            left -= hazard_T[child]
    return _rounded(hazard_T[1:].tolist())


def _rounded(shares: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(share), 6) for share in shares)
