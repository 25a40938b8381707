"""What is believed of a bundle's texts before the first of them: how likely the teacher takes each node of a forest.

Where a plan was built, its counts say it. Trees that were given by hand come without any: then the drafter's best
candidate is thought to be the teacher's token with one probability at every level, and the next candidates take their
share of what is left. Drafters grow worse with depth, so this is too hopeful of deep trees; hope is put right by the
first walks, where a doubt would keep them from ever being tried.

Shape suffixes: C text classes of the plan, M nodes of the forest, roots counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from draftwood.planned import Prior, TextClass
from draftwood.runtime.policy.forest import Forest, Levels
from draftwood.runtime.speculation.lookup import GOES_ON

# How likely the best candidate is thought to be taken where nothing was counted, in greedy and in sampled text.
HOPE = {True: 0.7, False: 0.5}
# A later candidate's share of what is left, relative to the first's of all.
LATER = 0.35
# As how many answers a plan's counts stand beside those of a bundle's texts, and as how many a mere hope.
STRENGTH, WEAK_STRENGTH = 300.0, 4.0
# No table says never or always, so that any walk is possible.
LEAST = 2e-3


@dataclass(frozen=True, eq=False)
class Tables:
    """Immutable tables of one sampling class over a forest.

    Args:
        chance_M: probability that a walk goes on to a node, its parent given; of a root the share of steps there.
        strength_M: as how many answers that counts.
        eases: what is added to every log-odds in texts that begin behind so many tokens and more, ascending.
    """

    forest: Forest
    chance_M: NDArray[np.float64]
    strength_M: NDArray[np.float64]
    eases: tuple[tuple[int, float], ...]

    def ease_at(self, length: int) -> float:
        """How much easier a text that begins behind ``length`` tokens is drafted than any text, in log-odds."""
        return next((ease for tokens, ease in reversed(self.eases) if length >= tokens), 0.0)


def tables(forest: Forest, prior: Prior | None, greedy: bool) -> Tables:
    """The tables of a plan's counts, or of hope."""
    shares = prior.confidence if prior else (1 / forest.classes,) * forest.classes
    roots = (*shares, *(1.0 for _ in range(forest.roots - forest.classes)))
    # A plan has counted no tree that is looked up.
    counted_M = np.array(forest.root) < forest.matches if prior else np.zeros(len(forest.root), np.bool_)
    strength_M = np.where(counted_M, STRENGTH, WEAK_STRENGTH)
    if prior is None:
        chance_M = np.array([*roots, *(_hoped(forest, node, HOPE[greedy]) for node in _below(forest))])
        return Tables(forest, _smoothed(forest, chance_M), strength_M, ())
    hazard_CM = np.array(
        [[*roots, *(_counted(forest, prior, one, v) for v in _below(forest))] for one in prior.classes]
    )
    reach_CM = np.exp(np.log(np.maximum(hazard_CM, LEAST)) @ forest.above_MM.T)
    weights_C = np.array([one.weight for one in prior.classes])
    reach_M = weights_C @ reach_CM / weights_C.sum()
    chance_M = reach_M / np.where(np.arange(len(reach_M)) < forest.roots, 1.0, reach_M[forest.parent])
    firsts = [node for node in _below(forest) if len(forest.path[node]) == 1 and forest.root[node] < forest.classes]
    taken_C = reach_CM[:, firsts].sum(1)
    usual = _log_odds(float(taken_C @ weights_C) / weights_C.sum())
    eases = [
        (one.tokens, _log_odds(float(taken_C @ np.array(one.weights)) / sum(one.weights)) - usual)
        for one in prior.lengths
    ]
    return Tables(forest, _smoothed(forest, chance_M), strength_M, tuple(eases))


def _below(forest: Forest) -> range:
    return range(forest.roots, len(forest.path))


def _log_odds(share: float) -> float:
    share = min(max(share, LEAST), 1 - LEAST)
    return log(share / (1 - share))


def _hoped(forest: Forest, node: int, accuracy: float) -> float:
    match = forest.root[node] - forest.matches
    accuracy = accuracy if match < 0 else GOES_ON[match]
    left = 1 - accuracy
    if (
        match < 0 and forest.root[node] >= forest.classes
    ):  # of a budget tree, in which a level is passed by any of its candidates
        levels = forest.shapes[forest.budgets[forest.root[node] - forest.classes]]
        assert isinstance(levels, Levels)
        return 1 - left * (1 - LATER * accuracy) ** (levels.width - 1)
    rank = forest.path[node][-1]
    return accuracy if rank == 0 else left * (1 - LATER * accuracy) ** (rank - 1) * LATER * accuracy


def _counted(forest: Forest, prior: Prior, one: TextClass, node: int) -> float:
    """A text class's hazard of a node; what is hoped by its first candidate's where the plan has not the node."""
    root, path = forest.root[node], forest.path[node]
    if root < min(len(one.hazards), forest.classes) and path in prior.paths:
        return one.hazards[root][prior.paths.index(path)]
    first = one.hazards[0][prior.paths.index((0,))] if (0,) in prior.paths else HOPE[False]
    return _hoped(forest, node, first)


def _smoothed(forest: Forest, chance_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chances that leave `LEAST` for each of a node's children and for none of them."""
    for children in forest.child:
        if children:
            own = list(children.values())
            room = 1 - LEAST * (len(own) + 1)
            chance_M[own] = LEAST + room * chance_M[own] / max(float(chance_M[own].sum()), 1.0)
    return chance_M
