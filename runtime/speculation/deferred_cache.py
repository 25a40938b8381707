"""The teacher's key/value cache of a text whose graphs move accepted rows themselves, as an accelerator wants it.

Rows of a tree that lie in place are committed by length. The others are remembered as *moved* rows of the branch, and
the next step of any kind writes them in its one write. Nothing is ever copied or compacted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from draftwood.errors import InvariantError
from draftwood.manifest import Dims
from draftwood.runtime.speculation.kv_cache import Buffer, KvCache, Zeros, host_zeros

# L layers, K key/value heads, C slots, D head dimension, T branch rows


class DeferredKvCache(KvCache):
    """`KvCache` with a branch that graphs write next to the caches.

    ``length`` counts the pending ``moved`` rows: those are rows of ``branch`` that belong to slots length - len(moved)
    .. length - 1. ``padded`` gives every branch that many rows, as static graphs want it. ``zeros`` allocates if the
    buffers lie elsewhere than in the host's memory, and ``cache_zeros`` does so for caches that lie in another order.
    """

    def __init__(
        self, dims: Dims, slots: int, padded: int = 0, zeros: Zeros = host_zeros, cache_zeros: Zeros | None = None
    ) -> None:
        self.padded, self._zeros, self._branch_zeros = padded, cache_zeros or zeros, zeros
        super().__init__(dims, slots)
        self._begin(0)

    def _zeroed(self, slots: int) -> list[Buffer]:
        return [self._zeros(self._shape(slots)) for _ in range(2 * self.dims.layers)]

    def _begin(self, length: int) -> None:
        super()._begin(length)
        # Two branch buffers: a step reads the last tree's rows from one while it writes its own to the other.
        most = self.padded or self.dims.branch_rows
        self._branches = [self._branch_zeros(self._branch_shape(most)).ravel() for _ in range(2)]
        self.moved: tuple[int, ...] = ()
        self._branch_rows = self._buffer_rows(1)

    def _buffer_rows(self, rows: int) -> int:
        return self.padded or rows

    def _branch_shape(self, rows: int) -> tuple[int, ...]:
        return (self.dims.layers, 2, rows, self.dims.kv_heads, self.dims.head_dim)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(buffer.nbytes for buffer in self._branches)

    @property
    def placed(self) -> int:
        return self.length - len(self.moved)

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
        """A verify step has run: moved rows are in place, ``rows`` rows lie open after the length."""
        super().branched(rows)
        self._branches.reverse()
        self._branch_rows = self._buffer_rows(rows)
        self.moved = ()

    def extended(self, rows: int) -> None:
        super().extended(rows)
        self.moved = ()

    def _keep(self, rows: Sequence[int], in_place: int) -> None:
        self.moved = tuple(rows[in_place:])

    def rollback(self, length: int) -> None:
        before = self.placed
        super().rollback(length)
        self.moved = self.moved[: max(0, length - before)]

    def check(self) -> None:
        super().check()
        if self.moved and (self.moved[-1] >= self._branch_rows or list(self.moved) != sorted(set(self.moved))):
            raise InvariantError(
                f"cache: moved rows {self.moved} are not rising rows of a branch of {self._branch_rows}"
            )
        if len(self.moved) > self.length:
            raise InvariantError(f"cache: {len(self.moved)} moved rows in a text of {self.length}")
