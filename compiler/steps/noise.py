"""The shared noise inside a graph: `draftwood.noise` in int32 and fp32.

The whole numbers have the bits of the host's. Everything made of them is fp32, since a device has no wider numbers that
are fast. So a G is off by some 1e-6, plus the error of the device's logarithm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.noise import BLOCK, LANE, LEAST

# L levels (positions), B blocks, X ids of a block, T rows, n ids, U draft vocabulary

_HALF = 1 << 16
# The bits of a round that count, as a number of 24 bits.
_MIDDLE = 0xFFFF00


def block_noise(numbers: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Two results [2, L, B], float32 and int32. The first half of the one is 64 times the least E of every block of 64
    ids. The second half of the other is the id in the block that has it.

    ``numbers`` int32 [2, rounds, L] are those of the cipher, of the positions (`draftwood.noise.numbers_of`).
    """
    order = torch.arange(blocks, dtype=torch.int32, device=numbers.device)
    high_2B = torch.stack(((order >> 16) + LEAST, (order >> 16) + LANE))
    upper, lower = ciphered(high_2B[:, None], (order & (_HALF - 1)).expand(2, 1, -1), numbers)
    return _exponential(upper, lower), lower & (BLOCK - 1)


def own_noise(numbers: Tensor, ids_Tn: Tensor) -> Tensor:
    """An exponential of each id's own, float32 [T, n], for ids int32 [T, n] and the numbers of every row's position."""
    high_Tn = torch.ops.draftwood.add_scaled(ids_Tn.new_zeros(1, 1), ids_Tn & -_HALF, 1 / _HALF)
    return _exponential(*ciphered(high_Tn, ids_Tn & (_HALF - 1), numbers))


def level_noise(numbers: Tensor, vocabulary: int, ids_U: Tensor | None = None) -> Tensor:
    """G of the whole vocabulary at every position, or of the ids that a drafter can propose: float32 [L, U].

    ``ids`` int64 [U]. `draftwood.runtime.speculation.shared_noise` gives the same to graphs that take it from the host.
    """
    blocks = -(-vocabulary // BLOCK)
    drawn, lanes = block_noise(numbers, blocks)
    least_LB, lane_LB = drawn[0], lanes[1]
    if ids_U is None:
        lanes_X = torch.arange(BLOCK, dtype=torch.int32, device=numbers.device)
        # Two short ones: torchair turns a single long arange into an operator that only the AI CPU has.
        ids_BX = torch.arange(blocks, dtype=torch.int32, device=numbers.device)[:, None] * BLOCK + lanes_X
        own_LBX = own_noise(numbers, ids_BX.view(1, -1)).unflatten(1, (blocks, BLOCK))
        nearest_LBX = torch.where(lane_LB[..., None] == lanes_X, 0.0, own_LBX)
        spent_LBX = torch.ops.draftwood.add_scaled(nearest_LBX, least_LB[..., None], 1 / BLOCK)
        return -torch.log(spent_LBX).flatten(1)[:, :vocabulary]
    ids = ids_U.to(torch.int32)
    own_LU, block_U = own_noise(numbers, ids[None]), ids_U // BLOCK
    least_LU, lane_LU = (table.index_select(1, block_U) for table in (least_LB, lane_LB))
    nearest_LU = torch.where(lane_LU == (ids & (BLOCK - 1)), 0.0, own_LU)
    return -torch.log(torch.ops.draftwood.add_scaled(nearest_LU, least_LU, 1 / BLOCK))


def ciphered(upper: Tensor, lower: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`draftwood.noise.rounds` in operators of an NPU: a shift to the right scales the masked number."""
    each = numbers.flatten(0, 1)[..., None].unbind(0)
    for total, rest in zip(each[: len(each) // 2], each[len(each) // 2 :], strict=True):
        mixed = torch.ops.draftwood.multiply_add(rest, lower, lower + total) & _MIDDLE
        upper, lower = lower, torch.ops.draftwood.add_scaled(upper, mixed, 2.0**-8) & (_HALF - 1)
    return upper, lower


def _exponential(upper: Tensor, lower: Tensor) -> Tensor:
    """-log(1 - u), u in the middle of its step of 2^-32, as log(1 + u / (1 - u)). So it loses no digits near 0. It
    loses none near 1 either, because 1 - u is made of whole numbers and nothing cancels."""
    high, low = upper.to(torch.float32), lower.to(torch.float32) + 0.5
    above = torch.ops.draftwood.add_scaled(high, low, 1 / _HALF)
    # A tensor, since torchair turns a plain number into an operator that no CANN has.
    below = torch.ops.draftwood.add_scaled(high.new_full((), _HALF) - high, low, -1 / _HALF)
    return torch.log1p(above / below)
