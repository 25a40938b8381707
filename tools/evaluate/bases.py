"""What a speed-up is over: plain decoding with the same bundle, which may take its own time beside other bundles'.

A text is decoded plainly with every bundle, but not in every round with each. So what a bundle takes beside the others
is counted over all texts, and a text's base is the median of all its plain rounds, each brought to the bundle by that.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

from draftwood.tools.evaluate.protocol import PLAIN, is_plain, median_seconds

# Figures of a text by way.
Ways = Mapping[str, Mapping[str, Any]]


def plain_of(way: str, ways: Ways) -> str:
    """The plain decoding that a way is held against: ``plain DRAFTER`` of its drafter, or ``plain`` where one bundle
    serves all ways; a plain one itself."""
    own = way if is_plain(way) else f"{PLAIN} {way.split(' ')[0]}"
    return own if own in ways else PLAIN


def bundle_factors(texts: Sequence[Ways]) -> dict[str, float]:
    """Seconds of each plain decoding over the geometric mean of all of them, medians over texts."""
    found: dict[str, list[float]] = {}
    for ways in texts:
        own = {name: log(median_seconds(figures)) for name, figures in ways.items() if is_plain(name)}
        middle = statistics.fmean(own.values())
        for name, seconds in own.items():
            found.setdefault(name, []).append(seconds - middle)
    return {name: exp(statistics.median(logarithms)) for name, logarithms in found.items()}


def plain_rounds(ways: Ways, factors: Mapping[str, float]) -> list[float]:
    """Seconds of every plain round of a text, as they would be with a bundle between all of them."""
    own = [(name, seconds) for name in ways if is_plain(name) for seconds in ways[name]["seconds"]]
    return [seconds / factors[name] for name, seconds in own]


def base_seconds(way: str, ways: Ways, factors: Mapping[str, float]) -> float:
    """What plain decoding of the text takes with the way's bundle."""
    return factors[plain_of(way, ways)] * statistics.median(plain_rounds(ways, factors))
