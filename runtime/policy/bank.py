"""The promise that needs no statistics: ``time <= (1 + share) * plain + credit plain steps``, of all texts and of each.

Every step gains a token or more, and plain decoding pays for each: so what drafting has cost so far, against what
its tokens would have cost plainly, is known. A step is allowed only if the promise would still hold though it gained
one token alone. (Conservative bandits, Wu et al., 2016, arXiv 1602.04282, with the baseline's reward known.) What
earlier texts won may be lent to the next, within bounds: no text of `SHORT` tokens or more that is decoded alone falls
below `FLOOR` of plain decoding's speed. Where texts share launches, plain decoding is a plain batch of the same texts.
"""

from __future__ import annotations

# As much may be lost over all, and as much of plain decoding's time on drafts that are expected to lose, to learn
# whether they do.
EXTRA = 0.02
# Plain steps of one text that all together may be behind from the start: what three unlucky texts may lose. A step that
# several share teaches of each, so it may cost each a part.
CREDIT = 16.0
FLOOR = 0.85
SHORT = 32
# What a text may lose in launches that it shares, whatever all texts together have won: a share of a plain batch's
# time, and as a credit one plain step for so many tokens that it may have, `CREDIT` at most.
SHARED_EXTRA = 0.03
TOKENS_A_CREDIT = 8


class Bank:
    """The account of all texts of a bundle, in microseconds of the device."""

    def __init__(self) -> None:
        # What the tokens so far would have cost plainly; and that, less what they did cost.
        self.plain_us = self.saved_us = 0.0
        # What tries have lost.
        self.tried_us = 0.0

    def stepped(self, gained: int, step_us: float, plain_us: float, tried: bool = False) -> None:
        """A text's part of a step, which gained tokens of ``plain_us`` each; ``tried`` if it was expected to lose."""
        self.plain_us += gained * plain_us
        self.saved_us += gained * plain_us - step_us
        if tried:
            self.tried_us += max(step_us - gained * plain_us, 0.0)

    def loan_us(self, plain_us: float, texts: int = 1) -> float:
        """How much longer than ``plain_us`` a step of ``texts`` may take: the promise holds though each gains one
        token."""
        return self.saved_us + EXTRA * (self.plain_us + plain_us) + CREDIT * plain_us / texts

    def may_try(self, lost_us: float) -> bool:
        """Whether a step that is expected to lose so much may be taken, to learn what it is worth."""
        return lost_us + self.tried_us <= EXTRA * self.plain_us


class Account:
    """One text's, of at most ``most_tokens``: of the steps that it takes alone, or of those that it shares."""

    def __init__(self, most_tokens: int, shared: bool) -> None:
        self._short, self._shared = min(SHORT, most_tokens), shared
        self._credit = min(CREDIT, most_tokens / TOKENS_A_CREDIT)
        # Tokens so far, what they would have taken plainly, and what drafts have saved of that.
        self.tokens, self.plain_us, self.saved_us = 0, 0.0, 0.0

    def stepped(self, gained: int, step_us: float, plain_us: float) -> None:
        """A step, which gained tokens of ``plain_us`` each."""
        self.tokens += gained
        self.plain_us += gained * plain_us
        self.saved_us += gained * plain_us - step_us

    def loan_us(self, plain_us: float) -> float:
        """How much longer than ``plain_us`` the next step may take, though the text gains one token."""
        if self._shared:
            return self.saved_us + SHARED_EXTRA * (self.plain_us + plain_us) + self._credit * plain_us
        return self.saved_us + (1 / FLOOR - 1) * max(self.tokens + 1, self._short) * plain_us
