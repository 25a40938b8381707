"""The shared noise inside a graph: `draftwood.noise` in int32 and fp32.

The whole numbers have the bits of the host's. What is made of them is fp32, for a device has no wider numbers that are
fast; so a G is off by some 1e-6, and by as much as the device's logarithm is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.noise import BLOCK, LANE, LEAST, ROUNDS, Key, rounds

# L levels (positions), B blocks, X ids of a block, T rows, n ids, U draft vocabulary

# Below it the series of -log(1 - u), above it the logarithm itself: neither loses digits there.
_SMALL = 1 / 16


def block_noise(keys: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Of every block of 64 ids the least E, float32 [L, B], and the id in the block that has it, int32 [L, B].

    ``keys`` int32 [3, rounds, L], those of the positions.
    """
    blocks_B = torch.arange(blocks, dtype=torch.int32, device=keys.device)
    high_B, low_B = blocks_B >> 16, blocks_B & 0xFFFF
    upper, lower = rounds(torch.cat((high_B + LEAST, high_B + LANE)), torch.cat((low_B, low_B)), _key(keys))
    return _exponential(upper[:, :blocks], lower[:, :blocks]) / BLOCK, lower[:, blocks:] & (BLOCK - 1)


def own_noise(keys: Tensor, ids_Tn: Tensor) -> Tensor:
    """An exponential of each id's own, float32 [T, n], for ids int32 [T, n] and the keys of every row's position."""
    return _exponential(*rounds(ids_Tn >> 16, ids_Tn & 0xFFFF, _key(keys)))


def level_noise(keys: Tensor, vocabulary: int, ids_U: Tensor | None = None) -> Tensor:
    """G of the whole vocabulary at every position, or of the ids that a drafter can propose: float32 [L, U].

    ``ids`` int64 [U]. `draftwood.runtime.speculation.shared_noise` gives the same to graphs that take it from the host.
    """
    blocks = -(-vocabulary // BLOCK)
    least_LB, lane_LB = block_noise(keys, blocks)
    if ids_U is None:
        lanes_X = torch.arange(BLOCK, dtype=torch.int32, device=keys.device)
        # Of one arange so long torchair makes an operator that only the AI CPU has.
        ids_BX = torch.arange(blocks, dtype=torch.int32, device=keys.device)[:, None] * BLOCK + lanes_X
        own_LBX = own_noise(keys, ids_BX.view(1, -1)).unflatten(1, (blocks, BLOCK))
        nearest_LBX = torch.where(lane_LB[..., None] == lanes_X, 0.0, own_LBX)
        return -torch.log(nearest_LBX + least_LB[..., None]).flatten(1)[:, :vocabulary]
    found = ids_U.to(torch.int32)
    own_LU, block_U = own_noise(keys, found[None]), ids_U // BLOCK
    least_LU, lane_LU = (table.index_select(1, block_U) for table in (least_LB, lane_LB))
    return -torch.log(torch.where(lane_LU == (found & (BLOCK - 1)), 0.0, own_LU) + least_LU)


def _key(keys: Tensor) -> Key:
    """The rounds' numbers [L, 1], each a tensor of its own."""
    numbers = keys.flatten(0, 1)[..., None].unbind(0)
    return Key(*(numbers[i : i + ROUNDS] for i in range(0, len(numbers), ROUNDS)))  # type: ignore[arg-type]


def _exponential(upper: Tensor, lower: Tensor) -> Tensor:
    """-log(1 - u), u in the middle of its step of 2^-32; 1 - u is made of whole numbers, so nothing cancels."""
    high, low = upper.to(torch.float32), lower.to(torch.float32)
    u, rest = _uniform(high, low), _uniform(-high + float(0xFFFF), -low + float(0xFFFF))
    series = u * (u * (u * (u * (u * (u / 6 + 1 / 5) + 1 / 4) + 1 / 3) + 1 / 2) + 1)
    return torch.where(u < _SMALL, series, -torch.log(rest))


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    return high * 2.0**-16 + (low + 0.5) * 2.0**-32
