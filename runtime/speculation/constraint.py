"""Draws that a grammar restricts: of the teacher's logits only those of tokens that it allows at a place count.

The restriction comes before temperature, top-k, top-p and min-p. A walk through a tree goes only where draws lead, so
one grammar that follows the draws serves every visited row. A constrained text, too, is the same with and without
speculation. Tokens that a grammar forbids are never drawn, hence never accepted.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.speculation.sampling import Logits, Sampling, draw

# V vocabulary


class Constraint(Protocol):
    """A grammar's place in one text; positions are absolute. Asking for a position again takes back the tokens from
    there on."""

    def allows(self, position: int, token: int) -> bool:
        """Whether a token may stand there."""

    def allowed(self, position: int) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may stand there, at least one."""

    def take(self, position: int, token: int) -> None:
        """The text goes on with a token that is allowed there."""


class Foreseeing(Constraint, Protocol):
    """A constraint that knows forced tokens."""

    def forced(self, position: int) -> int | None:
        """The token that the only way on begins with, as the tokenizer spells it; None if there are several."""


def constrained_draw(logits_V: Logits, sampling: Sampling, position: int, constraint: Constraint) -> int:
    """The token that the teacher draws at a position among those that are allowed, which the constraint takes.

    Raises:
        NumericError: the logits are no numbers.
        RequestError: the constraint cannot go on.
    """
    token = None
    # If no filter keeps tokens out, the winner among all also wins among the allowed ones, if it is one of them. Asking
    # for one is a hundred times cheaper.
    if not sampling.filters:
        token = draw(logits_V, sampling, position)
    if token is None or not constraint.allows(position, token):
        allowed_V = constraint.allowed(position)
        token = draw(np.where(allowed_V, logits_V, np.float32(-np.inf)), sampling, position)
    constraint.take(position, token)
    return token
