"""What a bundle's policies share: its gears by number, what they draft, and what was planned and timed."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.fitting import Fitting
from draftwood.runtime.policy.gains import Drafted, Gains, Levels, Matched, Shape
from draftwood.runtime.policy.times import TimeTable, time_table

PLAIN = "plain"


class Gears:
    """Immutable; made once for a bundle. ``shape[g]`` numbers what gear g drafts, -1 for plain decoding."""

    def __init__(
        self,
        gears: Sequence[Gear],
        rows: Sequence[int],
        shapes: Sequence[Shape | None],
        planning: Planning | None = None,
        times: Sequence[StepTime] = (),
    ) -> None:
        self.gears, self.rows = tuple(gears), tuple(rows)
        self.number = {gear.name: g for g, gear in enumerate(self.gears)}
        every = [
            None if shape is None else Drafted(shape, gear.trees) for shape, gear in zip(shapes, gears, strict=True)
        ]
        self.drafted = tuple(dict.fromkeys(one for one in every if one is not None))
        self.shape = [-1 if one is None else self.drafted.index(one) for one in every]
        self.fitting = Fitting(self.gears, self.rows)
        self.planning, self._steps = planning, tuple(times)
        self.times = self.times_of(1)

    @classmethod
    def of(cls, bundle: Bundle, times: Sequence[StepTime] = ()) -> Gears:
        """Those of an opened bundle; ``times`` measured on this machine go before the plan's."""
        manifest, rows = bundle.manifest, {tree.name: tree.rows for tree in bundle.manifest.trees}
        planning = manifest.planning
        return cls(
            manifest.gears,
            [rows[gear.tree] for gear in manifest.gears],
            [_shape(bundle, gear) for gear in manifest.gears],
            planning,
            times or (planning.times if planning else ()),
        )

    def times_of(self, texts: int) -> TimeTable:
        """What launches take that so many texts share."""
        return time_table([gear.name for gear in self.gears], self.rows, self._steps, texts)

    def gains(self, greedy: bool) -> Gains:
        """What is expected of greedy or of sampled text before the first step."""
        return Gains(self.drafted, self.planning.prior(greedy) if self.planning else None, greedy)

    def looks_up(self, gear: int) -> bool:
        """Whether the gear's tree is looked up in the text."""
        return self.shape[gear] >= 0 and isinstance(self.drafted[self.shape[gear]].shape, Matched)


def _shape(bundle: Bundle, gear: Gear) -> Shape | None:
    if gear.draft is None:
        return None
    if gear.looks_up:
        return Matched(bundle.trees[gear.tree][0])
    if gear.tree in bundle.trees:
        return tuple(bundle.trees[name][0] for name in gear.trees)
    tree = next(tree for tree in bundle.manifest.trees if tree.name == gear.tree)
    return Levels(tree.depth, tree.width)
