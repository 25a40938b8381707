"""Which gears can run behind a text of some length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.manifest import Gear


class Fit(NamedTuple):
    """Gears by number: plain decoding, and those that draft, by rows; -1 and none where nothing fits."""

    plain: int
    drafting: tuple[int, ...]


class Fitting:
    """Looked up by committed length and the KV length that the text has grown to, which it never leaves downwards.

    A text grows where it must: plain decoding and drafts are looked for at the smallest KV length that holds them,
    and drafts at that one alone.
    """

    def __init__(self, gears: Sequence[Gear], rows: Sequence[int]) -> None:
        self._slots = [gear.slots for gear in gears]
        self._rows = list(rows)
        # The step's rows go behind the text, and one slot is spare.
        self._limits = [slots - 1 - count for slots, count in zip(self._slots, rows, strict=True)]
        self._edges = sorted(set(self._limits))
        self._found: dict[tuple[int, int], Fit] = {}

    def at(self, length: int, slots: int) -> Fit:
        """What fits behind ``length`` tokens at KV lengths from ``slots`` on."""
        key = (bisect_left(self._edges, length), slots)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._find(length, slots)
        return found

    def room(self, length: int) -> int:
        """Tokens that a text of ``length`` committed ones can still have, at the longest KV length."""
        return max(self._edges, default=length) + 1 - length

    def _find(self, length: int, slots: int) -> Fit:
        fits = [g for g, limit in enumerate(self._limits) if length <= limit and self._slots[g] >= slots]
        plain = min((g for g in fits if self._rows[g] == 1), key=self._slots.__getitem__, default=-1)
        drafts = [g for g in fits if self._rows[g] > 1]
        least = min((self._slots[g] for g in drafts), default=0)
        here = (g for g in drafts if self._slots[g] == least)
        return Fit(plain, tuple(sorted(here, key=self._rows.__getitem__)))
