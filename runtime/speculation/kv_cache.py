"""The teacher's key/value cache of one text, with explicit branch and commit.

A verify step leaves its T rows behind the committed length: the *branch*. ``commit`` keeps the accepted
path and drops the rest. Rows that already lie in place are committed by length alone; the others are
remembered as *moved* rows, and the next step, whatever it is, writes them in its one write. ``rollback``
is a smaller length. Nothing is ever copied or compacted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from math import prod
from typing import Any, Self

import numpy as np

from draftwood.errors import InvariantError
from draftwood.manifest import Dims

# L layers, K key/value heads, C slots, D head dimension, T branch rows

# A numpy array, or what a device has in its place: slices, reshape and ravel are all that is asked of it.
Buffer = Any
# Makes a buffer of zeros of a shape, where an engine wants it.
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
    """Buffers and the bookkeeping of what is committed.

    ``buffers`` holds 2 L arrays [K, C, D], key then value of every layer; slot C - 1 is spare.
    ``length`` counts committed tokens, the pending ``moved`` rows included: those are rows of ``branch``
    that belong to slots length - len(moved) .. length - 1. ``padded`` gives every branch that many rows, as static
    graphs want it; ``zeros`` allocates, where the buffers lie elsewhere than in the host's memory, and
    ``cache_zeros`` the caches, where they lie in another order.
    """

    def __init__(
        self, dims: Dims, slots: int, padded: int = 0, zeros: Zeros = host_zeros, cache_zeros: Zeros | None = None
    ) -> None:
        self.dims, self.padded, self._zeros, self._branch_zeros = dims, padded, cache_zeros or zeros, zeros
        self.buffers = [self._zeros((dims.kv_heads, slots, dims.head_dim)) for _ in range(2 * dims.layers)]
        self._begin(0)

    def _begin(self, length: int) -> None:
        """Takes note of ``length`` tokens that lie in place, behind which nothing has been run."""
        # Two branch buffers: a step reads the last tree's rows from one while it writes its own to the other.
        most = self.padded or self.dims.branch_rows
        self._branches = [self._branch_zeros(self._branch_shape(most)).ravel() for _ in range(2)]
        self.length = length
        self.moved: tuple[int, ...] = ()
        # The row of the branch that belongs to slot length - 1, if it has one.
        self._last: tuple[int, ...] = ()
        self.open_rows = 0
        self._branch_rows = self._buffer_rows(1)

    def text(self, buffer: Buffer, length: int) -> Buffer:
        """The first ``length`` slots [K, length, D] of one of the buffers."""
        return buffer[:, :length]

    def _buffer_rows(self, rows: int) -> int:
        return self.padded or rows

    def _branch_shape(self, rows: int) -> tuple[int, ...]:
        return (self.dims.layers, 2, rows, self.dims.kv_heads, self.dims.head_dim)

    @property
    def slots(self) -> int:
        """C, the spare slot counted."""
        return int(self.buffers[0].shape[1])

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(buffer.nbytes for buffer in (*self.buffers, *self._branches))

    def room(self, rows: int) -> bool:
        """True if a step of ``rows`` rows fits behind the committed length, before the spare slot."""
        return self.length + rows <= self.slots - 1

    @property
    def branch(self) -> Buffer:
        """The last tree's rows [L, 2, rows, K, D], to be read by the next step."""
        return self._view(self._branches[0], self._branch_rows)

    def next_branch(self, rows: int) -> Buffer:
        """Where a step of ``rows`` rows writes its own branch; ``branched`` makes it the current one."""
        return self._view(self._branches[1], self._buffer_rows(rows))

    def _view(self, flat: Buffer, rows: int) -> Buffer:
        shape = self._branch_shape(rows)
        return flat[: prod(shape)].reshape(shape)

    def branched(self, rows: int) -> None:
        """A verify step has run: moved rows are in place, ``rows`` rows lie open behind the length."""
        self._branches.reverse()
        self._branch_rows = self._buffer_rows(rows)
        self.moved = self._last = ()
        self.open_rows = rows

    def extended(self, rows: int) -> None:
        """A prefill step has run: its ``rows`` valid rows are contiguous and committed by length."""
        self.moved = self._last = ()
        self.open_rows = 0
        self.length += rows

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps the accepted path, row numbers from the root on, of the open branch."""
        if list(rows) != sorted(set(rows)) or not rows or rows[0] != 0 or rows[-1] >= self.open_rows:
            raise InvariantError(f"commit {tuple(rows)}: expected rising rows from 0 below {self.open_rows}")
        in_place = next((i for i, row in enumerate(rows) if i != row), len(rows))
        self.moved, self._last = tuple(rows[in_place:]), (rows[-1],)
        self.length += len(rows)
        self.open_rows = 0

    def again(self) -> tuple[int, ...]:
        """The row of ``branch`` of the last token, which lies in place, for a step that writes it once more; nothing of
        an empty text."""
        if self.length and not self._last:
            self._branch_rows, self._last = self._buffer_rows(1), (0,)
            for part, buffer in zip(self.branch.reshape(-1, *self.branch.shape[2:]), self.buffers, strict=True):
                part[0] = buffer[:, self.length - 1]
        return self._last

    def forget_moved(self) -> None:
        """Leaves accepted rows unwritten, in place of the next step's write: the fault that `check` plants."""
        self.moved = self._last = ()

    def rollback(self, length: int) -> None:
        """Drops committed tokens from the end, down to ``length``."""
        if not 0 <= length <= self.length:
            raise InvariantError(f"rollback to {length}: expected 0 to {self.length}")
        settled = self.length - len(self.moved)
        self.moved = self.moved[: max(0, length - settled)]
        self._last = self._last if length == self.length else self.moved[-1:]
        self.length = length
        self.open_rows = 0

    def grow(self, slots: int) -> None:
        """Moves to a larger KV length; the one copy of committed slots in a cache's life at this length."""
        if slots < self.slots:
            raise InvariantError(f"grow to {slots}: the cache has {self.slots} slots already")
        self.buffers = self._copied(slots, self.length)

    def copied(self, length: int, slots: int) -> Self:
        """A cache of its own that holds the first ``length`` tokens, all of which must lie in place."""
        if not 0 <= length <= min(self.length - len(self.moved), slots - 1):
            raise InvariantError(
                f"copy of {length} tokens into {slots} slots: {self.length} tokens, moved {self.moved}"
            )
        other = copy(self)
        other.buffers = self._copied(slots, length)
        other._begin(length)
        return other

    def _copied(self, slots: int, length: int) -> list[Buffer]:
        """The buffers with so many slots, of which the first ``length`` are copied."""
        return grown(self.buffers, slots, length, self._zeros)

    def check(self) -> None:
        """Raises InvariantError if the bookkeeping contradicts itself; for reference mode and tests."""
        if self.length + self.open_rows > self.slots - 1:
            raise InvariantError(f"cache: {self.length} + {self.open_rows} rows reach the spare slot {self.slots - 1}")
        if self.moved and (self.moved[-1] >= self._branch_rows or list(self.moved) != sorted(set(self.moved))):
            raise InvariantError(
                f"cache: moved rows {self.moved} are not rising rows of a branch of {self._branch_rows}"
            )
        if len(self.moved) > self.length:
            raise InvariantError(f"cache: {len(self.moved)} moved rows in a text of {self.length}")
