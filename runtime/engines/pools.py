"""Caches of several texts in one piece of memory, so that a graph of several texts reads and writes them as one.

A text takes a place of a pool when it begins, and gives it back with its last reference. Its caches there are views.
Graphs of one text run on them as on any cache, and nothing is copied when a text joins or leaves a launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from threading import Lock

from draftwood.manifest import TokenRows
from draftwood.runtime.speculation.deferred_cache import Branch, DeferredKvCache
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros

# K heads, C slots and D width of a buffer, B places of a pool


class Pool:
    """Caches of ``places`` texts at one KV length: the teacher's [B*C, K, D] in memory, a drafter's [B*K, C, D]."""

    def __init__(
        self, rows: Sequence[TokenRows], drafts: Sequence[TokenRows], places: int, slots: int, zeros: Zeros
    ) -> None:
        self.slots, self.places, self.free = slots, places, set(range(places))
        self._used: set[int] = set()
        self._buffers = [zeros((places * slots, each.heads, each.width)) for each in rows]
        self._drafts = [zeros((places * each.heads, slots, each.width)) for each in drafts]
        sizes = {(each.heads, each.width) for each in (*rows, *drafts)}
        self._nothing = {size: zeros((slots, *size)).swapaxes(0, 1) for size in sizes}

    def window(self, first: int, texts: int) -> list[Buffer]:
        """The caches [K, texts * C, D] of places that follow each other."""
        part = slice(first * self.slots, (first + texts) * self.slots)
        return [buffer[part].swapaxes(0, 1) for buffer in self._buffers]

    def draft_window(self, first: int, texts: int) -> list[Buffer]:
        """The drafter's caches [texts * K, C, D] of places that follow each other."""
        heads = [buffer.shape[0] // self.places for buffer in self._drafts]
        return [buffer[first * each : (first + texts) * each] for buffer, each in zip(self._drafts, heads, strict=True)]

    def take(self) -> Place:
        """The lowest place that is free, its caches zeros."""
        number = min(self.free)
        self.free.remove(number)
        caches, drafts = self.window(number, 1), self.draft_window(number, 1)
        # What a text that failed has left may be no number, which a mask does not hide.
        for cache in (*caches, *drafts) if number in self._used else ():
            cache[:, :] = self._nothing[cache.shape[0], cache.shape[2]]
        self._used.add(number)
        place = Place(self, number, caches, drafts)
        weakref.finalize(place, self.free.add, number).atexit = False
        return place


class Place:
    """A text's place in a pool, while the text has it."""

    def __init__(self, pool: Pool, number: int, caches: list[Buffer], drafts: list[Buffer]) -> None:
        self.pool, self.number, self._left, self.drafts = pool, number, iter(caches), drafts

    def zeros(self, shape: tuple[int, ...]) -> Buffer:
        """The next of its caches; a `DeferredKvCache` asks for them in order."""
        following = next(self._left)
        assert tuple(following.shape) == shape, (following.shape, shape)
        return following


class Pools:
    """All pools of an engine, as many at a KV length as its texts have needed at once."""

    def __init__(self, rows: Sequence[TokenRows], drafts: Sequence[TokenRows], places: int, zeros: Zeros) -> None:
        self._rows, self._drafts, self._places, self._zeros = rows, drafts, places, zeros
        self._pools: dict[int, list[Pool]] = {}
        self._lock = Lock()

    def take(self, slots: int) -> Place:
        """A place of the first pool that has one. Texts begin and grow in threads of their own."""
        with self._lock:
            pools = self._pools.setdefault(slots, [])
            pool = next((pool for pool in pools if pool.free), None)
            if pool is None:
                pool = Pool(self._rows, self._drafts, self._places, slots, self._zeros)
                pools.append(pool)
            return pool.take()


class PooledKv(DeferredKvCache):
    """A text's cache in a place of a pool; growing takes a place of another."""

    def __init__(self, rows: Sequence[TokenRows], slots: int, form: Branch, zeros: Zeros, pools: Pools) -> None:
        self._pools, self.place = pools, pools.take(slots)
        super().__init__(rows, slots, form, zeros)

    def _zeroed(self, slots: int) -> list[Buffer]:
        # A bound method as the base's allocator would be a reference to itself, and a place stay taken until a
        # collection of garbage.
        return [self.place.zeros(self._shape(rows, slots)) for rows in self.rows]

    def grow(self, slots: int) -> None:
        before, self.place = self.place, self._pools.take(slots)  # held until the text is copied
        super().grow(slots)
        del before


class PooledDraft(DraftCache):
    """A drafter's cache in the same place of the pool as the teacher's ``kv``. If that moves, it follows when it is
    next used."""

    def __init__(self, rows: Sequence[TokenRows], width: int, zeros: Zeros, kv: PooledKv) -> None:
        super().__init__(rows, width, zeros)
        self._kv, self._place, self.buffers = kv, kv.place, kv.place.drafts

    def reserve(self, slots: int) -> None:
        place = self._kv.place
        if place is not self._place:
            for new, old in zip(place.drafts, self.buffers, strict=True):
                new[:, : self.length] = old[:, : self.length]
            self._place, self.buffers = place, place.drafts
