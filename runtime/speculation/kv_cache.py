"""The teacher's key/value cache of one text, with explicit branch and commit.

A verify step leaves its T rows after the committed length: the *branch*. ``commit`` keeps the accepted path and drops
the rest. Rows that already lie in place are committed by length alone; the others are moved there. ``rollback`` is a
smaller length. If a graph moves the rows itself, in its next write, see `deferred_cache`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import InvariantError
from draftwood.manifest import TokenRows

# K heads, C slots and D width of a buffer, n moved rows

# A numpy array, or a device's form of one: it needs only slices, reshape and ravel.
Buffer = Any
# Makes a buffer of zeros of a shape in the memory that an engine wants.
Zeros = Callable[[tuple[int, ...]], Buffer]


def host_zeros(shape: tuple[int, ...]) -> Buffer:
    """fp32 zeros in the host's memory."""
    return np.zeros(shape, np.float32)


def token_rows(zeros: Zeros) -> Zeros:
    """Zeros [K, C, D] that lie in memory as [C, K, D], one row a token."""
    return lambda shape: zeros((shape[1], shape[0], shape[2])).swapaxes(0, 1)


def grown(buffers: Sequence[Buffer], slots: int, length: int, zeros: Zeros) -> list[Buffer]:
    """Buffers [K, slots, D] that hold the first ``length`` slots of the given ones; the one copy of growing."""
    larger = [zeros((old.shape[0], slots, old.shape[2])) for old in buffers]
    for new, old in zip(larger, buffers, strict=True):
        new[:, :length] = old[:, :length]
    return larger  # a new list, by which an engine sees that it must bind again


class KvCache:
    """Buffers in the host's memory, and the bookkeeping of committed rows.

    ``buffers`` holds an array [K, C, D] for each of the teacher's; slot C - 1 is spare. Those of one size are parts of
    one array, so that a commit is one copy. After slot C - 1 they have ``tail`` more, which a launch may write and no
    other reads. ``length`` counts committed tokens, ``open_rows`` the rows of the branch.
    """

    # The place among the caches of several texts that lie together, if they do.
    place: Any = None

    def __init__(self, rows: Sequence[TokenRows], slots: int, tail: int = 0) -> None:
        self.rows, self._tail = tuple(rows), tail
        self.length = self.open_rows = 0
        self.buffers = self._zeroed(slots)

    def _zeroed(self, slots: int) -> list[Buffer]:
        """Empty buffers of so many slots and the tail."""
        shapes = [self._shape(rows, slots + self._tail) for rows in self.rows]
        stacks = {shape: host_zeros((count, *shape)) for shape, count in Counter(shapes).items()}
        self._stacks: list[NDArray[np.float32]] = list(stacks.values())
        parts = {shape: iter(stack) for shape, stack in stacks.items()}
        return [next(parts[shape]) for shape in shapes]

    def _shape(self, rows: TokenRows, slots: int) -> tuple[int, ...]:
        """The shape of one buffer."""
        return (rows.heads, slots, rows.width)

    def text(self, buffer: Buffer, length: int) -> Buffer:
        """The first ``length`` slots [K, length, D] of one of the buffers."""
        return buffer[:, :length]

    @property
    def slots(self) -> int:
        """C, the spare slot counted."""
        return int(self.buffers[0].shape[1]) - self._tail

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def placed(self) -> int:
        """Committed tokens that lie in place."""
        return self.length

    def room(self, rows: int) -> bool:
        """True if a step of ``rows`` rows fits after the committed length, before the spare slot."""
        return self.length + rows <= self.slots - 1

    def branched(self, rows: int) -> None:
        """A verify step has run: ``rows`` rows lie open after the length."""
        self.open_rows = rows

    def extended(self, rows: int) -> None:
        """A prefill step has run: its ``rows`` valid rows are contiguous and committed by length."""
        self.open_rows = 0
        self.length += rows

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps the accepted path, row numbers from the root on, of the open branch."""
        if list(rows) != sorted(set(rows)) or not rows or rows[0] != 0 or rows[-1] >= self.open_rows:
            raise InvariantError(f"commit {tuple(rows)}: expected rising rows from 0 below {self.open_rows}")
        in_place = next((i for i, row in enumerate(rows) if i != row), len(rows))
        self._keep(rows, in_place)
        self.length += len(rows)
        self.open_rows = 0

    def _keep(self, rows: Sequence[int], in_place: int) -> None:
        """Puts rows of the branch in place, but the first ``in_place``, which lie there."""
        if in_place < len(rows):
            self._move(self.length + np.array(rows[in_place:]), self.length + in_place)

    def _move(self, from_n: NDArray[np.int64], start: int) -> None:
        """Copies the slots ``from``, ascending, to those from ``start`` on."""
        for stack in self._stacks:
            stack[:, :, start : start + len(from_n)] = stack[:, :, from_n]

    def rollback(self, length: int) -> None:
        """Drops committed tokens from the end, down to ``length``."""
        if not 0 <= length <= self.length:
            raise InvariantError(f"rollback to {length}: expected 0 to {self.length}")
        self.length = length
        self.open_rows = 0

    def grow(self, slots: int) -> None:
        """Moves to a larger KV length; the one copy of committed slots in a cache's life at this length."""
        if slots < self.slots:
            raise InvariantError(f"grow to {slots}: the cache has {self.slots} slots already")
        self._take(self.buffers, slots, self.length)

    def copied(self, length: int, slots: int) -> Self:
        """A separate cache that holds the first ``length`` tokens; they must all lie in place."""
        if not 0 <= length <= min(self.placed, slots - 1):
            raise InvariantError(f"copy of {length} tokens into {slots} slots: {self.placed} lie in place")
        other = copy(self)
        other._take(self.buffers, slots, length)
        other._begin(length)
        return other

    def _take(self, buffers: Sequence[Buffer], slots: int, length: int) -> None:
        """Buffers of so many slots that hold the first ``length`` of the given ones."""
        self.buffers = self._zeroed(slots)
        for new, old in zip(self.buffers, buffers, strict=True):
            new[:, :length] = old[:, :length]

    def _begin(self, length: int) -> None:
        """Takes note of ``length`` tokens that lie in place, after which nothing has been run."""
        self.length, self.open_rows = length, 0

    def check(self) -> None:
        """Raises InvariantError if the bookkeeping contradicts itself; for reference mode and tests."""
        if self.length + self.open_rows > self.slots - 1:
            raise InvariantError(f"cache: {self.length} + {self.open_rows} rows reach the spare slot {self.slots - 1}")
