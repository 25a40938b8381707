"""An n-gram model over token ids, the baseline that a trained teacher must leave behind.

Interpolated Kneser-Ney (Chen and Goodman, 1999, section 3.2) with one discount an order: the highest order
counts occurrences, lower ones count distinct left neighbours, and the unigram is mixed with the uniform.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwood.errors import RequestError

# N tokens, G distinct n-grams, C distinct contexts

_DISCOUNTS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 1.75, 2.0)


@dataclass(frozen=True, slots=True)
class _Order:
    """Counts of one order; keys are the ids of an n-gram read as a number in base V, ascending."""

    keys_G: np.ndarray
    counts_G: np.ndarray
    contexts_C: np.ndarray
    # Of each context: the sum of its counts, the n-grams it begins, and those of them counted once.
    totals_C: np.ndarray
    kinds_C: np.ndarray
    singles_C: np.ndarray


class NGrams:
    """Counts of all orders up to ``order``, and discounts that may be tuned."""

    def __init__(self, tokens_N: np.ndarray, vocabulary: int, order: int = 4) -> None:
        """Counts ``tokens_N`` (at least ``order`` ids below ``vocabulary``).

        Raises:
            RequestError: an n-gram does not fit a 63-bit number, or there are too few tokens.
        """
        if vocabulary**order >= 2**63 or len(tokens_N) < order:
            raise RequestError(f"{order}-grams over {vocabulary} ids, {len(tokens_N)} tokens: out of range")
        self.vocabulary, self.discounts = vocabulary, [0.8] * order
        keys_G, counts_G = np.unique(_keys(tokens_N, vocabulary, order), return_counts=True)
        self.orders = [_order(keys_G, counts_G, vocabulary)]
        for size in range(order - 1, 0, -1):
            keys_G, counts_G = np.unique(keys_G % vocabulary**size, return_counts=True)
            self.orders.insert(0, _order(keys_G, counts_G, vocabulary))

    def nats(self, tokens_N: np.ndarray) -> float:
        """Mean nats a token, over the tokens that have ``order - 1`` before them."""
        return float(-np.log(self._mix(self._facts(tokens_N))).mean())

    def tune(self, tokens_N: np.ndarray) -> None:
        """Chooses the discounts, one order after the other, twice round, that suit ``tokens_N`` best."""
        facts = self._facts(tokens_N)
        for place in [*range(len(self.orders))] * 2:
            scores = []
            for self.discounts[place] in _DISCOUNTS:
                scores.append(np.log(self._mix(facts)).mean())
            self.discounts[place] = _DISCOUNTS[int(np.argmax(scores))]

    def _facts(self, tokens_N: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """Per order the count, and the context's total, kinds and singles, of every n-gram; 0 if never seen."""
        skip = len(self.orders) - 1
        facts = []
        for size, order in enumerate(self.orders, 1):
            keys_N = _keys(tokens_N, self.vocabulary, size)[skip + 1 - size :]
            count_N = _look_up(order.keys_G, keys_N, order.counts_G)[0]
            of_context = (order.totals_C, order.kinds_C, order.singles_C)
            facts.append((count_N, *_look_up(order.contexts_C, keys_N // self.vocabulary, *of_context)))
        return facts

    def _mix(self, facts: list[tuple[np.ndarray, ...]]) -> np.ndarray:
        """Probabilities float64 [N]: each order leaves what it discounts to the order below it."""
        share_N = np.full(len(facts[0][0]), 1.0 / self.vocabulary)
        for discount, (count_N, total_N, kinds_N, singles_N) in zip(self.discounts, facts, strict=True):
            # A discount is at most 2: a count of 1 gives at most itself, any other gives all of it.
            left_N = min(discount, 1.0) * singles_N + discount * (kinds_N - singles_N)
            scale_N = np.maximum(total_N, 1)
            share_N = np.where(total_N > 0, (np.maximum(count_N - discount, 0) + left_N * share_N) / scale_N, share_N)
        return share_N


def _keys(tokens_N: np.ndarray, vocabulary: int, size: int) -> np.ndarray:
    """The n-grams of ``size`` tokens as numbers, int64 [N - size + 1]."""
    count = len(tokens_N) - size + 1
    keys = np.zeros(count, np.int64)
    for place in range(size):
        keys = keys * vocabulary + tokens_N[place : place + count]
    return keys


def _order(keys_G: np.ndarray, counts_G: np.ndarray, vocabulary: int) -> _Order:
    contexts_C, starts_C, kinds_C = np.unique(keys_G // vocabulary, return_index=True, return_counts=True)
    totals_C = np.add.reduceat(counts_G, starts_C)
    singles_C = np.add.reduceat((counts_G == 1).astype(np.int64), starts_C)
    return _Order(keys_G, counts_G, contexts_C, totals_C, kinds_C, singles_C)


def _look_up(keys: np.ndarray, wanted: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
    """Each of ``values`` at the place of ``wanted`` in the ascending ``keys``; 0 where it is not there."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    there = keys[at] == wanted
    return [np.where(there, value[at], 0) for value in values]
