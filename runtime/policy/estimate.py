"""What every shape would gain on the next step of a text, from the walks of all texts of a bundle.

Two things are learned. What texts have in common is counted at every node of the forest: how often a walk that came
to its parent was asked for it, and how often it went on there (`Acceptance`, one for greedy and one for sampled
text). How a text differs from that is one number, its *ease*, which is added to the log-odds of every answer and
follows the text's own walks (`Estimate`). A question that a walk did not ask, since its tree has no node there, counts
for nothing: not for a hit and not for a miss. `docs/policy.md` derives it and states its bias.

Shape suffixes: M nodes of the forest, roots counted; S shapes.
"""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.policy.prior import LEAST, Tables

# Counts fade to 1/e in so many walks, of whatever text.
MEMORY = 2000
# Standard deviation of texts' eases, in log-odds, and the share of it that a text keeps from one step to the next.
SPREAD = 0.4
KEPT = 0.99
# Log-odds that move what is expected by 1 % at most.
NEXT_TO_NOTHING = 0.01


class Acceptance:
    """How often the teacher took what was drafted, over all texts that share it."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._hits_M, self._asked_M = np.zeros((2, len(tables.chance_M)))
        self._parent_M = np.array(tables.forest.parent)
        self._roots = np.arange(len(tables.chance_M)) < tables.forest.roots
        self._set(tables.chance_M)

    def eased(self, ease: float) -> NDArray[np.float64]:
        """float64[M]: the chances in a text of an ease; the children of a node share what it adds."""
        odds = exp(ease) - 1
        eased_M = self.chance_M * ((1 + odds) / (1 + odds * self._siblings_M))
        return np.where(self._roots, self.chance_M, np.minimum(eased_M, 1 - LEAST))

    def fade(self, root: int) -> None:
        """A walk begins at a root: what was counted before counts for less."""
        self._hits_M *= 1 - 1 / MEMORY
        self._asked_M *= 1 - 1 / MEMORY
        classes = self.tables.forest.classes
        if root < classes:  # which class it is, is asked of every step
            self._asked_M[:classes] += 1
            self._hits_M[root] += 1

    def count(self, asked: tuple[int, ...], taken: int | None) -> None:
        """A walk came to the parent of some nodes, was asked for them, and went on to one of them or to none."""
        self._asked_M[list(asked)] += 1
        if taken in asked:
            self._hits_M[taken] += 1

    def believe(self) -> None:
        """What was counted is believed."""
        strength_M = self.tables.strength_M
        self._set((strength_M * self.tables.chance_M + self._hits_M) / (strength_M + self._asked_M))

    def _set(self, chance_M: NDArray[np.float64]) -> None:
        taken_M = np.bincount(self._parent_M, np.where(self._roots, 0.0, chance_M), len(chance_M))
        # Of each node: the chance that it or one of its siblings is taken.
        self.chance_M, self._siblings_M = chance_M, np.minimum(taken_M, 1.0)[self._parent_M]


class Estimate:
    """One text's state: its ease, and how little that is known.

    Example of use: ``estimate.begin(length)``, then ``tokens()`` before every step and
    ``walked(shape, root, path, rank=None)`` behind it, or ``idle()``.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance, self._forest = acceptance, acceptance.tables.forest
        self._usual = self._ease = 0.0
        self._variance = SPREAD**2
        # By class of match, what was expected last, of which chances and with which ease: a plain step changes it by
        # next to nothing.
        self._last: dict[int, tuple[NDArray[np.float64], float, list[float]]] = {}

    def begin(self, length: int) -> None:
        """The text begins behind so many tokens."""
        self._usual = self._ease = self.acceptance.tables.ease_at(length)

    def tokens(self, match: int = 0) -> list[float]:
        """Expected accept length of every shape, bonus counted, behind a match of a class in the text."""
        chances, ease, found = self._last.get(match, (None, 0.0, []))
        if chances is self.acceptance.chance_M and abs(ease - self._ease) < NEXT_TO_NOTHING:
            return found
        chance_M = self.acceptance.eased(self._ease)
        reach_M = np.exp(self._forest.above_MM @ np.log(chance_M))
        found = (1 + self._forest.members_KSM[match] @ reach_M).tolist()
        self._last[match] = self.acceptance.chance_M, self._ease, found
        return found

    def idle(self) -> None:
        """A step that shows nothing: the text grows more like any other."""
        self._ease = self._usual + KEPT * (self._ease - self._usual)
        self._variance = SPREAD**2 + KEPT**2 * (self._variance - SPREAD**2)

    def walked(self, shape: int, root: int, path: tuple[int, ...], rank: int | None = None) -> None:
        """A step of a shape from a root went down ``path``.

        ``rank`` is that of the next token where the drafter's list is known; None where it is only known to be no
        child that the shape has.
        """
        self.idle()
        forest, chance_M = self._forest, self.acceptance.eased(self._ease)
        nodes = forest.walk(shape, root, path)
        score, known = 0.0, 1 / self._variance
        self.acceptance.fade(root)
        for node, after in zip(nodes, [*nodes[1:], None], strict=True):
            # Where the drafter's list is known, every child was asked for; else those of the walk's own tree. To count
            # others when they happen to be answered, by a hit elsewhere, would make them look rarer than they are.
            every = forest.child[node]
            asked = forest.own_children[shape][node] if rank is None else tuple(every.values())
            taken = every.get(rank) if after is None and rank is not None else after
            if asked:
                self.acceptance.count(asked, taken)
                chance = float(chance_M[list(asked)].sum())
                score += (taken in asked) - chance
                known += chance * (1 - chance)
        # One step of Newton's method towards the ease that makes the walk likely, within what was known of it.
        self._variance = 1 / known
        self._ease += self._variance * score
        self.acceptance.believe()
