"""Policies that do not learn: one tree, plain decoding, or what the plan's table says."""

from __future__ import annotations

from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.outcome import Expected, Outcome
from draftwood.runtime.policy.prior import Tables
from draftwood.runtime.policy.times import StepTimes


class FixedTree:
    """Always one tree, at the smallest KV length that holds it from ``least_slots`` on.

    Where the tree no longer fits into the largest KV length, plain decoding goes on to the end.
    """

    def __init__(self, bundle: Bundle, tree: str, least_slots: int = 0) -> None:
        gears = sorted(bundle.manifest.gears, key=lambda gear: gear.slots)
        rows = {t.name: t.rows for t in bundle.manifest.trees}
        self._fits = [
            (gear.slots - 1 - rows[gear.tree], gear)
            for name in dict.fromkeys((tree, PLAIN))
            for gear in gears
            if gear.tree == name and gear.slots >= least_slots
        ]

    def choose(self, length: int, late: int = 0) -> Gear | None:
        return next((gear for limit, gear in self._fits if length <= limit), None)

    def observe(self, outcome: Outcome) -> None:
        pass

    def expected(self, gear: Gear, length: int) -> Expected | None:
        return None


class Planned:
    """At each length the gear of the least time per token by the tables alone, those of the text's sampling class."""

    def __init__(self, gears: Gears, tables: Tables) -> None:
        self._gears, self._tables, self._times, self._slots = gears, tables, StepTimes(gears.times), 0

    def choose(self, length: int, late: int = 0) -> Gear | None:
        plain, drafting = self._gears.fitting.at(length, self._slots)
        fits = [gear for gear in (plain, *drafting) if gear >= 0]
        if not fits:
            return None
        tokens = self._tables.tokens_at(length)
        return self._gears.gears[max(fits, key=lambda g: self._gained(g, tokens) / self._times.us(g, length))]

    def observe(self, outcome: Outcome) -> None:
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> Expected:
        g = self._gears.number[gear.name]
        return Expected(self._gained(g, self._tables.tokens_at(length)), self._times.us(g, length))

    def _gained(self, gear: int, tokens: list[float]) -> float:
        shape = self._gears.shape[gear]
        return tokens[shape] if shape >= 0 else 1.0
