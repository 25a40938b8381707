"""The best few of many gears: least mean time per token, under a limit of their number.

Every class of contexts takes the fastest of the chosen gears, so what one more gear saves only shrinks as the
set grows (facility location, submodular). That bounds what any completion of a set can save, and a branch and
bound over sets is exact as long as it finishes; if it is stopped, the least bound of what it left is proven.

Shape suffixes: G candidate gears, C classes of contexts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError

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
    times_GC: NDArray[np.float64], shares_C: NDArray[np.float64], most: int, most_sets: int = _MOST_SETS
) -> Choice:
    """At most `most` gears, the first always among them, with the least ``sum of share * time``.

    Args:
        times_GC: per token, in any unit; the first gear serves every class, others may have infinities.
        shares_C: of the tokens; they add up to 1.
        most_sets: when to stop and settle for a bound.

    Raises:
        TreeError: the limit does not even allow the first gear.
    """
    if most < 1:
        raise TreeError(f"plan: expected a limit of 1 or more gears, plain decoding counted, got {most}")
    order = [0, *_undominated(times_GC)]
    chosen, time, bound = _Search(np.minimum(times_GC[order], times_GC[0]), shares_C, most).run(most_sets)
    return Choice(tuple(sorted(order[g] for g in chosen)), time, bound)


def _undominated(times_GC: NDArray[np.float64]) -> list[int]:
    """Gears but the first that are faster than every other gear for some class."""
    kept: list[int] = []
    for gear in sorted(range(1, len(times_GC)), key=lambda g: (times_GC[g].sum(), g)):
        if not any((times_GC[rival] <= times_GC[gear]).all() for rival in [0, *kept]):
            kept.append(gear)
    return kept


class _Search:
    """Depth first over sets, the gear that saves most by itself first."""

    def __init__(self, times_GC: NDArray[np.float64], shares_C: NDArray[np.float64], most: int) -> None:
        self.times_GC, self.shares_C, self.most = times_GC, shares_C, most
        savings_G = (times_GC[0] - times_GC) @ shares_C
        self.order = [0, *(1 + np.argsort(-savings_G[1:], kind="stable")).tolist()]
        # The best that gears from a place of the order on can do for each class.
        backwards = np.minimum.accumulate(times_GC[self.order][::-1], axis=0)
        self.rest_GC = backwards[::-1]

    def run(self, most_sets: int) -> tuple[tuple[int, ...], float, float]:
        """The best set found, its time, and a lower bound on any set's."""
        start = self.times_GC[0]
        best: tuple[int, ...] = (0,)
        time = float(start @ self.shares_C)
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
            if float(better_C @ self.shares_C) < time:
                best, time = (*chosen, gear), float(better_C @ self.shares_C)
            children = [(place + 1, chosen, now_C), (place + 1, (*chosen, gear), better_C)]
            # Taken from the end, so the set with the gear comes before the one without.
            stack += [(self._bound(*child), *child) for child in children]
        return best, time, min([time, *(bound for bound, *_ in stack)])

    def _bound(self, place: int, chosen: tuple[int, ...], now_C: NDArray[np.float64]) -> float:
        """No completion of `chosen` by gears from `place` on is faster than this."""
        now, left = float(now_C @ self.shares_C), self.most - len(chosen)
        if place == len(self.order) or left == 0:
            return now
        # A full set ends above, so none ever has more than `most` gears.
        saved_G = np.maximum(now_C - self.times_GC[self.order[place:]], 0) @ self.shares_C
        most_saved = float(np.sort(saved_G)[::-1][:left].sum())
        return max(now - most_saved, float(np.minimum(now_C, self.rest_GC[place]) @ self.shares_C))
