"""The CPU engine whose rows have the same bits in every tree, chain and plain step (``--bitwise``).

Its graph sums by a token's place in the text (`draftwood.kernels.block_attention`, docs/bitwise.md); this module
computes the inputs that describe that order. The quick proof of a first opening asks for equal bits here, on this
machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import BLOCK_SLOTS, past_bitwise, settled_name
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import MASKED, Before, CpuEngine, TextRows
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.sessions import Bindings
from draftwood.runtime.speculation.block_cache import BlockKvCache
from draftwood.runtime.speculation.kv_cache import KvCache

# T new rows, O open slots, Z blocks that their tokens belong to


class BitwiseEngine(CpuEngine):
    """Every row of every tree has the bits of plain decoding.

    Raises:
        BundleError: the bundle was built without ``--bitwise``, or has sizes for which the sums would be cut elsewhere.
    """

    bitwise = True
    graph_name = "bitwise"
    prefill_rows = BLOCK_SLOTS  # more would put a chunk's tokens into more blocks, each a sum of its own

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        _refuse(bundle)
        super().__init__(bundle, opening)
        # What is read of a cache while none of its blocks is settled.
        self._settled = {
            settled_name(rows.name): np.zeros((1, rows.heads, BLOCK_SLOTS, rows.width), np.float32)
            for rows in bundle.manifest.teacher.buffers
        }
        # Of nothing that is settled, and of all else.
        self._nothing = np.array([MASKED]), np.zeros(1, np.float32)

    def new_kv(self, slots: int) -> KvCache:
        return BlockKvCache(self.bundle.manifest.teacher.buffers, slots)

    def _attention(
        self, bind: Bindings, text: str, line: TextRows, before: Before, grouped: bool
    ) -> dict[str, NDArray]:
        kv = line.kv
        assert isinstance(kv, BlockKvCache)
        rows, settled = len(line.depths_T), kv.settled
        seen_TO, home_ZO = self._order_of(kv, line.depths_T, line.mask_TT)
        bias_TO = np.where(seen_TO, np.float32(0), MASKED)
        inputs: dict[str, NDArray] = {
            "positions": kv.length + line.depths_T,
            "index": kv.index(rows),
            "bias": bias_TO,
            "home": np.multiply(home_ZO[:, None], seen_TO, dtype=np.float32)[:, None, None],
            "weight": np.full((1, max(settled, 1)), 2 if settled else 0, np.float32),
            "chain": np.full((1, 1 + len(home_ZO)), 2, np.float32),
            "nothing": self._nothing[settled > 0],
        }
        opened = slice(settled, settled + seen_TO.shape[1] // BLOCK_SLOTS)
        for cache, (read, empty), blocks in zip(self._caches[""], self._settled.items(), kv.buffers, strict=True):
            inputs |= {read: blocks[:settled] if settled else empty, cache: blocks[opened]}
            bind.outputs({f"{cache}.out": blocks[opened]})
        return inputs

    def _order_of(
        self, kv: BlockKvCache, depths_T: NDArray[np.int64], mask_TT: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which open slots each row sees [T, O], and which of the blocks each slot's token belongs to [Z, O]."""
        rows, first = len(depths_T), kv.settled * BLOCK_SLOTS
        of_block = kv.length - first
        open_slots = -(-(of_block + rows) // BLOCK_SLOTS) * BLOCK_SLOTS
        seen_TO = np.zeros((rows, open_slots), np.bool_)
        seen_TO[:, :of_block] = True
        seen_TO[:, of_block : of_block + rows] = np.tri(rows, dtype=np.bool_) if mask_TT is None else mask_TT
        block_O = np.arange(open_slots)
        block_O[of_block : of_block + rows] = of_block + depths_T
        block_O //= BLOCK_SLOTS
        blocks = int(block_O[: of_block + rows].max()) + 1
        return seen_TO, block_O == np.arange(blocks)[:, None]


def _refuse(bundle: Bundle) -> None:
    """Raises BundleError if the graph is missing, or the bundle has sizes that it cannot serve."""
    dims = bundle.manifest.dims
    if all(graph.name != "bitwise" for graph in bundle.manifest.graphs_of("onnx")):
        raise BundleError(
            f"{bundle.folder}: has no graph for --engine bitwise; build it with --bitwise, or take --engine cpu"
        )
    width = max(rows.width for rows in bundle.manifest.teacher.buffers)
    longest = max(gear.slots for gear in bundle.manifest.gears)
    if wrong := past_bitwise(longest, dims.branch_rows + dims.path_rows, width):
        raise BundleError(f"{bundle.folder}: bitwise: {wrong}; build it with less, or take --engine cpu")
