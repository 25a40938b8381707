"""Turns of conversations as they are counted: every way of a turn next to plain decoding with the same bundle.

A speed-up is over plain decoding with the same bundle, which may take its own time next to other bundles'. A text is
decoded plainly with every bundle, but not in every round with each. So how much longer a bundle's plain decoding takes
than the others' is a factor, counted over all texts. A text's base is the median of all its plain rounds, each
multiplied by the factor between its bundle and the way's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from draftwood.tools.benchmarks.section import Row
from draftwood.tools.measure.runner import PLAIN, is_plain, median_seconds
from draftwood.tools.measure.spread import Interval, ratio

# Figures of a text by way.
Ways = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """One turn of one way next to plain decoding with its bundle; seconds are medians of the rounds."""

    key: str
    model: str
    temperature: float
    source: str
    way: str
    prompt_tokens: int
    figures: dict[str, Any]
    plain: dict[str, Any]
    plain_seconds: float

    @property
    def seconds(self) -> float:
        return median_seconds(self.figures)

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds

    @property
    def accept_length(self) -> float:
        return (self.figures["tokens"] - 1) / self.figures["steps"]


def turns_of(rows: Sequence[Row]) -> list[ComparedTurn]:
    """Every turn and way; a turn that ended with its first token has no step to compare."""
    compared = []
    models = dict.fromkeys(row["at"]["model"] for row in rows)
    factors = {model: bundle_factors(texts_of(rows, model)) for model in models}
    for row in rows:
        model, temperature = row["at"]["model"], row["at"]["temperature"]
        for decoded in _decoded(row):
            for way, figures in decoded["ways"].items():
                turn = (row["key"], model, temperature, decoded["source"], way, decoded["prompt_tokens"], figures)
                plain = decoded["ways"][plain_of(way, decoded["ways"])]
                compared.append(ComparedTurn(*turn, plain, base_seconds(way, decoded["ways"], factors[model])))
    return compared


def _decoded(row: Row) -> list[dict[str, Any]]:
    return [turn for turn in row["found"]["turns"] if all(figures["steps"] for figures in turn["ways"].values())]


def texts_of(rows: Sequence[Row], model: str) -> list[dict[str, Any]]:
    """The figures of every turn of a model."""
    return [decoded["ways"] for row in rows if row["at"]["model"] == model for decoded in _decoded(row)]


def total_speedup(turns: Sequence[ComparedTurn]) -> Interval:
    """The speed-up over all tokens. Conversations are resampled as a whole, since their turns depend on each other."""
    by_row: dict[str, list[float]] = {}
    for turn in turns:
        seconds = by_row.setdefault(turn.key, [0.0, 0.0])
        seconds[0] += turn.plain_seconds
        seconds[1] += turn.seconds
    return ratio(*zip(*by_row.values(), strict=True))


def plain_of(way: str, ways: Ways) -> str:
    """The plain decoding that a way is compared with: ``plain BUNDLE`` of its bundle, or ``plain`` if one bundle serves
    all ways. A plain way is compared with itself."""
    base = way if is_plain(way) else f"{PLAIN} {way.split(' ')[0]}"
    return base if base in ways else PLAIN


def bundle_factors(texts: Sequence[Ways]) -> dict[str, float]:
    """Seconds of each plain decoding over the geometric mean of all of them, medians over texts."""
    logarithms_of: dict[str, list[float]] = {}
    for ways in texts:
        plain = {name: log(median_seconds(figures)) for name, figures in ways.items() if is_plain(name)}
        middle = statistics.fmean(plain.values())
        for name, seconds in plain.items():
            logarithms_of.setdefault(name, []).append(seconds - middle)
    return {name: exp(statistics.median(logarithms)) for name, logarithms in logarithms_of.items()}


def plain_rounds(ways: Ways, factors: Mapping[str, float]) -> list[float]:
    """Seconds of every plain round of a text, as they would be with a bundle between all of them."""
    rounds = [(name, seconds) for name in ways if is_plain(name) for seconds in ways[name]["seconds"]]
    return [seconds / factors[name] for name, seconds in rounds]


def base_seconds(way: str, ways: Ways, factors: Mapping[str, float]) -> float:
    """Time of plain decoding of the text with the way's bundle."""
    return factors[plain_of(way, ways)] * statistics.median(plain_rounds(ways, factors))
