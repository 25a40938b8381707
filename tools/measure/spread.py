"""Distributions of measurements, and intervals of their means (bootstrap, Efron, 1979)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
POINTS = (1, 10, 50, 90, 99)


class Interval(NamedTuple):
    """A figure with the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(values: Sequence[float], points: Sequence[int] = POINTS) -> dict[str, float]:
    """Mean and percentiles; zeros if there is nothing to count."""
    numbers = values or (0.0,)
    percentiles = np.percentile(numbers, points)
    return {"mean": float(np.mean(numbers)), **{f"p{p}": float(v) for p, v in zip(points, percentiles, strict=True)}}


def ratio(above: ArrayLike, below: ArrayLike) -> Interval:
    """sum(above) / sum(below) over units that were drawn, float[N] each; the units are resampled."""
    above_N, below_N = np.asarray(above, float), np.asarray(below, float)
    picked = np.random.default_rng(0).integers(0, len(above_N), (RESAMPLES, len(above_N)))
    ratios = above_N[picked].sum(1) / below_N[picked].sum(1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return Interval(float(above_N.sum() / below_N.sum()), float(low), float(high))
