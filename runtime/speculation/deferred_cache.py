"""The teacher's key/value cache of a text whose graphs move accepted rows themselves, as an accelerator wants it.

Rows of a tree that lie in place are committed by length. The others are remembered as *moved* rows of the branch, and
the next step of any kind writes them in its one write. Nothing is ever copied or compacted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from draftwood.errors import InvariantError
from draftwood.manifest import TokenRows
from draftwood.runtime.speculation.kv_cache import Buffer, KvCache, Zeros, host_zeros


class Branch(NamedTuple):
    """The form in which graphs give and take a tree's rows: their ``shape`` by their number, ``most`` of them. Every
    tree takes as many if it is ``padded``."""

    shape: Callable[[int], tuple[int, ...]]
    most: int
    padded: bool = True


class DeferredKvCache(KvCache):
    """`KvCache` with a branch that graphs write next to the caches.

    ``length`` counts the pending ``moved`` rows: those are rows of ``branch`` that belong to slots length - len(moved)
    .. length - 1. ``zeros`` allocates if the buffers lie elsewhere than in the host's memory, and ``cache_zeros`` does
    so for caches that lie in another order.
    """

    def __init__(
        self,
        rows: Sequence[TokenRows],
        slots: int,
        form: Branch,
        zeros: Zeros = host_zeros,
        cache_zeros: Zeros | None = None,
    ) -> None:
        self._form, self._zeros, self._branch_zeros = form, cache_zeros or zeros, zeros
        super().__init__(rows, slots)
        self._begin(0)

    def _zeroed(self, slots: int) -> list[Buffer]:
        return [self._zeros(self._shape(rows, slots)) for rows in self.rows]

    def _begin(self, length: int) -> None:
        super()._begin(length)
        # Two branch buffers: a step reads the last tree's rows from one while it writes its own to the other.
        shape = self._form.shape(self._form.most)
        self._branches = [self._branch_zeros(shape).ravel() for _ in range(2)]
        self.moved: tuple[int, ...] = ()
        self._branch_rows = self._buffer_rows(1)

    def _buffer_rows(self, rows: int) -> int:
        return self._form.most if self._form.padded else rows

    @property
    def bytes(self) -> int:
        return super().bytes + sum(buffer.nbytes for buffer in self._branches)

    @property
    def placed(self) -> int:
        return self.length - len(self.moved)

    @property
    def branch(self) -> Buffer:
        """The last tree's rows, to be read by the next step."""
        return self._view(self._branches[0], self._branch_rows)

    def next_branch(self, rows: int = 0) -> Buffer:
        """Where a step of ``rows`` rows, or a padded one, writes its branch; ``branched`` makes it the current one."""
        return self._view(self._branches[1], self._buffer_rows(rows))

    def _view(self, flat: Buffer, rows: int) -> Buffer:
        shape = self._form.shape(rows)
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
