"""Which policy a text gets. Plain decoding is a gear, so every policy has a floor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from draftwood.errors import RequestError
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.adaptive import Adaptive, Learned
from draftwood.runtime.policy.fixed import FixedTree
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.outcome import Policy

PolicyName = Literal["adaptive", "fixed", "plain"]


class Policies:
    """Makes a policy for each text of a bundle.

    Args:
        name: ``adaptive`` learns from the texts; ``fixed`` takes the tree of ``gear``, from its KV length on; ``plain``
            does not draft.
        times: steps timed on this machine; the plan's where there are none.

    Raises:
        RequestError: a gear without ``fixed``, or the other way round; an unknown gear.
    """

    def __init__(
        self,
        bundle: Bundle,
        name: PolicyName = "adaptive",
        gear: str | None = None,
        times: Sequence[StepTime] = (),
    ) -> None:
        if (gear is not None) != (name == "fixed"):
            raise RequestError("--policy fixed and --gear NAME go together; give both, or neither")
        self._bundle, self.name, self._times = bundle, name, times
        self._gear = bundle.gear(gear) if gear is not None else None

    @cached_property
    def gears(self) -> Gears:
        """The tables that all texts share."""
        return Gears.of(self._bundle, self._times)

    @cached_property
    def learned(self) -> Learned:
        """What the texts have shown so far."""
        return Learned(self.gears)

    def new(self, greedy: bool, max_new_tokens: int) -> Policy:
        """The policy of one text of at most so many tokens, decoded greedily or sampled."""
        if self._gear is not None:
            return FixedTree(self._bundle, self._gear.tree, self._gear.slots)
        if self.name == "plain":
            return FixedTree(self._bundle, PLAIN)
        return Adaptive(self.gears, self.learned, greedy, max_new_tokens)


def policy_for(bundle: Bundle, gear: str | None = None) -> Policy:
    """The policy that always takes the tree of a gear, by its name; plain decoding without one."""
    return (
        FixedTree(bundle, PLAIN) if gear is None else FixedTree(bundle, bundle.gear(gear).tree, bundle.gear(gear).slots)
    )
