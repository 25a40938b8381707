"""Gears, priors and step times: the planner finds them, a bundle's manifest holds them, and the runtime's policy reads
them.

One set of types from the plan file to the choice of a step; all times are in microseconds. Everything is of one
drafter: the counts of its candidates, by sampling class, and the time of a step of each gear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import log
from typing import Annotated

import msgspec

# No size is beyond 31 bits: products of two of them fit int64.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
# A gear's name for looking its tree up in the text so far, instead of a draft graph's name.
LOOKUP = "lookup"
# A step that takes longer is none.
MOST_STEP_US = 1e9
# No chance is 0 or 1, so that any step is possible; log-odds beyond those of the least are none.
LEAST_SHARE, MOST_EASE = 2e-3, 13.0


class FrozenFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a file of ours: no field is left out unless it has a default, and none is added."""


class Gear(FrozenFields, frozen=True):
    """One static shape to decode with: a tree at a KV length.

    ``graph`` and ``draft`` are set by a build: ``graph`` verifies, ``draft`` drafts, None for plain decoding. If the
    drafting graph has a cache and a KV length, ``-kv{slots}`` stands after the name. `LOOKUP` is no graph: the tree's
    tokens are looked up in the text.
    """

    name: Name
    tree: Name
    slots: Size
    graph: str = ""
    draft: Name | None = None
    # Numbers of texts of a launch that it is planned for.
    texts: tuple[Size, ...] = (1,)

    @property
    def looks_up(self) -> bool:
        """Whether its tree is looked up in the text."""
        return self.draft == LOOKUP

    @property
    def neural(self) -> bool:
        """Whether a drafter's graph drafts for it."""
        return self.draft is not None and not self.looks_up


def named_gears(shapes: Iterable[tuple[str, int]]) -> tuple[Gear, ...]:
    """A gear for each pair of a tree and a KV length, named after them."""
    return tuple(Gear(name=f"{tree}-kv{slots}", tree=tree, slots=slots) for tree, slots in shapes)


class LengthEase(FrozenFields, frozen=True):
    """How much easier texts of one length are to draft than all texts: those that begin after ``tokens`` tokens or
    more, up to the next entry's. The log-odds are added to every level's chance; below 0 such texts are harder."""

    tokens: int
    ease: float


class Prior(FrozenFields, frozen=True):
    """The counts of one sampling class.

    ``reached``, of each tree, is the share of steps that come to each level. ``first`` is that of the drafter's best
    first candidate; trees that were not counted are judged from it. ``lengths`` ascend, and are empty if lengths were
    not counted apart.

    Raises:
        ValueError: shares that are none, or lengths that do not ascend.
    """

    reached: dict[Name, tuple[float, ...]]
    first: float
    lengths: tuple[LengthEase, ...] = ()

    def __post_init__(self) -> None:
        for name, levels in (("first", (self.first,)), *self.reached.items()):
            if list(levels) != sorted(levels, reverse=True) or not all(0 <= share <= 1 for share in levels):
                raise ValueError(f"reached: {levels} of {name}, expected shares from 0 to 1 that never rise")
        tokens = [entry.tokens for entry in self.lengths]
        if tokens != sorted(set(tokens)) or min(tokens, default=0) < 0:
            raise ValueError(f"lengths: expected ascending numbers of tokens, got {tokens}")
        if any(not abs(entry.ease) <= MOST_EASE for entry in self.lengths):
            raise ValueError(f"lengths: expected log-odds from -{MOST_EASE:g} to {MOST_EASE:g}")

    def ease_at(self, length: int) -> float:
        """The ease of a text that begins after ``length`` tokens."""
        return next((entry.ease for entry in reversed(self.lengths) if length >= entry.tokens), 0.0)


class StepTime(FrozenFields, frozen=True):
    """The time of a step of a gear after a text of ``length`` tokens, draft, verify and host together.

    ``late`` are tokens missing in the drafter's caches, beyond those of one step. The time is that of a launch of
    ``texts`` texts, all with this gear.
    """

    gear: str
    length: int
    us: float
    late: int = 0
    texts: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.us <= MOST_STEP_US or min(self.length, self.late, self.texts - 1) < 0:
            raise ValueError(
                f"step time of {self.gear}: expected sizes of 0 or more and a time above 0, at most 1000 s"
            )


class Planning(FrozenFields, frozen=True):
    """A policy's knowledge of the gears. ``sampled`` is None if only greedy text was counted; ``times`` are empty
    without a latency table."""

    greedy: Prior
    sampled: Prior | None
    times: tuple[StepTime, ...]

    def faults(self, depths: Mapping[str, int]) -> Iterator[str]:
        """Shares that are not one a level of their tree, by the trees' depths."""
        for prior in (self.greedy, self.sampled):
            for name, levels in prior.reached.items() if prior else ():
                if len(levels) != depths.get(name, len(levels)):
                    yield f"planning: {len(levels)} shares of tree {name}; expected {depths[name]}, one a level"

    def named(self, names: Mapping[str, str]) -> Planning:
        """The same of trees that are called otherwise."""
        greedy, sampled = (
            prior and msgspec.structs.replace(prior, reached={names[tree]: of for tree, of in prior.reached.items()})
            for prior in (self.greedy, self.sampled)
        )
        assert greedy is not None, "greedy text is always counted"
        return msgspec.structs.replace(self, greedy=greedy, sampled=sampled)

    def prior(self, greedy: bool) -> Prior:
        """The counts of a sampling class, or of the other one if that is all there is."""
        return self.greedy if greedy or self.sampled is None else self.sampled


def log_odds(share: float) -> float:
    """The log-odds of a share, kept away from 0 and 1."""
    share = min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)
    return log(share / (1 - share))
