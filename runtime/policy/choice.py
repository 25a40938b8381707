"""The policy of each text, and the gears of a launch. Plain decoding is a gear, so every policy has a floor."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy.adaptive import Adaptive, Learned, choose
from draftwood.runtime.policy.gears import PLAIN, Gears
from draftwood.runtime.policy.policy import Asking, FixedTree, Policy

ADAPTIVE = "adaptive"


class Policies:
    """Makes a policy for each text of a bundle; the texts share what they learn.

    Args:
        name: ``adaptive`` learns from the texts; ``plain`` does not draft; a gear's name takes its tree, from its KV
            length on.
        times: steps timed on this machine; the plan's if there are none.

    Raises:
        RequestError: neither a policy nor a gear has that name.
    """

    def __init__(self, bundle: Bundle, name: str = ADAPTIVE, times: Sequence[StepTime] = ()) -> None:
        gear = None if name == PLAIN else name
        # All that the texts have shown so far; or the tree of all, which learns nothing.
        self._shared = Learned(Gears.of(bundle, times)) if name == ADAPTIVE else FixedTree(bundle, gear)

    def new(self, greedy: bool, max_new_tokens: int, held: bool = False) -> Policy:
        """The policy of one text of at most so many tokens, greedy or sampled, free or ``held`` to a grammar."""
        if isinstance(self._shared, FixedTree):
            return self._shared
        return Adaptive(self._shared, greedy, max_new_tokens, held)


def widest_gear(bundle: Bundle) -> str:
    """The gear of the most rows, at the least KV length that has it."""
    return max(bundle.rows, key=lambda gear: (bundle.rows[gear], -gear.slots)).name


def gears_for(asking: Sequence[Asking], padded: bool = False) -> list[Gear]:
    """The gear of each text in the launch that all share, at most as many as a launch takes.

    Texts whose policies share their knowledge are chosen for together; another text follows its own policy. ``padded``
    if a launch of several texts pads the rows of each to those of the largest tree.
    """
    shared = dict[Learned, list[tuple[Adaptive, Asking]]]()
    for text in asking:
        if isinstance(text.policy, Adaptive):
            shared.setdefault(text.policy.learned, []).append((text.policy, text))
    chosen = {learned: iter(choose(texts, padded)) for learned, texts in shared.items()}
    return [next(chosen[text.policy.learned]) if isinstance(text.policy, Adaptive) else _alone(text) for text in asking]


def _alone(text: Asking) -> Gear:
    return a_gear(text.policy.choose(text.length, text.late, text.match), text.length)


def a_gear(chosen: object, length: int) -> Gear:
    """The choice of a policy, which may be a user's own; RequestError if it is no gear."""
    if not isinstance(chosen, Gear):
        raise RequestError(f"policy: chose {chosen!r:.80} after {length} tokens; expected a gear of manifest.gears")
    return chosen
