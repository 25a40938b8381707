"""The best few of many gears: least mean time per token, under a limit on their number.

Every class of contexts takes the fastest chosen gear. So the saving of one more gear shrinks as the set grows (facility
location, submodular). That bounds the saving of any larger set. Branch and bound over sets is exact if it finishes. If
it is stopped, the least bound of the unvisited sets is proven.

Shape suffixes: G candidate gears, C classes of contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError

Cost = Callable[[NDArray[np.float64]], float]

# Sets looked at before the search settles for a bound; a second or two.
_MOST_SETS = 50_000


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen gears, ascending and always with the first; their mean time per token and its lower bound."""

    gears: tuple[int, ...]
    time: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no other set is faster."""
        return self.bound >= self.time * (1 - 1e-12)


def choose(
    times_GC: NDArray[np.float64],
    shares_C: NDArray[np.float64],
    most: int,
    most_sets: int = _MOST_SETS,
    always: int = 1,
    cost: Cost | None = None,
) -> Choice:
    """The first ``always`` gears and at most ``most - 1`` others, with the least cost.

    Args:
        times_GC: per token, in any unit; the first gears serve every class together, others may have infinities.
        shares_C: each class's share of the tokens; the default cost is ``sum of share * time``. With a ``cost``, the
            most that it can fall for a unit of time saved in the class.
        cost: a function of the best time in each class that falls when one of the times falls.
        most_sets: sets to visit before it settles for a bound.

    Raises:
        TreeError: the limit does not allow even the first gear.
    """
    if most < 1:
        raise TreeError(f"plan: expected a limit of 1 or more gears, plain decoding counted, got {most}")
    start_C = times_GC[:always].min(0)
    clipped_GC = np.concatenate([start_C[None], np.minimum(times_GC[always:], start_C)])
    order = [0, *_undominated(clipped_GC)]
    best, time, bound = _Search(clipped_GC[order], shares_C, most, cost or _mean(shares_C)).run(most_sets)
    chosen = (*range(always), *(order[g] - 1 + always for g in best if g))
    return Choice(tuple(sorted(chosen)), time, bound)


def _mean(shares_C: NDArray[np.float64]) -> Cost:
    return lambda times_C: float(times_C @ shares_C)


def _undominated(times_GC: NDArray[np.float64]) -> list[int]:
    """Gears but the first that are faster than every other gear for some class."""
    undominated: list[int] = []
    for gear in sorted(range(1, len(times_GC)), key=lambda g: (times_GC[g].sum(), g)):
        if not any((times_GC[rival] <= times_GC[gear]).all() for rival in [0, *undominated]):
            undominated.append(gear)
    return undominated


class _Search:
    """Depth first over sets, the gear that saves most by itself first."""

    def __init__(self, times_GC: NDArray[np.float64], shares_C: NDArray[np.float64], most: int, cost: Cost) -> None:
        self.times_GC, self.shares_C, self.most, self.cost = times_GC, shares_C, most, cost
        savings_G = (times_GC[0] - times_GC) @ shares_C
        self.order = [0, *(1 + np.argsort(-savings_G[1:], kind="stable")).tolist()]
        # The best that gears from a place of the order on can do for each class.
        backwards = np.minimum.accumulate(times_GC[self.order][::-1], axis=0)
        self.rest_GC = backwards[::-1]

    def run(self, most_sets: int) -> tuple[tuple[int, ...], float, float]:
        """The best set found, its time, and a lower bound on any set's."""
        start = self.times_GC[0]
        best: tuple[int, ...] = (0,)
        time = self.cost(start)
        stack: list[tuple[float, int, tuple[int, ...], NDArray[np.float64]]] = [
            (self._bound(1, best, start), 1, best, start)
        ]
        for _ in range(most_sets):
            if not stack:
                return best, time, time
            bound, place, chosen, now_C = stack.pop()
            if bound >= time:
                continue
            gear = self.order[place]
            better_C = np.minimum(now_C, self.times_GC[gear])
            if (cost := self.cost(better_C)) < time:
                best, time = (*chosen, gear), cost
            children = [(place + 1, chosen, now_C), (place + 1, (*chosen, gear), better_C)]
            # The stack is popped from its end: the set with the gear comes before the one without.
            stack += [(self._bound(*child), *child) for child in children]
        return best, time, min([time, *(bound for bound, *_ in stack)])

    def _bound(self, place: int, chosen: tuple[int, ...], now_C: NDArray[np.float64]) -> float:
        """No completion of `chosen` by gears from `place` on is faster than this."""
        now, left = self.cost(now_C), self.most - len(chosen)
        if place == len(self.order) or left == 0:
            return now
        # A full set ends above, so none ever has more than `most` gears.
        saved_G = np.maximum(now_C - self.times_GC[self.order[place:]], 0) @ self.shares_C
        most_saved = float(np.sort(saved_G)[::-1][:left].sum())
        return max(now - most_saved, self.cost(np.minimum(now_C, self.rest_GC[place])))
