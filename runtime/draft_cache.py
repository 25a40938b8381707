"""What a drafter remembers of the accepted text: its own caches, and the rows that are still to be written there.

Slot j of a drafter's cache stands for token j + 1 beside the teacher's features of token j, so a token's features
wait here until the token after it is known. Nothing of a draft tree is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import InvariantError
from draftwood.manifest import Drafter

# n waiting rows, T tree rows, F features, K key/value heads, C slots, D head dimension


class DraftCache:
    """Buffers and bookkeeping, beside the teacher's cache and in step with it.

    ``sides`` holds the drafter's caches [K, C, D], key then value of every layer, as long as ``reserve`` made them;
    none for Medusa, which reads the last token's features alone. ``length`` counts the slots that are written.
    """

    def __init__(self, drafter: Drafter, zeros: Callable[[tuple[int, ...]], NDArray]) -> None:
        self.drafter, self._zeros = drafter, zeros
        self.sides = [zeros((drafter.kv_heads, 0, drafter.head_dim)) for _ in range(2 * drafter.layers)]
        self.length = 0
        self._tokens: list[int] = []
        self._features: list[NDArray[np.float32]] = []
        self._open: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        self._drafted = (0, 0)

    @property
    def waiting(self) -> int:
        """Tokens whose features are here and not yet in the caches."""
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        """Size of all caches."""
        return sum(side.nbytes for side in self.sides)

    def append(self, tokens: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        """Tokens that a prefill step has committed, and the ``features`` of all or the last of them."""
        self._settle(int(tokens[0]))
        self._open = None
        self._add(tokens[len(tokens) - len(features) :], features.copy())

    def open(self, tokens_T: NDArray[np.int64], features_TF: NDArray[np.float32]) -> None:
        """A verify step's rows, which ``commit`` chooses from; views are taken, not copies."""
        self._open = tokens_T, features_TF

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps the accepted rows of the open step."""
        if self._open is None:
            raise InvariantError("draft cache: a commit without a verify step")
        tokens_T, features_TF = self._open
        self._open = None
        self._settle(int(tokens_T[0]))
        chosen = list(rows)
        self._add(tokens_T[chosen], features_TF[chosen])

    def _add(self, tokens: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        if not self.sides:  # Medusa: nothing but the last row is ever asked for
            self._tokens, self._features = [], []
            tokens, features = tokens[-1:], features[-1:]
        self._tokens += tokens.tolist()
        self._features.append(features)

    def rows(self, count: int, following: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The first ``count`` waiting rows: the tokens after them, int64 [count], and their features [count, F].

        ``following`` is the token after the last waiting one.
        """
        features_nF = self._joined()
        after = [*self._tokens[1 : count + 1], following][:count]
        return np.array(after, np.int64), features_nF[:count]

    def drafted(self, root: int) -> None:
        """A draft step has written all waiting rows, the last beside ``root``; they wait until a step confirms it."""
        self._drafted = self.waiting, root

    def _settle(self, root: int) -> None:
        """The token after the last waiting one is known: what was drafted behind it stays written."""
        count, assumed = self._drafted
        self._drafted = 0, 0
        if count and self.sides:
            self.extended(count if root == assumed else count - 1)

    def extended(self, count: int) -> None:
        """The first ``count`` waiting rows are written into the caches."""
        features_nF = self._joined()
        self._tokens, self._features = self._tokens[count:], [features_nF[count:]]
        self.length += count

    def rollback(self, length: int) -> None:
        """Goes back to a text of ``length`` tokens.

        Where the features of its last token are gone into the caches, zeros stand in: the next draft is worse, and
        the text the same, for a draft is only a proposal.
        """
        self._open, self._drafted = None, (0, 0)
        features_nF = self._joined() if self._tokens else np.zeros((0, self.drafter.features), np.float32)
        keep = length - self.length if self.sides else min(length, 1)
        if not self.sides or keep >= min(length, 1):
            self._tokens, self._features = self._tokens[:keep], [features_nF[:keep]]
        else:
            self.length = max(length - 1, 0)
            self._tokens = [0] * min(length, 1)
            self._features = [np.zeros((len(self._tokens), self.drafter.features), np.float32)]

    def reserve(self, slots: int) -> None:
        """Makes the caches ``slots`` long where they are shorter; what is written stays."""
        if not self.sides or self.sides[0].shape[1] >= slots:
            return
        grown = [self._zeros((side.shape[0], slots, side.shape[2])) for side in self.sides]
        for new, old in zip(grown, self.sides, strict=True):
            new[:, : self.length] = old[:, : self.length]
        self.sides = grown  # a new list, by which an engine sees that it must bind again

    def check(self, length: int) -> None:
        """Raises InvariantError unless all of a text of ``length`` tokens is written or waiting."""
        known = self.length + self.waiting
        if self.sides and known != length:
            raise InvariantError(f"draft cache: {self.length} slots and {self.waiting} waiting rows of {length} tokens")

    def _joined(self) -> NDArray[np.float32]:
        if len(self._features) != 1:
            self._features = [np.concatenate(self._features)]
        return self._features[0]
