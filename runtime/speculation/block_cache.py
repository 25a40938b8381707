"""The teacher's cache in blocks of slots, [blocks, K, B, D]: a step reads the settled ones and writes the open ones.

A block is settled once all its slots hold text that lies in place: no later step writes there. So both parts are views
that begin and end between two blocks, and a step is bound to them without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import BLOCK_SLOTS, TokenRows
from draftwood.runtime.speculation.kv_cache import Buffer, KvCache

# K key/value heads, B slots of a block, D head dimension, T rows written, n moved rows


class BlockKvCache(KvCache):
    """`KvCache` whose ``buffers`` are arrays [blocks, K, B, D]."""

    def _shape(self, rows: TokenRows, slots: int) -> tuple[int, ...]:
        return (-(-slots // BLOCK_SLOTS), rows.heads, BLOCK_SLOTS, rows.width)

    @property
    def slots(self) -> int:
        return int(self.buffers[0].shape[0]) * BLOCK_SLOTS

    @property
    def settled(self) -> int:
        """Blocks that no later step writes."""
        return self.length // BLOCK_SLOTS

    def index(self, rows: int) -> NDArray[np.int64]:
        """int64 [T*K, 3]: open block, head and slot of ``rows`` new rows, head after head."""
        heads = self.rows[0].heads  # the graph writes all caches by one index
        slots_T = np.arange(self.length, self.length + rows) - self.settled * BLOCK_SLOTS
        index_TK3 = np.empty((rows, heads, 3), np.int64)
        index_TK3[..., 0] = slots_T[:, None] // BLOCK_SLOTS
        index_TK3[..., 1] = np.arange(heads)
        index_TK3[..., 2] = slots_T[:, None] % BLOCK_SLOTS
        return index_TK3.reshape(-1, 3)

    def text(self, buffer: Buffer, length: int) -> Buffer:
        heads, dim = buffer.shape[1], buffer.shape[3]
        return buffer.swapaxes(0, 1).reshape(heads, -1, dim)[:, :length]

    def _take(self, buffers: Sequence[Buffer], slots: int, length: int) -> None:
        blocks = -(-length // BLOCK_SLOTS)
        self.buffers = self._zeroed(slots)
        for new, old in zip(self.buffers, buffers, strict=True):
            new[:blocks] = old[:blocks]

    def _move(self, from_n: NDArray[np.int64], start: int) -> None:
        to_n = np.arange(start, start + len(from_n))
        (block_n, slot_n), (to_block_n, to_slot_n) = divmod(from_n, BLOCK_SLOTS), divmod(to_n, BLOCK_SLOTS)
        for stack in self._stacks:
            stack[:, to_block_n, :, to_slot_n] = stack[:, block_n, :, slot_n]
