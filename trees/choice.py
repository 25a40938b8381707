"""The best few of many gears: least mean time per token, under a count and a memory limit.

Every class of contexts takes the fastest of the chosen gears, so what one more gear saves only shrinks as the
set grows (facility location, submodular). That bounds what any completion of a set can save, and a branch and
bound over sets is exact as long as it finishes; if it is stopped, the least bound of what it left is proven.

Shape suffixes: G candidate gears, C classes of contexts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError

# Sets looked at before the search settles for a bound; a second or two.
_MOST_SETS = 50_000


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen gears, ascending and always with the first; their mean seconds per token and its lower bound."""

    gears: tuple[int, ...]
    seconds: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no other set is faster."""
        return self.bound >= self.seconds * (1 - 1e-12)


def choose(
    seconds_GC: NDArray[np.float64],
    shares_C: NDArray[np.float64],
    most: int,
    graphs: Sequence[tuple[int, int]] = (),
    graph_bytes: Sequence[int] = (),
    budget: int | None = None,
    most_sets: int = _MOST_SETS,
) -> Choice:
    """At most `most` gears, the first always among them, with the least ``sum of share * seconds``.

    Args:
        seconds_GC: seconds per token; the first gear serves every class, others may have infinities.
        shares_C: of the tokens; they add up to 1.
        graphs: the graph that each gear runs; gears that share one pay for it once.
        graph_bytes: its memory.
        budget: for the memory of all graphs.
        most_sets: when to stop and settle for a bound.

    Raises:
        TreeError: the limits do not even allow the first gear.
    """
    graphs = graphs or [(0, 0)] * len(seconds_GC)
    sizes = graph_bytes or [0] * len(seconds_GC)
    if most < 1:
        raise TreeError(f"plan: expected a limit of 1 or more gears, plain decoding counted, got {most}")
    if budget is not None and sizes[0] > budget:
        raise TreeError(f"plan: plain decoding alone takes {sizes[0]} bytes of graph memory; the budget is {budget}")
    order = [0, *_undominated(seconds_GC, graphs, sizes, budget)]
    searched = _Search(
        np.minimum(seconds_GC[order], seconds_GC[0]), shares_C, most, [graphs[g] for g in order],
        [sizes[g] for g in order], budget,
    )  # fmt: skip
    chosen, seconds, bound = searched.run(most_sets)
    return Choice(tuple(sorted(order[g] for g in chosen)), seconds, bound)


def _undominated(
    seconds_GC: NDArray[np.float64], graphs: Sequence[tuple[int, int]], sizes: Sequence[int], budget: int | None
) -> list[int]:
    """Gears but the first that no other gear can replace: nowhere slower and no new graph to pay for."""
    kept: list[int] = []
    for gear in sorted(range(1, len(seconds_GC)), key=lambda g: (seconds_GC[g].sum(), g)):
        rivals = (r for r in [0, *kept] if budget is None or graphs[r] == graphs[gear] or not sizes[r])
        if not any((seconds_GC[r] <= seconds_GC[gear]).all() for r in rivals):
            kept.append(gear)
    return kept


class _Search:
    """Depth first over sets, the gear that saves most by itself first."""

    def __init__(
        self,
        seconds_GC: NDArray[np.float64],
        shares_C: NDArray[np.float64],
        most: int,
        graphs: list[tuple[int, int]],
        sizes: list[int],
        budget: int | None,
    ) -> None:
        self.seconds_GC, self.shares_C, self.most = seconds_GC, shares_C, most
        self.graphs, self.sizes, self.budget = graphs, sizes, budget
        savings_G = (seconds_GC[0] - seconds_GC) @ shares_C
        self.order = [0, *(1 + np.argsort(-savings_G[1:], kind="stable")).tolist()]
        # The best that gears from a place of the order on can do for each class.
        backwards = np.minimum.accumulate(seconds_GC[self.order][::-1], axis=0)
        self.rest_GC = backwards[::-1]

    def run(self, most_sets: int) -> tuple[tuple[int, ...], float, float]:
        """The best set found, its seconds, and a lower bound on any set's."""
        start = self.seconds_GC[0]
        best: tuple[int, ...] = (0,)
        seconds = float(start @ self.shares_C)
        stack: list[tuple[float, int, tuple[int, ...], NDArray[np.float64]]] = [
            (self._bound(1, best, start), 1, best, start)
        ]
        for _ in range(most_sets):
            if not stack:
                return best, seconds, seconds
            bound, place, chosen, now_C = stack.pop()
            if bound >= seconds:
                continue
            gear = self.order[place]
            children: list[tuple[int, tuple[int, ...], NDArray[np.float64]]] = [(place + 1, chosen, now_C)]
            if self._affordable((*chosen, gear)):
                better_C = np.minimum(now_C, self.seconds_GC[gear])
                children.append((place + 1, (*chosen, gear), better_C))
                if float(better_C @ self.shares_C) < seconds:
                    best, seconds = (*chosen, gear), float(better_C @ self.shares_C)
            # Taken from the end, so the set with the gear comes before the one without.
            stack += [(self._bound(*child), *child) for child in children]
        return best, seconds, min([seconds, *(bound for bound, *_ in stack)])

    def _bound(self, place: int, chosen: tuple[int, ...], now_C: NDArray[np.float64]) -> float:
        """No completion of `chosen` by gears from `place` on is faster than this."""
        now, left = float(now_C @ self.shares_C), self.most - len(chosen)
        if place == len(self.order) or left == 0:
            return now
        # A full set ends above, so none ever has more than `most` gears.
        saved_G = np.maximum(now_C - self.seconds_GC[self.order[place:]], 0) @ self.shares_C
        most_saved = float(np.sort(saved_G)[::-1][:left].sum())
        return max(now - most_saved, float(np.minimum(now_C, self.rest_GC[place]) @ self.shares_C))

    def _affordable(self, chosen: tuple[int, ...]) -> bool:
        if self.budget is None:
            return True
        return sum({self.graphs[gear]: self.sizes[gear] for gear in chosen}.values()) <= self.budget
