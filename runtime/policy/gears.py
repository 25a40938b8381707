"""What a bundle's policies share: its gears by number, their trees laid over each other, and what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.fitting import Fitting
from draftwood.runtime.policy.forest import Forest, Levels, Matched, Shape
from draftwood.runtime.policy.prior import Tables, tables
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
        catches_up: bool = False,
    ) -> None:
        self.gears, self.rows = tuple(gears), tuple(rows)
        self.number = {gear.name: g for g, gear in enumerate(self.gears)}
        distinct = list(dict.fromkeys(shape for shape in shapes if shape is not None))
        self.shape = [-1 if shape is None else distinct.index(shape) for shape in shapes]
        self.forest = Forest(distinct)
        self.fitting = Fitting(self.gears, self.rows)
        self.planning = planning
        self.bounds = planning.bounds if planning else ()
        # Whether the drafter has caches, which fall behind while a text is decoded plainly.
        self.catches_up = catches_up
        self._steps = tuple(times)
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
            catches_up=bool(manifest.drafter and manifest.drafter.layers),
        )

    def times_of(self, texts: int) -> TimeTable:
        """What launches take that so many texts share."""
        return time_table([gear.name for gear in self.gears], self.rows, self._steps, texts)

    @cached_property
    def greedy(self) -> Tables:
        """What is believed of greedy text."""
        return tables(self.forest, self.planning.prior(True) if self.planning else None, True)

    @cached_property
    def sampled(self) -> Tables:
        """What is believed of sampled text."""
        return tables(self.forest, self.planning.prior(False) if self.planning else None, False)

    def root(self, shape: int, confidence: float | None, match: int = 0) -> int:
        """The root that a step of a shape starts from, by the drafter's confidence or the class of the match."""
        place = sum(confidence >= bound for bound in self.bounds) if confidence is not None else 0
        return self.forest.root_of(shape, place, match)


def _shape(bundle: Bundle, gear: Gear) -> Shape | None:
    if gear.draft is None:
        return None
    if gear.looks_up:
        return Matched(bundle.trees[gear.tree][0])
    names = (gear.tree, *gear.class_trees)
    if gear.tree in bundle.trees:
        return tuple(bundle.trees[name][0] for name in names)
    tree = next(tree for tree in bundle.manifest.trees if tree.name == gear.tree)
    return Levels(tree.depth, tree.width)
