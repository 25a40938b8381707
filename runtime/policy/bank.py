"""The promise that needs no statistics: ``time <= (1 + EXTRA) * plain + CREDIT plain steps``, over all texts.

Every step gains a token or more, and plain decoding pays for each: so what drafting has cost so far, against what
its tokens would have cost plainly, is known. A step is allowed only if the promise would still hold though it gained
one token alone. (Conservative bandits, Wu et al., 2016, arXiv 1602.04282, with the baseline's reward known.) What
earlier texts won may be lent to the next, within bounds: no text of `SHORT` tokens or more falls below `FLOOR` of plain
decoding's speed.
"""

from __future__ import annotations

# As much may be lost over all, and as much of plain decoding's time on drafts that are expected to lose, to learn
# whether they do.
EXTRA = 0.02
# Plain steps that all texts together may be behind from the start: what three unlucky texts may lose.
CREDIT = 16.0
FLOOR = 0.85
SHORT = 32


class Bank:
    """The account of all texts of a bundle, in microseconds."""

    def __init__(self) -> None:
        # What the tokens so far would have cost plainly; and that, less what they did cost.
        self.plain_us = self.saved_us = 0.0
        # What tries have lost.
        self.tried_us = 0.0

    def decoded(self, plain_us: float) -> None:
        """A plain step: it costs what plain decoding costs."""
        self.plain_us += plain_us

    def drafted(self, gained: int, step_us: float, plain_us: float, tried: bool) -> None:
        """A step that gained tokens of ``plain_us`` each; ``tried`` if it was expected to lose."""
        self.plain_us += gained * plain_us
        self.saved_us += gained * plain_us - step_us
        if tried:
            self.tried_us += max(step_us - gained * plain_us, 0.0)

    def may_lose(self, lost_us: float, plain_us: float) -> bool:
        """Whether the promise holds though a step that gains one token of ``plain_us`` takes so much longer."""
        return lost_us <= self.saved_us + EXTRA * (self.plain_us + plain_us) + CREDIT * plain_us

    def may_try(self, lost_us: float) -> bool:
        """Whether a step that is expected to lose so much may be taken, to learn what it is worth."""
        return lost_us + self.tried_us <= EXTRA * self.plain_us
