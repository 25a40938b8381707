"""The gears of a bundle by number: their trees, the lengths at which they fit, and their planned or timed steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gains import Drafted, Gains
from draftwood.runtime.policy.times import TimeTable, time_table

PLAIN = "plain"


class Fit(NamedTuple):
    """Gears that fit after a text: the one of plain decoding, None if there is none, and those that draft, by rows."""

    plain: int | None
    drafting: list[int]


class Gears:
    """Immutable; made once for a bundle. ``shape[g]`` numbers gear g's trees, -1 for plain decoding."""

    def __init__(
        self,
        gears: Sequence[Gear],
        rows: Sequence[int],
        drafted: Sequence[Drafted | None],
        planning: Planning | None = None,
        times: Sequence[StepTime] = (),
    ) -> None:
        self.gears, self.rows = tuple(gears), tuple(rows)
        self.number = {gear.name: g for g, gear in enumerate(self.gears)}
        self.drafted = tuple(dict.fromkeys(tree for tree in drafted if tree is not None))
        self.shape = [-1 if tree is None else self.drafted.index(tree) for tree in drafted]
        self.planning, self._steps = planning, tuple(times)
        self.times = self.times_of(1)

    @classmethod
    def of(cls, bundle: Bundle, times: Sequence[StepTime] = ()) -> Gears:
        """Gears of an opened bundle; ``times`` measured on this machine go before the plan's."""
        manifest, rows = bundle.manifest, {tree.name: tree.rows for tree in bundle.manifest.trees}
        planning = manifest.planning
        return cls(
            manifest.gears,
            [rows[gear.tree] for gear in manifest.gears],
            [_drafted(bundle, gear) for gear in manifest.gears],
            planning,
            times or (planning.times if planning else ()),
        )

    def times_of(self, texts: int) -> TimeTable:
        """Times of launches that ``texts`` texts share."""
        return time_table([gear.name for gear in self.gears], self.rows, self._steps, texts)

    def gains(self, greedy: bool) -> Gains:
        """Expectations of greedy or of sampled text before the first step."""
        return Gains(self.drafted, self.planning.prior(greedy) if self.planning else None, greedy)

    def drafts(self, gear: int) -> bool:
        """Whether a gear is not plain decoding."""
        return self.shape[gear] >= 0

    def looks_up(self, gear: int) -> bool:
        """Whether the gear's tree is looked up in the text."""
        return self.drafts(gear) and self.drafted[self.shape[gear]].looked_up

    def fitting(self, length: int, slots: int) -> Fit:
        """Gears that fit after ``length`` tokens of a text that has grown to a KV length of ``slots``.

        Plain decoding and drafts are each taken at the least KV length that holds them: a text grows where it must.
        """
        # The step's rows go after the text, and one slot is spare.
        fits = [g for g, gear in enumerate(self.gears) if slots <= gear.slots and length < gear.slots - self.rows[g]]
        fits.sort(key=lambda g: (self.gears[g].slots, self.rows[g]))
        drafting = [g for g in fits if self.drafts(g)]
        least = self.gears[drafting[0]].slots if drafting else 0
        return Fit(
            next((g for g in fits if not self.drafts(g)), None),
            [g for g in drafting if self.gears[g].slots == least],
        )


def _drafted(bundle: Bundle, gear: Gear) -> Drafted | None:
    if gear.draft is None:
        return None
    if gear.tree in bundle.trees:
        return Drafted.of([bundle.trees[name][0] for name in gear.trees], gear.trees, gear.looks_up)
    tree = next(tree for tree in bundle.manifest.trees if tree.name == gear.tree)
    return Drafted(gear.trees, tree.depth)
