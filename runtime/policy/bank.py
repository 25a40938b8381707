"""The promise that needs no statistics: ``time <= (1 + EXTRA) * plain + credit plain steps``, on every text.

Every step gains a token or more, and plain decoding pays for each: so what drafting has cost so far, against what
its tokens would have cost plainly, is known to the microsecond. A step is allowed only if the promise would still
hold though it gained one token alone. (Conservative bandits, Wu et al., 2016, arXiv 1602.04282, with the baseline's
reward known.)
"""

from __future__ import annotations

EXTRA = 0.03
# Plain steps that a text may be behind from the start, as a share of the tokens that it can have; and its bounds.
# Less leaves a tree that pays after its first misses, more is felt where a text ends early (docs/policy.md).
LENT = 0.04
LEAST_CREDIT, MOST_CREDIT = 1.0, 4.0
# All of it is lent where the tables promise so many times plain decoding's speed, and of less hope the least share.
HOPED = 1.1
LEAST_SHARE = 0.25
# A prompt that the drafter has to read is lent as well where the gears promise to win so many times its price.
WON = 5.0


def credit(tokens: int, hope: float, late: float = 0.0) -> float:
    """The credit of a text of so many tokens, in plain steps.

    What a short text loses must be little of it, and who expects to gain nothing needs to risk nothing.

    Args:
        tokens: as many as the text can have.
        hope: the best gear's expected speed over plain decoding's.
        late: plain steps that the first draft takes more, for the prompt.
    """
    share = min(max((hope - 1) / (HOPED - 1), LEAST_SHARE), 1.0)
    read = late if hope > 1 and tokens * (1 - 1 / hope) >= WON * late else 0.0
    return share * min(max(LENT * tokens, LEAST_CREDIT), MOST_CREDIT) + read


class Bank:
    """The account of one text, in microseconds; ``credit`` in plain steps."""

    def __init__(self, credit: float) -> None:
        self.credit = credit
        # What the tokens so far would have cost plainly; and that, less what they did cost.
        self.plain_us = 0.0
        self.saved_us = 0.0

    def allows(self, step_us: float, plain_us: float) -> bool:
        """Whether a step that takes at most ``step_us`` keeps the promise if it gains one token of ``plain_us``."""
        debt = EXTRA * (self.plain_us + plain_us) + self.credit * plain_us
        return self.saved_us + plain_us - step_us >= -debt

    def decoded(self, plain_us: float) -> None:
        """A plain step: it costs what plain decoding costs."""
        self.plain_us += plain_us

    def drafted(self, gained: int, step_us: float, plain_us: float) -> None:
        """A step of ``step_us`` that gained tokens of ``plain_us`` each."""
        self.plain_us += gained * plain_us
        self.saved_us += gained * plain_us - step_us
