"""The gears of a bundle and their trees, the lengths at which they fit, and what a plan knows of them."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gains import Drafted

# The tree of plain decoding: its root alone.
PLAIN = "plain"


class Gears:
    """Immutable; made once for a bundle. ``trees`` are known by name, ``rows`` of a gear's tree by the gear's; the
    ``neural`` gears have a drafter's network."""

    def __init__(
        self,
        gears: Sequence[Gear],
        trees: Sequence[Drafted],
        planning: Planning | None = None,
        times: Sequence[StepTime] = (),
    ) -> None:
        self.gears, self.planning, self.times = tuple(gears), planning, tuple(times)
        self.trees = {tree.name: tree for tree in trees}
        self.rows = {gear.name: self.trees[gear.tree].rows for gear in gears}
        self.neural = {gear.name for gear in gears if gear.neural}

    @classmethod
    def of(cls, bundle: Bundle, times: Sequence[StepTime] = ()) -> Gears:
        """Gears of an opened bundle; ``times`` measured on this machine go before the plan's."""
        manifest, planning = bundle.manifest, bundle.manifest.planning
        looked_up = {gear.tree for gear in manifest.gears if gear.looks_up}
        nodes = {name: frozenset(topology.paths) for name, (topology, _) in bundle.trees.items()}
        trees = [
            Drafted(tree.name, tree.rows, tree.depth, nodes.get(tree.name, frozenset()), tree.name in looked_up)
            for tree in manifest.trees
        ]
        return cls(manifest.gears, trees, planning, times or (planning.times if planning else ()))

    def with_room(self, length: int, slots: int) -> list[Gear]:
        """The gears of a KV length of ``slots`` or more whose rows have room after ``length`` tokens; one slot is
        spare."""
        return [gear for gear in self.gears if slots <= gear.slots and length < gear.slots - self.rows[gear.name]]

    def fitting(self, length: int, slots: int) -> dict[str, Gear]:
        """The gears, by tree, that fit after ``length`` tokens of a text that has grown to a KV length of ``slots``. If
        plain decoding is not one of them, the context is full.

        Plain decoding and drafts are each taken at the least KV length that holds them: a text grows only if it must.
        """
        fits = self.with_room(length, slots)
        least = {drafts: min((g.slots for g in fits if bool(g.draft) == drafts), default=0) for drafts in (False, True)}
        return {gear.tree: gear for gear in fits if gear.slots == least[bool(gear.draft)]}
