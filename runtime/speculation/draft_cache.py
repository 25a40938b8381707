"""A drafter's memory of the committed text: its own caches, and the rows that are still to be written there.

Slot j of a drafter's cache stands for token j + 1 next to the teacher's features of token j. So a token's features wait
here until the next token is known. Nothing of a draft tree is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import InvariantError
from draftwood.manifest import TokenRows
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros, grown

# n waiting rows, F width of features, K heads, C slots and D width of a buffer


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Features of ``count`` rows of the text, the first of a buffer that an engine keeps on its device."""

    buffer: Buffer
    count: int
    read: Callable[[Buffer], NDArray[np.float32]]

    def host(self) -> NDArray[np.float32]:
        """They themselves [count, F], read back."""
        return self.read(self.buffer[: self.count])


class DraftCache:
    """Buffers and bookkeeping, next to the teacher's cache and in step with it.

    ``buffers`` holds the drafter's caches, one [K, C, D] for each of its ``rows``, as long as ``reserve`` made them.
    Medusa has none, since it reads the last token's features alone. ``length`` counts the slots that are written.
    """

    def __init__(self, rows: Sequence[TokenRows], width: int, zeros: Zeros) -> None:
        self._width, self._zeros = width, zeros
        self.buffers = [zeros((each.heads, 0, each.width)) for each in rows]
        self.length = 0
        self._tokens: list[int] = []
        self._features: list[NDArray[np.float32] | DeviceRows] = []
        self._kept: list[Buffer] = []
        self._drafted = (0, 0)

    @property
    def waiting(self) -> int:
        """Tokens whose features are here and not yet in the caches."""
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        """Size of all caches."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def append(self, tokens_n: NDArray[np.int64], features: NDArray[np.float32] | DeviceRows) -> None:
        """Tokens that were committed, and the features of all or the last of them; the arrays become the cache's."""
        self._settle(int(tokens_n[0]))
        count = features.count if isinstance(features, DeviceRows) else len(features)
        tokens_n = tokens_n[len(tokens_n) - count :]
        if not self.buffers:  # Medusa: nothing but the last row is ever asked for
            self._tokens, self._features = [], []
            tokens_n, features = tokens_n[-1:], features if isinstance(features, DeviceRows) else features[-1:]
        elif self._features and isinstance(last := self._features[-1], DeviceRows):  # the next ones overwrite it
            self._features[-1] = last.host()
        self._tokens += tokens_n.tolist()
        self._features.append(features)

    def next_rows(self, rows: int) -> Buffer:
        """The place of an engine's features [rows, F] that it keeps: not that of the waiting ones."""
        if not self._kept:
            self._kept = [self._zeros((rows, self._width)) for _ in range(2)]
        self._kept.reverse()
        return self._kept[0]

    @property
    def on_device(self) -> Buffer | None:
        """The buffer that begins with the features of all waiting rows, if there is one."""
        (only,) = self._features if len(self._features) == 1 else (None,)
        return only.buffer if isinstance(only, DeviceRows) else None

    def after(self, count: int, following: int) -> NDArray[np.int64]:
        """The tokens after the first ``count`` waiting rows, int64 [count]; ``following`` is after the last of all."""
        return np.array([*self._tokens[1 : count + 1], following][:count], np.int64)

    def features(self, count: int) -> NDArray[np.float32]:
        """Features of the first ``count`` waiting rows [count, F], in the host's memory."""
        return self._joined()[:count]

    def drafted(self, root: int) -> None:
        """A draft step has written all waiting rows, the last next to ``root``; they wait until a step confirms it."""
        self._drafted = self.waiting, root

    def _settle(self, root: int) -> None:
        """The token after the last waiting one is known: rows drafted after it stay written."""
        count, assumed = self._drafted
        self._drafted = 0, 0
        if count and self.buffers:
            self.extended(count if root == assumed else count - 1)

    def extended(self, count: int) -> None:
        """The first ``count`` waiting rows are written into the caches."""
        left = [self._joined()[count:]] if count < self.waiting else []
        self._tokens, self._features = self._tokens[count:], list(left)
        self.length += count

    def rollback(self, length: int) -> None:
        """Goes back to a text of ``length`` tokens.

        If the features of its last token are gone into the caches, zeros stand in. The next draft is worse but the text
        is the same, since a draft is only a proposal.
        """
        self._drafted = 0, 0
        features_nF = self._joined() if self._tokens else np.zeros((0, self._width), np.float32)
        keep = length - self.length if self.buffers else min(length, 1)
        if not self.buffers or keep >= min(length, 1):
            self._tokens, self._features = self._tokens[:keep], [features_nF[:keep]]
        else:
            self.length = max(length - 1, 0)
            self._tokens = [0] * min(length, 1)
            self._features = [np.zeros((len(self._tokens), self._width), np.float32)]

    def rewind(self, length: int) -> None:
        """Goes back to a text's first ``length`` tokens, after which the same token follows as before.

        So the last slot, which stands for that token, stays as it is written, and nothing stands in.
        """
        self._drafted = 0, 0
        keep = length - self.length if self.buffers else 0
        if keep > 0:
            features_nF = self._joined()
            self._tokens, self._features = self._tokens[:keep], [features_nF[:keep]]
        else:
            self.length = length if self.buffers else 0
            self._tokens, self._features = [], []

    def copied(self, length: int) -> DraftCache:
        """A separate cache, gone back to the first ``length`` tokens as ``rewind`` does."""
        other = copy(self)
        other._kept = []
        slots = self.buffers[0].shape[1] if self.buffers else 0
        other.buffers = grown(self.buffers, slots, min(length, self.length), self._zeros)
        other.rewind(length)
        return other

    def reserve(self, slots: int) -> None:
        """Makes the caches ``slots`` long if they are shorter; written rows stay."""
        if self.buffers and self.buffers[0].shape[1] < slots:
            self.buffers = grown(self.buffers, slots, self.length, self._zeros)

    def check(self, length: int) -> None:
        """Raises InvariantError unless all of a text of ``length`` tokens is written or waiting."""
        known = self.length + self.waiting
        if self.buffers and known != length:
            raise InvariantError(f"draft cache: {self.length} slots and {self.waiting} waiting rows of {length} tokens")

    def _joined(self) -> NDArray[np.float32]:
        parts = [part.host() if isinstance(part, DeviceRows) else part for part in self._features]
        joined_nF = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._features = [joined_nF]
        return joined_nF
