"""The teacher's cache in blocks of slots, [blocks, K, B, D]: a step reads the settled ones and writes the open ones.

A block is settled once all its slots hold text that lies in place: no later step writes there. So both parts are views
that begin and end between two blocks, and a step is bound to them without a copy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import BLOCK_SLOTS, Dims
from draftwood.runtime.speculation.kv_cache import Buffer, KvCache, host_zeros

# K key/value heads, B slots of a block, D head dimension, W rows written


def _blocks(shape: tuple[int, ...]) -> Buffer:
    heads, slots, dim = shape
    return host_zeros((-(-slots // BLOCK_SLOTS), heads, BLOCK_SLOTS, dim))


class BlockKvCache(KvCache):
    """`KvCache` whose ``buffers`` are arrays [blocks, K, B, D]."""

    def __init__(self, dims: Dims, slots: int) -> None:
        super().__init__(dims, slots, cache_zeros=_blocks)

    @property
    def slots(self) -> int:
        return int(self.buffers[0].shape[0]) * BLOCK_SLOTS

    @property
    def settled(self) -> int:
        """Blocks that no later step writes: moved rows are written by the next one."""
        return (self.length - len(self.moved)) // BLOCK_SLOTS

    def index(self, rows: int) -> NDArray[np.int64]:
        """int64 [W*K, 3]: open block, head and slot of the moved rows and of ``rows`` new ones, head after head."""
        heads = self.dims.kv_heads
        slots_W = np.arange(self.length - len(self.moved), self.length + rows) - self.settled * BLOCK_SLOTS
        index_WK3 = np.empty((len(slots_W), heads, 3), np.int64)
        index_WK3[..., 0] = slots_W[:, None] // BLOCK_SLOTS
        index_WK3[..., 1] = np.arange(heads)
        index_WK3[..., 2] = slots_W[:, None] % BLOCK_SLOTS
        return index_WK3.reshape(-1, 3)

    def text(self, buffer: Buffer, length: int) -> Buffer:
        heads, dim = buffer.shape[1], buffer.shape[3]
        return buffer.swapaxes(0, 1).reshape(heads, -1, dim)[:, :length]

    def _copied(self, slots: int, length: int) -> list[Buffer]:
        blocks = -(-length // BLOCK_SLOTS)
        found = [_blocks((old.shape[1], slots, old.shape[3])) for old in self.buffers]
        for new, old in zip(found, self.buffers, strict=True):
            new[:blocks] = old[:blocks]
        return found
