"""The gears of a bundle and their trees, the lengths at which they fit, and what a plan knows of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gains import Drafted
from draftwood.runtime.policy.times import GUESS_ROW

# The tree of plain decoding: its root alone.
PLAIN = "plain"


class Gears:
    """Immutable; made once for a bundle. ``trees`` are known by name, ``rows`` of a gear's tree by the gear's; the
    ``neural`` gears have a drafter's network, and the ``timed`` ones times that are no guesses."""

    def __init__(
        self,
        gears: Sequence[Gear],
        trees: Sequence[Drafted],
        planning: Planning | None = None,
        times: Sequence[StepTime] = (),
    ) -> None:
        self.gears, self.planning = tuple(gears), planning
        self.trees = {tree.name: tree for tree in trees}
        self.rows = {gear.name: self.trees[gear.tree].rows for gear in gears}
        self.timed = {time.gear for time in times}
        untimed = (gear for gear in gears if gear.name not in self.timed)
        self.times = (*times, *(guess for gear in untimed for guess in self._guesses(gear, times)))
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

    def _guesses(self, gear: Gear, times: Iterable[StepTime]) -> Iterator[StepTime]:
        """Times of a gear that nobody has timed, such as one that looks up next to a plan's trees: plain decoding's at
        its KV length with a guess for its rows, or those of a larger tree if they are less."""
        rows, slots = self.rows[gear.name], {gear.name: gear.slots for gear in self.gears}
        least: dict[tuple[int, int], float] = {}
        for time in times:
            known = self.rows.get(time.gear, 0)
            if slots.get(time.gear) == gear.slots and not time.late and (known == 1 or known >= rows):
                us = time.us * (1 if known >= rows else 1 + GUESS_ROW * rows * time.texts)
                shape = time.length, time.texts
                least[shape] = min(least.get(shape, us), us)
        for (length, texts), us in least.items():
            yield StepTime(gear=gear.name, length=length, us=us, texts=texts)

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
