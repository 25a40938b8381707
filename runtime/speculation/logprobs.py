"""Log-probabilities of tokens, from the logits of the row that drew them.

They are the teacher's own, before penalties, temperature and filters, as clients of other servers expect. A row of a
tree and a plain step give the same ones up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# V vocabulary, K likeliest tokens


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one drawn token: its own, and those of the likeliest tokens at its place, the best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits_V: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Natural logarithms, computed in float64; of equal ones the lower id comes first.

    Args:
        logits_V: float32 [V].
        token: the id that was drawn.
        count: how many of the likeliest tokens, from 0 to V.
    """
    logits_V = logits_V.astype(np.float64)
    peak = logits_V.max()
    logprobs_V = logits_V - (peak + np.log(np.exp(logits_V - peak).sum()))
    ids_K: NDArray[np.int64] = np.argsort(-logprobs_V, kind="stable")[:count] if count else np.empty(0, np.int64)
    return TokenLogprobs(float(logprobs_V[token]), tuple((int(likely), float(logprobs_V[likely])) for likely in ids_K))
