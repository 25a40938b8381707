"""The teacher's logits as a request changes them before a draw: biases by token, and penalties for repeating.

Penalties look at the tokens before the place, as they were drawn. A walk through a tree goes only where draws lead, so
the text is the same with every tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.speculation.restriction import Wishes
from draftwood.runtime.speculation.sampling import Logits

# V vocabulary, U different tokens


class Adjustment:
    """The changes to the logits of one text; positions are absolute, and drawn tokens begin after the prompt.

    The order is vLLM's. First the bias is added. Then come the tokens that prompt or answer has: a positive logit is
    divided by ``repetition_penalty``, any other is multiplied by it (Keskar et al., 2019, arXiv 1909.05858). Last, for
    a token that the answer has, ``presence_penalty`` is subtracted once, and ``frequency_penalty`` as often as the
    token came.
    """

    def __init__(self, wishes: Wishes, prompt: Sequence[int]) -> None:
        self._wishes, self._first = wishes, len(prompt)
        self._biased_U = np.array([*wishes.logit_bias], np.int64)
        self._bias_U = np.array([*wishes.logit_bias.values()], np.float32)
        self._prompt_U: NDArray[np.int64] = np.unique(np.asarray(prompt, np.int64))
        self._tokens: list[int] = []

    def of(self, position: int, logits_V: Logits) -> Logits:
        """The logits to draw from at a position; asking for one again takes back the tokens from there on."""
        del self._tokens[position - self._first :]
        changed_V, wishes = logits_V.copy(), self._wishes
        changed_V[self._biased_U] += self._bias_U
        answer_U, count_U = np.unique(np.asarray(self._tokens, np.int64), return_counts=True)
        if wishes.repetition_penalty != 1:
            seen_U = np.union1d(self._prompt_U, answer_U)
            logits_U, penalty = changed_V[seen_U], np.float32(wishes.repetition_penalty)
            changed_V[seen_U] = np.where(logits_U > 0, logits_U / penalty, logits_U * penalty)
        changed_V[answer_U] -= np.float32(wishes.presence_penalty) + np.float32(wishes.frequency_penalty) * count_U
        return changed_V

    def take(self, position: int, token: int) -> None:
        """The text goes on with a token."""
        del self._tokens[position - self._first :]
        self._tokens.append(token)
