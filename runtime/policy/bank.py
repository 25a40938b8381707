"""The promise: ``time <= (1 + extra) * plain decoding's + credit plain steps``, for each text and for all together.

It needs no statistics. Every step gains a token or more, and plain decoding pays for each. So the time that drafting
has saved or lost is known. A step is allowed only if the promise would still hold if it gained one token. (Conservative
bandits, Wu et al., 2016, arXiv 1602.04282, with the baseline's reward known.) For a launch of several texts, plain
decoding means a plain launch of the same texts.
"""

from __future__ import annotations

from dataclasses import dataclass

# For all texts of a bundle together: a share of plain decoding's time, and so many plain steps of one text. One text
# may win the time that another one loses. Three unlucky texts may lose the credit before anything was learned.
EXTRA, CREDIT = 0.02, 16.0
# Of one text, apart from earlier texts' gains: a plain step for so many tokens that it may have, `CREDIT` at most.
TEXT_EXTRA, TOKENS_A_CREDIT = 0.03, 8


@dataclass(slots=True)
class Account:
    """Time ``saved_us`` by drafting, negative if it was lost, in microseconds of the device. ``plain_us`` is the time
    that plain decoding would have taken for the tokens so far."""

    extra: float
    credit: float
    plain_us: float = 0.0
    saved_us: float = 0.0

    def stepped(self, gained: int, step_us: float, plain_us: float) -> None:
        """Enters a step that gained tokens of ``plain_us`` each."""
        self.plain_us += gained * plain_us
        self.saved_us += gained * plain_us - step_us

    def loan_us(self, plain_us: float, texts: int = 1) -> float:
        """Microseconds that a step may take beyond ``plain_us``; the credit is that of ``texts`` texts together."""
        return self.saved_us + self.extra * (self.plain_us + plain_us) + self.credit * plain_us / texts
