"""The gears of a bundle by number: their trees, the lengths at which they fit, and their planned or timed steps."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.gains import Drafted, Gains
from draftwood.runtime.policy.times import TimeTable, time_table

PLAIN = "plain"


# The shape of plain decoding.
NO_DRAFT = -1


class Gears:
    """Immutable; made once for a bundle. By a gear's name, ``rows`` are those of its trees, and ``shape`` the place of
    its trees among ``drafted``, `NO_DRAFT` for plain decoding."""

    def __init__(
        self,
        gears: Sequence[Gear],
        rows: Sequence[int],
        drafted: Sequence[Drafted | None],
        planning: Planning | None = None,
        times: Sequence[StepTime] = (),
    ) -> None:
        names, self.gears = [gear.name for gear in gears], tuple(gears)
        self.rows = dict(zip(names, rows, strict=True))
        self.drafted = tuple(dict.fromkeys(tree for tree in drafted if tree is not None))
        shapes = {tree: shape for shape, tree in enumerate(self.drafted)}
        self.shape = {
            name: NO_DRAFT if tree is None else shapes[tree] for name, tree in zip(names, drafted, strict=True)
        }
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
        return time_table(self.rows, self._steps, texts)

    def gains(self, greedy: bool) -> Gains:
        """Expectations of greedy or of sampled text before the first step."""
        return Gains(self.drafted, self.planning.prior(greedy) if self.planning else None, greedy)

    def fitting(self, length: int, slots: int) -> dict[int, Gear]:
        """The gears that fit after ``length`` tokens of a text that has grown to a KV length of ``slots``, by shape;
        plain decoding is one of them, or the context is full.

        Plain decoding and drafts are each taken at the least KV length that holds them: a text grows where it must.
        """
        # The step's rows go after the text, and one slot is spare.
        fits = [gear for gear in self.gears if slots <= gear.slots and length < gear.slots - self.rows[gear.name]]
        least = {drafts: min((g.slots for g in fits if bool(g.draft) == drafts), default=0) for drafts in (False, True)}
        return {self.shape[gear.name]: gear for gear in fits if gear.slots == least[bool(gear.draft)]}


def _drafted(bundle: Bundle, gear: Gear) -> Drafted | None:
    if gear.draft is None:
        return None
    if gear.tree in bundle.trees:
        return Drafted.of(bundle.trees[gear.tree][0], gear.tree, gear.looks_up)
    tree = next(tree for tree in bundle.manifest.trees if tree.name == gear.tree)
    return Drafted(tree.name, tree.depth)
