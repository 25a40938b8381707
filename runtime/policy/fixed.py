"""The policy that does not learn: one tree, or plain decoding."""

from __future__ import annotations

from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gears import PLAIN
from draftwood.runtime.policy.outcome import Expected, Outcome


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

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        return next((gear for limit, gear in self._fits if length <= limit), None)

    def observe(self, outcome: Outcome) -> None:
        pass

    def expected(self, gear: Gear, length: int) -> Expected | None:
        return None
