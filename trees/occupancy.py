"""Occupancy: the share of time that n texts are decoded at once, and the cost of serving them.

``n`` texts are served by launches, each of a graph for b texts. An empty place costs as much as a full one. A launch
takes time t, and each of its texts gains F tokens. If all texts advance equally fast, one token of each takes the sum
of t / F over the launches. So the cheapest set of launches is a covering, and dynamic programming finds it exactly. Two
launches of half the texts are among the candidates.

Shape suffixes: L length classes, B numbers of texts that graphs exist for, C = L x B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError


@dataclass(frozen=True, slots=True)
class Occupancy:
    """``shares`` of the tokens that are decoded at each number of texts; they add up to 1."""

    shares: Mapping[int, float]

    @classmethod
    def even(cls, most: int) -> Occupancy:
        """Every number of texts up to ``most`` equally often: the assumption if nothing is known."""
        return cls(dict.fromkeys(range(1, most + 1), 1 / most))

    @classmethod
    def parse(cls, text: str, most: int) -> Occupancy:
        """Reads ``1,2,8`` (equal shares) or ``1=0.5,8=0.5``; TreeError beyond ``most``, the largest graph timed."""
        try:
            pairs = [part.partition("=") for part in text.split(",")]
            shares = {int(n): float(share) if mark else 1.0 for n, mark, share in pairs}
        except ValueError:
            shares = {}
        total = sum(shares.values())
        fits = len(shares) == text.count(",") + 1 and all(1 <= n <= most and s > 0 for n, s in shares.items())
        if not fits or not math.isfinite(total):
            raise TreeError(
                f"--occupancy {text}: expected different numbers from 1 to {most}, as the latency table has them, with"
                " shares or without, such as 1,2,4 or 1=0.5,8=0.5"
            )
        return cls({n: share / total for n, share in sorted(shares.items())})


@dataclass(frozen=True, slots=True)
class OccupancyCost:
    """The cost of serving an occupancy, of ``shares_L`` of the tokens in each length class, by graphs for ``sizes``."""

    occupancy: Occupancy
    shares_L: NDArray[np.float64]
    sizes: tuple[int, ...]

    def weights_C(self) -> NDArray[np.float64]:
        """The most that a microsecond saved in a launch can save: no covering has more launches of that kind."""
        share = [sum(s / n * math.ceil(n / b) for n, s in self.occupancy.shares.items()) for b in self.sizes]
        return np.outer(self.shares_L, share).ravel()

    def cost(self, us_C: NDArray[np.float64]) -> float:
        """Mean device time per token of all texts; ``us_C`` are t / F of the best launch of each kind."""
        return float(sum(s * self.of(n, us_C) @ self.shares_L for n, s in self.occupancy.shares.items()))

    def of(self, texts: int, us_C: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[L]: device time per token at that number of texts."""
        us_LB = us_C.reshape(len(self.shares_L), len(self.sizes))
        served = [np.zeros(len(us_LB))]
        for n in range(1, texts + 1):
            served.append(np.min([us + served[max(n - b, 0)] for b, us in zip(self.sizes, us_LB.T, strict=True)], 0))
        return served[texts] / texts

    def launches(self, texts: int, us_B: NDArray[np.float64]) -> tuple[int, ...]:
        """The places in ``sizes`` of one length class's launches, the largest first."""
        served: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for n in range(1, texts + 1):
            options = ((i, served[max(n - b, 0)]) for i, b in enumerate(self.sizes))
            served.append(min((float(us_B[i]) + rest, (*places, i)) for i, (rest, places) in options))
        return tuple(sorted(served[texts][1], reverse=True))
