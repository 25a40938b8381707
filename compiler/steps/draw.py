"""The teacher's draw inside a graph, for all rows of a tree, and whether each is certain.

The host draws in float64 (`draftwood.runtime.speculation.sampling`); a device has fp32, and looks at a part of the
vocabulary only. So a row is *sure* where neither can have changed its token: the winner is ahead by more than rounding
can be, nothing that was not looked at can win, and top-k and top-p keep the winner whatever their sums round to. Every
other row is the host's to draw.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftwood.compiler.steps.noise import block_noise, own_noise
from draftwood.noise import BLOCK

# T rows, V vocabulary, L levels, B blocks of the noise, n of them opened, S = 64 n tokens in them, K kept tokens

# Blocks that are opened, and tokens of them that are ranked: whatever is among the 64 best is in the 64 best blocks.
OPENED = KEPT = 64
# How far ahead a winner must be, in units of the noise, and how near a kept mass may come to top-p. fp32 is off by
# some 1e-5 here; a device's logarithm may be a hundred times worse. A draw is this near with about this probability.
MARGIN = 2.0**-10
# What stands for top-p where it is off: no mass reaches it.
ALL_MASS = 2.0

_LEAST = float("-inf")


class Settings(NamedTuple):
    """How the rows are drawn, as inputs of a graph.

    ``keys`` int32 [3, rounds, L] are those of the positions behind the text, one a level; the others are float32 [1],
    or [T, 1] where rows are of several texts: ``top_k`` is V where it is off, ``top_p`` is 2.
    """

    keys: Tensor
    temperature_1: Tensor
    top_k_1: Tensor
    top_p_1: Tensor


class Candidates(NamedTuple):
    """The K best tokens of every row: by logit where top-k or top-p holds, else by logit and noise.

    ``height`` is the logit over the temperature, 0 at the peak. Nothing that was not taken is above ``unseen``, in what
    they were taken by. ``mass`` is the sum of all exponentials of the row.
    """

    ids_TK: Tensor
    height_TK: Tensor
    noise_TK: Tensor
    unseen_T1: Tensor
    mass_T1: Tensor


def greedy(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [T] and sure bool [T]: the first of the greatest logits, which are numbers."""
    return logits_TV.argmax(-1), _finite(logits_TV.float())


def sampled(logits_TV: Tensor, levels_T: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The same with noise; ``levels`` int64 [T] says which of the keys is a row's."""
    free_1 = ((settings.top_p_1 >= ALL_MASS) & (settings.top_k_1 >= logits_TV.shape[-1])).float()
    logits_TV = logits_TV.float()
    found = _candidates(logits_TV, levels_T, settings, free_1)
    possible_TK, certain_TK, closed_T = _kept(found, settings, logits_TV.shape[-1])
    free_TK = (free_1 > 0).expand_as(possible_TK)
    possible_TK, certain_TK = possible_TK | free_TK, certain_TK | free_TK
    total_TK = torch.where(possible_TK, found.height_TK + found.noise_TK, _LEAST)
    best_T2, at_T2 = total_TK.topk(2, -1)
    at_T1 = at_T2[:, :1]
    # Without top-k and top-p any token that was not looked at may be drawn, too.
    rival_T1 = torch.maximum(best_T2[:, 1:], torch.where(free_1 > 0, found.unseen_T1, _LEAST))
    ahead_T = (best_T2[:, :1] - rival_T1 > MARGIN).squeeze(1)
    certain_T = certain_TK.float().gather(1, at_T1).squeeze(1) > 0
    sure_T = ahead_T & certain_T & (closed_T | (free_1 > 0).flatten()) & _finite(logits_TV)
    return found.ids_TK.gather(1, at_T1).squeeze(1).long(), sure_T


def _finite(logits_TV: Tensor) -> Tensor:
    """bool [T]: no NaN and no +inf, and not -inf throughout."""
    return (logits_TV.sum(-1) < float("inf")) & (logits_TV.amax(-1) > _LEAST)


def _candidates(logits_TV: Tensor, levels_T: Tensor, settings: Settings, free_1: Tensor) -> Candidates:
    """Opens the blocks that can hold the winner, makes the noise of their tokens, and takes the best of those."""
    height_TV = (logits_TV - logits_TV.amax(-1, keepdim=True)) / settings.temperature_1
    rows, blocks = height_TV.shape[0], -(-height_TV.shape[1] // BLOCK)
    short = blocks * BLOCK - height_TV.shape[1]
    padded = F.pad(height_TV, (0, short), value=_LEAST) if short else height_TV
    height_TBL = padded.view(rows, blocks, BLOCK)
    least_LB, lane_LB = block_noise(settings.keys, blocks)
    bound_TB = height_TBL.amax(-1) - free_1 * torch.log(least_LB).index_select(0, levels_T)
    opened_Tn, unseen_T1 = _open(bound_TB)
    order_T1 = torch.arange(rows, device=levels_T.device)[:, None] * blocks
    height_TS = height_TBL.view(-1, BLOCK).index_select(0, (order_T1 + opened_Tn).flatten()).view(rows, -1)
    noted = (levels_T[:, None] * blocks + opened_Tn).flatten()
    least_TnX, lane_TnX = (t.flatten().index_select(0, noted).view(rows, -1, 1) for t in (least_LB, lane_LB))
    lanes_L = torch.arange(BLOCK, dtype=torch.int32, device=levels_T.device)
    ids_TnL = opened_Tn.to(torch.int32)[..., None] * BLOCK + lanes_L
    own_TnL = own_noise(settings.keys.index_select(2, levels_T), ids_TnL.flatten(1)).view_as(ids_TnL)
    noise_TS = -torch.log(torch.where(lanes_L == lane_TnX, 0.0, own_TnL) + least_TnX).flatten(1)
    best_TK, at_TK = (height_TS + free_1 * noise_TS).topk(min(KEPT, noise_TS.shape[1]), -1)
    ids_TK, height_TK, noise_TK = (t.gather(1, at_TK) for t in (ids_TnL.flatten(1), height_TS, noise_TS))
    if best_TK.shape[1] < noise_TS.shape[1]:
        unseen_T1 = torch.maximum(unseen_T1, best_TK[:, -1:])
    return Candidates(ids_TK, height_TK, noise_TK, unseen_T1, height_TV.exp().sum(-1, keepdim=True))


def _open(bound_TB: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of the greatest bounds, int64 [T, n], and the greatest of the others [T, 1]."""
    rows, blocks = bound_TB.shape
    if blocks <= OPENED:
        every_B = torch.arange(blocks, device=bound_TB.device)
        return every_B.expand(rows, blocks), torch.full((rows, 1), _LEAST, device=bound_TB.device)
    best, at = bound_TB.topk(OPENED + 1, -1)
    return at[:, :OPENED], best[:, OPENED:]


def _kept(found: Candidates, settings: Settings, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """What top-k and top-p may keep and certainly keep, bool [T, K], and whether they keep nothing else, bool [T].

    Tokens are ranked by logit, ties by lower id; top-p keeps what has less than its mass before it, and the first.
    """
    height_TK, ids_TK = found.height_TK, found.ids_TK
    ahead_TKK = height_TK[:, None] > height_TK[..., None]
    tied_TKK = (height_TK[:, None] == height_TK[..., None]) & (ids_TK[:, None] < ids_TK[..., None])
    before_TKK = (ahead_TKK | tied_TKK).float()
    rank_TK, share_TK = before_TKK.sum(-1), height_TK.exp()
    # What equals the best token that was not looked at may stand behind it.
    inside_TK = height_TK > found.unseen_T1
    ranked_TK = inside_TK & (rank_TK < settings.top_k_1)
    unlimited_1 = settings.top_k_1 >= vocabulary
    mass_T1 = torch.where(unlimited_1, found.mass_T1, (share_TK * ranked_TK).sum(-1, keepdim=True))
    before_TK = (before_TKK * share_TK[:, None]).sum(-1)
    possible_TK = ranked_TK & (before_TK < (settings.top_p_1 + MARGIN) * mass_T1)
    certain_TK = ranked_TK & ((before_TK < (settings.top_p_1 - MARGIN) * mass_T1) | (rank_TK == 0))
    whole_T = inside_TK.float().sum(-1) >= settings.top_k_1.flatten()
    seen_T1 = (share_TK * inside_TK).sum(-1, keepdim=True)
    enough_T = (unlimited_1 & (seen_T1 >= (settings.top_p_1 + MARGIN) * mass_T1)).squeeze(1)
    return possible_TK, certain_TK, whole_T | enough_T
