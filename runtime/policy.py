"""Which gear a step uses. Plain decoding is a gear, so every policy has a floor."""

from __future__ import annotations

from typing import Protocol

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle

PLAIN = "plain"


class Policy(Protocol):
    """Chooses a gear from the committed length; None where the context is full."""

    def choose(self, length: int) -> Gear | None: ...


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

    def choose(self, length: int) -> Gear | None:
        return next((gear for limit, gear in self._fits if length <= limit), None)


def policy_for(bundle: Bundle, gear: str | None = None, plain: bool = False) -> FixedTree:
    """The policy of a request: a gear by name, plain decoding, or the bundle's largest tree."""
    if gear is not None and plain:
        raise RequestError("--gear and --plain exclude each other; give one")
    if gear is not None:
        chosen = bundle.gear(gear)
        return FixedTree(bundle, chosen.tree, chosen.slots)
    if plain:
        return FixedTree(bundle, PLAIN)
    return FixedTree(bundle, max(bundle.manifest.trees, key=lambda tree: tree.rows).name)
