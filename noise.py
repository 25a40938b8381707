"""The noise that drafter and teacher share: one standard Gumbel number for every seed, absolute position and token id.

The teacher's token at a position is the argmax of ``log p(token) / T + G(seed, position, token)``, which draws from p
(Gumbel, 1954). A drafter that ranks by ``log q(token) / T + G`` with the same G proposes that draw if q is near p
(Daliri et al., 2024, arXiv 2408.07978). The text for a seed is the same with any drafter.

G = -log E, and the E of the tokens at a position are independent standard exponentials. They are made in two levels,
over blocks of 64 ids. The least E of a block is an exponential over 64, at one id of it. Every other E of the block is
that plus its own exponential, because exponentials have no memory. So a block whose least E and best logit cannot win
is never opened. E goes down to 2^-39, which cuts G off at 27. So the distribution of a draw among V tokens is off by V
e^-27.

The numbers come from a cipher of the id under a key of the position: a Feistel network over two halves of 16 bits.
Philox, whose stream numpy promises, makes the key of seed and position on the host. The work for an id is additions,
products, shifts right and masks of non-negative numbers below 2^31. So int32 of any machine gives the same bits, also
with floor division and remainder instead of shift and mask.

Shape suffixes: n ids, V vocabulary, B blocks, L ids of a block, I positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Ids of one block; the sixth power of two, since a lane is six bits of a number.
BLOCK = 64

# Five pass every test that was made of them, four do not.
ROUNDS = 6

# Where the numbers of blocks stand among those of ids, by their upper half: ids are below 2^31.
LEAST, LANE = 0x8000, 0xC000

# Positions whose keys are remembered: those of the texts that are being decoded.
_KEYS = 1024

# Positions whose bounds are made at once, since so few numbers cost less than the calls that make them; and how many
# such groups are remembered, of 0.1 MB each for 50,000 tokens.
_AHEAD, _GROUPS = 16, 64


class Key(NamedTuple):
    """The cipher's numbers by seed and position: three whole numbers a round, int32 [rounds] or [rounds, I, 1].

    The latter are those of I positions at once, for ids [I, n].
    """

    first: NDArray[np.int32]
    second: NDArray[np.int32]
    added: NDArray[np.int32]


@lru_cache(_KEYS)
def key_of(seed: int, position: int) -> Key:
    """The key of an absolute position, the same for the same pair; some 10 us, in any order.

    Args:
        seed: any unsigned 64-bit integer.
        position: index in the whole sequence, 0 or more and below 2^63.
    """
    # Each position has 2^64 counters for itself.
    raw = np.random.Philox(key=seed, counter=position << 64).random_raw(5)
    words = raw.astype("<u8").view("<u2").astype(np.int32)[: 3 * ROUNDS].reshape(3, ROUNDS)
    return Key(-(24576 + words[0] % 8192), -(24576 + words[1] % 8192), (1 << 25) + 256 * words[2])


def keys_of(seed: int, positions: Sequence[int]) -> Key:
    """The keys of I positions side by side."""
    return Key(*(np.stack(parts, 1)[:, :, None] for parts in zip(*(key_of(seed, p) for p in positions), strict=True)))


def numbers_of(seed: int, positions: Sequence[int]) -> NDArray[np.int32]:
    """The keys of I positions as graphs read them, int32 [2, rounds, I].

    A round's ``(y + first) * (y + second) + added`` is ``y * (y + sum) + rest``, which takes an operator fewer. No
    number on the way leaves int32, since the sum is between -2^16 and -49152, and y between 0 and 2^16.
    """
    first, second, added = (part[..., 0] for part in keys_of(seed, positions))
    return np.stack((first + second, added + first * second))


def rounds(upper: Any, lower: Any, key: Key) -> tuple[Any, Any]:
    """The cipher: halves of ids to halves of numbers that are uniform in [0, 2^32), upper and lower.

    Any arrays of 32 or 64 bits with Python's operators will do, numpy's and torch's among them. With y below 2^16 both
    factors are within 2^15 + 2^13 of 0 and differ by less than 2^13. So the product is above -2^24; with the added
    number it is below 2^31 and not negative.
    """
    for first, second, added in zip(*key, strict=True):
        mixed = lower + first
        mixed *= lower + second
        mixed += added
        mixed >>= 8
        mixed += upper
        mixed &= 0xFFFF
        upper, lower = lower, mixed
    return upper, lower


def gumbels(ids: NDArray[np.int32], key: Key) -> NDArray[np.float64]:
    """G of some ids, float64 as ``ids``: standard Gumbel, between -4 and 27."""
    blocks = ids >> 6
    drawn, least, lane = _numbers(ids, blocks, key)
    return -np.log(np.where(lane == (ids & (BLOCK - 1)), 0.0, drawn) + least)


class RepeatedIds(NamedTuple):
    """Ids whose G is asked for at many positions: int32 [n], their blocks, and the place of each id's among these."""

    ids: NDArray[np.int32]
    blocks: NDArray[np.int32]
    places: NDArray[np.intp]

    @classmethod
    def of(cls, ids: NDArray[np.integer[Any]]) -> RepeatedIds:
        """Finds the blocks of some ids."""
        whole = ids.astype(np.int32)
        return cls(whole, *np.unique(whole >> 6, return_inverse=True))

    def gumbels(self, key: Key) -> NDArray[np.float64]:
        """G of the ids, float64 [n]."""
        own_n, least_B, lane_B = _numbers(self.ids, self.blocks, key)
        own_n[lane_B[self.places] == (self.ids & (BLOCK - 1))] = 0.0
        own_n += least_B[self.places]
        np.log(own_n, out=own_n)
        return np.negative(own_n, out=own_n)


def gumbel_row(vocabulary: int, key: Key) -> NDArray[np.float64]:
    """G of the ids 0 to V - 1, float64 [V]."""
    return block_gumbels(_blocks(vocabulary), key).reshape(-1)[:vocabulary]


def block_gumbels(blocks_n: NDArray[np.int32], key: Key) -> NDArray[np.float64]:
    """G of all ids of some blocks, float64 [n, 64]: ``gumbels`` of them, with each block's number made once."""
    ids_nL: NDArray[np.int32] = np.add.outer(blocks_n * BLOCK, np.arange(BLOCK, dtype=np.int32))
    drawn, least_n, lane_n = _numbers(ids_nL.reshape(-1), blocks_n, key)
    own_nL = drawn.reshape(ids_nL.shape)
    own_nL[np.arange(blocks_n.size), lane_n] = 0.0
    own_nL += least_n[:, None]
    np.log(own_nL, out=own_nL)
    return np.negative(own_nL, out=own_nL)


def block_bounds(vocabulary: int, key: Key) -> NDArray[np.float64]:
    """The greatest G of every block of 64 ids, float64 [B], or [I, B] of the keys of I positions."""
    blocks_B = _blocks(vocabulary)
    return -np.log(_exponential(*rounds((blocks_B >> 16) + LEAST, blocks_B & 0xFFFF, key)) / BLOCK)


def bounds_at(vocabulary: int, seed: int, position: int) -> NDArray[np.float64]:
    """``block_bounds`` of a position, float64 [B], which nobody may write to: its neighbours' are made with it."""
    group, place = divmod(position, _AHEAD)
    bounds_B: NDArray[np.float64] = _bounds_of(vocabulary, seed, group)[place]
    return bounds_B


@lru_cache(_GROUPS)
def _bounds_of(vocabulary: int, seed: int, group: int) -> NDArray[np.float64]:
    return block_bounds(vocabulary, keys_of(seed, range(group * _AHEAD, (group + 1) * _AHEAD)))


def _blocks(vocabulary: int) -> NDArray[np.int32]:
    return np.arange(-(-vocabulary // BLOCK), dtype=np.int32)


def _numbers(
    ids: NDArray[np.int32], blocks: NDArray[np.int32], key: Key
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
    """An exponential of each id's own; the least E of blocks, and the lane that has it. One pass of the cipher."""
    high, low = blocks >> 16, blocks & 0xFFFF
    upper = np.concatenate((ids >> 16, high + LEAST, high + LANE), -1)
    upper, lower = rounds(upper, np.concatenate((ids & 0xFFFF, low, low), -1), key)
    count, size = ids.shape[-1], blocks.shape[-1]
    drawn = _exponential(upper[..., : count + size], lower[..., : count + size])
    return drawn[..., :count], drawn[..., count:] / BLOCK, lower[..., count + size :] & (BLOCK - 1)


def _exponential(upper: NDArray[np.int32], lower: NDArray[np.int32]) -> NDArray[np.float64]:
    """-log(1 - u), u in the middle of its step of 2^-32: fine when it is small, because then it wins."""
    uniform = upper * 2.0**16
    uniform += lower
    uniform += 0.5
    uniform *= -(2.0**-32)
    return -np.log1p(uniform, out=uniform)
