"""The teacher's draw inside a graph, for all rows of a tree, and whether each is certain.

The host draws in float64 (`draftwood.runtime.speculation.sampling`); a device has fp32, and looks at a part of the
vocabulary only. So a row is *sure* if neither can have changed its token. Three things must hold. The winner is ahead
by more than rounding can be. No token that was not looked at can win. Top-k and top-p keep the winner however their
sums round. Every other row is the host's to draw.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.compiler.steps.noise import block_noise, own_noise, round_numbers
from draftwood.noise import BLOCK

# T rows, V vocabulary, L levels, B blocks of X = 64 ids of the noise, n of them opened, S = 64 n tokens, K kept ones

# Blocks that are opened, and tokens of them that are ranked: the 64 best tokens are in the 64 best blocks.
OPENED = KEPT = 64
# How far ahead a winner must be, in units of the noise, and how near a kept mass may come to top-p. fp32 is off by
# some 1e-5 here; a device's logarithm may be a hundred times worse. A draw is this near with about this probability.
MARGIN = 2.0**-10
# The number for top-p if it is off: no mass reaches it.
ALL_MASS = 2.0

_LEAST = float("-inf")


class DrawSettings(NamedTuple):
    """How the rows are drawn, as inputs of a graph.

    ``keys`` int32 [3, rounds, L] are those of the positions after the text, one a level. The others are float32 [1], or
    [T, 1] if rows are of several texts. ``top_k`` is V if it is off, ``top_p`` is 2.
    """

    keys: Tensor
    temperature_1: Tensor
    top_k_1: Tensor
    top_p_1: Tensor


class Candidates(NamedTuple):
    """The K best tokens of every row: by logit if top-k or top-p holds, else by logit and noise.

    ``height`` is the logit over the temperature, 0 at the peak; ``total`` has the noise added. No other token is above
    ``unseen``, by the measure that they were chosen by. ``mass`` is the sum of all exponentials of the row.
    """

    ids_TK: Tensor
    height_TK: Tensor
    total_TK: Tensor
    unseen_T1: Tensor
    mass_T1: Tensor


def greedy(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [T] and sure bool [T]: the first of the greatest logits, which are numbers."""
    logits_TV32 = logits_TV.float()
    finite_T = (logits_TV32.sum(-1) < float("inf")) & (logits_TV32.amax(-1) > _LEAST)
    return logits_TV.argmax(-1), finite_T


def sampled(logits_TV: Tensor, levels_T: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """Acceptance with noise; ``levels`` int64 [T] says which of the keys is a row's. A row that is not sure has any."""
    vocabulary = logits_TV.shape[-1]
    # Since top-p is at most 1, the product is at most the vocabulary.
    free_1 = settings.top_p_1 * settings.top_k_1 >= ALL_MASS * vocabulary
    candidates = _candidates(logits_TV.float(), levels_T, settings, free_1)
    possible_TK, certain_TK = _kept(candidates, settings, free_1, vocabulary)
    second_T1 = torch.ops.draftwood.best(possible_TK, 2)[0][:, 1:]
    best_T1, at_T1 = torch.ops.draftwood.best(certain_TK, 1)
    # A winner that is not certainly kept is the second here at best. Without top-k and top-p, any token that was not
    # looked at may be drawn, too. With them it may not, and is far below.
    ahead_T1 = best_T1 - torch.maximum(second_T1, candidates.unseen_T1) > MARGIN
    # NaN if the logits hold one, or +inf, or nothing but -inf.
    sure_T1 = ahead_T1 & (candidates.mass_T1 < float("inf"))
    return torch.ops.draftwood.picked(candidates.ids_TK, at_T1).squeeze(1).long(), sure_T1.squeeze(1)


def _candidates(logits_TV: Tensor, levels_T: Tensor, settings: DrawSettings, free_1: Tensor) -> Candidates:
    """Opens the blocks that can hold the winner, makes the noise of their tokens, and takes the best of those."""
    height_TV = (logits_TV - logits_TV.amax(-1, keepdim=True)) / settings.temperature_1
    rows, blocks = height_TV.shape[0], -(-height_TV.shape[1] // BLOCK)
    short = blocks * BLOCK - height_TV.shape[1]
    padded = F.pad(height_TV, (0, short), value=_LEAST) if short else height_TV
    height_TBX, numbers, level_T = padded.view(rows, blocks, BLOCK), round_numbers(settings.keys), levels_T.int()
    least_LB, lane_LB = block_noise(numbers, blocks)
    highest_TB = height_TBX.amax(-1)
    bound_TB = torch.where(free_1, highest_TB - torch.log(least_LB).index_select(0, level_T), highest_TB)
    opened_Tn, unseen_T1 = _open(bound_TB)
    # Not torch.tensor: a device compiles it as another constant than a file has.
    whole = partial(torch.full, (), dtype=torch.int32, device=levels_T.device)
    order_T1 = torch.arange(rows, dtype=torch.int32, device=levels_T.device)[:, None] * blocks
    height_TS = height_TBX.view(-1, BLOCK).index_select(0, (order_T1 + opened_Tn).flatten()).view(rows, -1)
    noted = torch.ops.draftwood.multiply_add(opened_Tn, level_T[:, None], whole(blocks)).flatten()
    least_Tn1, lane_Tn1 = (t.flatten().index_select(0, noted).view(rows, -1, 1) for t in (least_LB, lane_LB))
    lanes_X = torch.arange(BLOCK, dtype=torch.int32, device=levels_T.device)
    ids_TnX = torch.ops.draftwood.multiply_add(lanes_X, opened_Tn[..., None], whole(BLOCK))
    own_TnX = own_noise(numbers.index_select(2, level_T), ids_TnX.flatten(1)).view_as(ids_TnX)
    spent_TS = torch.log(torch.where(lanes_X == lane_Tn1, 0.0, own_TnX) + least_Tn1).flatten(1)
    total_TS = height_TS - spent_TS
    count = min(KEPT, total_TS.shape[1])
    best_TK, at_TK = torch.ops.draftwood.best(torch.where(free_1, total_TS, height_TS), count)
    ids_TK, height_TK, total_TK = (
        torch.ops.draftwood.picked(t, at_TK) for t in (ids_TnX.flatten(1), height_TS, total_TS)
    )
    if count < total_TS.shape[1]:
        unseen_T1 = torch.maximum(unseen_T1, best_TK[:, -1:])
    return Candidates(ids_TK, height_TK, total_TK, unseen_T1, height_TV.exp().sum(-1, keepdim=True))


def _open(bound_TB: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of the greatest bounds, int32 [T, n], and the bound that no other block exceeds, [T, 1]."""
    rows, blocks = bound_TB.shape
    if blocks <= OPENED:
        every_B = torch.arange(blocks, dtype=torch.int32, device=bound_TB.device)
        return every_B.expand(rows, blocks), torch.full((rows, 1), _LEAST, device=bound_TB.device)
    best_Tn, opened_Tn = torch.ops.draftwood.best(bound_TB, OPENED)
    return opened_Tn, best_Tn[:, -1:]


def _kept(candidates: Candidates, settings: DrawSettings, free_1: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The totals [T, K] of the tokens that top-k and top-p may keep, and of those that they certainly keep; -inf stands
    for the others.

    Tokens are ranked by logit, ties by lower id. top-p keeps tokens with less than its mass before them, and the first.
    A token that equals the best one that was not looked at may come after it. If it may be kept all the same, so may
    others that were not looked at. Its total is then +inf, which makes no row sure.
    """
    height_TK, ids_TK = candidates.height_TK, candidates.ids_TK
    ahead_TKK = height_TK[:, None] > height_TK[..., None]
    tied_TKK = (height_TK[:, None] == height_TK[..., None]) & (ids_TK[:, None] < ids_TK[..., None])
    before_TKK = (ahead_TKK | tied_TKK).float()
    rank_TK, share_TK = before_TKK.sum(-1), height_TK.exp()
    before_TK = (before_TKK * share_TK[:, None]).sum(-1)
    inside_TK, ranked_TK = height_TK > candidates.unseen_T1, rank_TK < settings.top_k_1
    # The mass of the k best is known if all of them were looked at.
    known_TK = torch.where(inside_TK, share_TK, float("inf"))
    best_mass_T1 = torch.where(ranked_TK, known_TK, 0.0).sum(-1, keepdim=True)
    mass_T1 = torch.where(settings.top_k_1 < vocabulary, best_mass_T1, candidates.mass_T1)
    beyond_TK = before_TK / mass_T1 - settings.top_p_1
    open_TK = torch.where(inside_TK, candidates.total_TK, float("inf"))
    possible_TK = torch.where(ranked_TK & (beyond_TK < MARGIN), open_TK, _LEAST)
    certain_TK = inside_TK & ranked_TK & ((beyond_TK < -MARGIN) | (rank_TK == 0))
    return (
        torch.where(free_1, candidates.total_TK, possible_TK),
        torch.where(free_1 | certain_TK, candidates.total_TK, _LEAST),
    )
