"""Turns of conversations as they are counted: every way of a turn beside plain decoding with the same bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.tools.evaluate.bases import base_seconds, bundle_factors, plain_of
from draftwood.tools.evaluate.protocol import median_seconds
from draftwood.tools.evaluate.section import Row
from draftwood.tools.evaluate.spread import Interval, ratio


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one way beside plain decoding with its bundle; seconds are medians of the rounds."""

    key: str
    size: str
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


def turns_of(rows: Sequence[Row]) -> list[Turn]:
    """Every turn and way; a turn that ended with its first token has no step to compare."""
    found = []
    factors = {size: bundle_factors(texts_of(rows, size)) for size in dict.fromkeys(row["at"]["size"] for row in rows)}
    for row in rows:
        size, temperature = row["at"]["size"], row["at"]["temperature"]
        for held in _decoded(row):
            for way, figures in held["ways"].items():
                turn = (row["key"], size, temperature, held["source"], way, held["prompt_tokens"], figures)
                plain = held["ways"][plain_of(way, held["ways"])]
                found.append(Turn(*turn, plain, base_seconds(way, held["ways"], factors[size])))
    return found


def _decoded(row: Row) -> list[dict[str, Any]]:
    return [held for held in row["found"]["turns"] if all(figures["steps"] for figures in held["ways"].values())]


def texts_of(rows: Sequence[Row], size: str) -> list[dict[str, Any]]:
    """The figures of every turn of a size."""
    return [held["ways"] for row in rows if row["at"]["size"] == size for held in _decoded(row)]


def total_speedup(turns: Sequence[Turn]) -> Interval:
    """All tokens taken together: conversations are resampled, for turns of one belong together."""
    by_row: dict[str, list[float]] = {}
    for turn in turns:
        own = by_row.setdefault(turn.key, [0.0, 0.0])
        own[0] += turn.plain_seconds
        own[1] += turn.seconds
    return ratio(*zip(*by_row.values(), strict=True))
