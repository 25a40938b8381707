"""All texts that are ready for a step: their launches, whatever policies they have."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.runtime.policy.adaptive import Adaptive
from draftwood.runtime.policy.outcome import Asking
from draftwood.runtime.policy.together import Launch, choose


def group(asking: Sequence[Asking], padded: bool = False) -> list[Launch]:
    """The launches of a step, every text in one of them.

    Texts whose policies share what they learn are chosen for together; another one takes what its own policy says.

    Args:
        asking: the texts, at most as many as a launch takes.
        padded: whether a launch of several texts pads the rows of each to those of the largest tree.
    """
    if len(asking) == 1:
        return [Launch((0,), (asking[0].alone(),))]
    adaptive = [one.policy if isinstance(one.policy, Adaptive) else None for one in asking]
    learned = next((one.learned for one in adaptive if one is not None), None)
    if learned is None:
        return [Launch(tuple(range(len(asking))), tuple(one.alone() for one in asking))]
    return choose(asking, [one if one and one.learned is learned else None for one in adaptive], padded)
