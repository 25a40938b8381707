"""Which policy a text gets. Plain decoding is a gear, so every policy has a floor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock

from draftwood.manifest import Gear
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.adaptive import Adaptive, Learned, choose
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.policy import Asking, FixedTree, Policy

ADAPTIVE = "adaptive"


class Policies:
    """Makes a policy for each text of a bundle.

    Args:
        name: ``adaptive`` learns from the texts; ``plain`` does not draft; a gear's name takes its tree, from its KV
            length on.
        times: steps timed on this machine; the plan's if there are none.

    Raises:
        RequestError: neither a policy nor a gear has that name.
    """

    def __init__(self, bundle: Bundle, name: str = ADAPTIVE, times: Sequence[StepTime] = ()) -> None:
        self._bundle, self.name, self._times = bundle, name, times
        self._gear = None if name in (ADAPTIVE, PLAIN) else bundle.gear(name)
        self._lock = Lock()

    @cached_property
    def gears(self) -> Gears:
        """The tables that all texts share."""
        return Gears.of(self._bundle, self._times)

    @cached_property
    def learned(self) -> Learned:
        """All that the texts have shown so far."""
        return Learned(self.gears)

    def new(self, greedy: bool, max_new_tokens: int, held: bool = False) -> Policy:
        """The policy of one text of at most so many tokens, greedy or sampled, free or ``held`` to a grammar."""
        if self._gear is not None:
            return FixedTree(self._bundle, self._gear.tree, self._gear.slots)
        if self.name == PLAIN:
            return FixedTree(self._bundle, PLAIN)
        with self._lock:  # first texts of several threads share one account
            learned = self.learned
        return Adaptive(self.gears, learned, greedy, max_new_tokens, held)


def policy_for(bundle: Bundle, gear: str | None = None) -> Policy:
    """The policy that always takes the tree of a gear, by its name; plain decoding without one."""
    return (
        FixedTree(bundle, PLAIN) if gear is None else FixedTree(bundle, bundle.gear(gear).tree, bundle.gear(gear).slots)
    )


def widest_gear(bundle: Bundle) -> str:
    """The gear of the most rows, at the least KV length that has it."""
    rows = {tree.name: tree.rows for tree in bundle.manifest.trees}
    return max(bundle.manifest.gears, key=lambda gear: (rows[gear.tree], -gear.slots)).name


def gears_for(asking: Sequence[Asking], padded: bool = False) -> list[Gear]:
    """The gear of each text in the launch that all share, at most as many as a launch takes.

    ``padded`` if a launch of several texts pads the rows of each to those of the largest tree.
    """
    if len(asking) > 1 and any(isinstance(text.policy, Adaptive) for text in asking):
        return choose(asking, padded)
    return [text.alone() for text in asking]
