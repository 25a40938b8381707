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

from draftwood.compiler.steps.noise import block_noise, own_noise
from draftwood.contract import KEPT, MARGIN
from draftwood.noise import BLOCK

# B texts, T rows of all, V vocabulary, L levels, G blocks of X = 64 ids of the noise, n of them opened, S = 64 n
# tokens, K = 64 ranked ones, J = 2: for tokens that may be kept, and for those that may be left out

# Blocks that are opened, and tokens of them that are ranked: the 64 best tokens are in the 64 best blocks.
OPENED = KEPT

_LEAST = float("-inf")


class DrawSettings(NamedTuple):
    """How the rows are drawn, as inputs of a graph; `draftwood.runtime.engines.inputs.fill_settings` fills them.

    ``numbers`` int32 [2, rounds, L] are the cipher's at the positions after the text, one a level. The others have a
    row for every text. ``free`` bool [B] says that top-k and top-p keep all tokens. ``mass`` and ``limit`` float32
    [B, J, K] say which of the K best tokens they keep. A token is kept if the mass before it is less than ``limit``
    plus the sum of the K probabilities times ``mass``.
    """

    numbers: Tensor
    temperature_B: Tensor
    free_B: Tensor
    mass_BJK: Tensor
    limit_BJK: Tensor


class Seen(NamedTuple):
    """The tokens of the opened blocks, of every row. ``height`` is the logarithm of the probability, ``total`` has the
    noise added. No other token is above ``unseen``, by the measure that the blocks were chosen by."""

    ids_TS: Tensor
    height_TS: Tensor
    total_TS: Tensor
    unseen_T1: Tensor


def greedy(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [T] and sure bool [T]: the first of the greatest logits, which are numbers."""
    logits_TV32 = logits_TV.float()
    finite_T = (logits_TV32.sum(-1) < float("inf")) & (logits_TV32.amax(-1) > _LEAST)
    return logits_TV.argmax(-1), finite_T


def sampled(logits_TV: Tensor, levels_T: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """Acceptance with noise; ``levels`` int64 [T] says which of the numbers' levels is a row's. A row that is not sure
    has any token. If the logits hold NaN or +inf, or nothing but -inf, all probabilities are NaN and no row is sure."""
    rows = len(levels_T) // len(settings.free_B)
    free_T1, temperature_T1 = (_each_row(setting, rows) for setting in (settings.free_B, settings.temperature_B))
    seen = _seen(logits_TV.float(), levels_T.int(), settings.numbers, temperature_T1, free_T1)
    ranked_TK, at_TK = torch.ops.draftwood.best(torch.where(free_T1, seen.total_TS, seen.height_TS), KEPT)
    ids_TK, total_TK = (torch.ops.draftwood.picked(t, at_TK) for t in (seen.ids_TS, seen.total_TS))
    unseen_T1 = seen.unseen_T1
    if seen.ids_TS.shape[1] > KEPT:
        unseen_T1 = torch.maximum(unseen_T1, ranked_TK[:, -1:])
    # With top-k and top-p, a token that equals the best one that was not looked at may come after it. If it may be
    # kept all the same, so may others that were not looked at: then none is ahead. If they keep all tokens, any that
    # was not looked at may be drawn.
    inside_TK = (ranked_TK > unseen_T1) | free_T1
    outside_J1 = torch.where(torch.arange(2, device=ids_TK.device)[:, None] > 0, _LEAST, float("inf"))
    open_TJK = torch.where(inside_TK[:, None], total_TK[:, None], outside_J1)
    drawn_TJK = torch.where(_kept(ranked_TK, ids_TK, settings), open_TJK, _LEAST)
    best, places = (t.flatten(1).split(1, 1) for t in torch.ops.draftwood.best(drawn_TJK, 2))
    # Places 0 and 1 are the best that may be kept, place 2 the best that certainly is.
    rival_T1 = torch.maximum(best[1], torch.where(free_T1, unseen_T1, _LEAST))
    return torch.ops.draftwood.picked(ids_TK, places[2]).squeeze(1).long(), (best[2] - rival_T1 > MARGIN).squeeze(1)


def _each_row(setting_B: Tensor, rows: int) -> Tensor:
    """A text's setting at each of its rows [T, 1], or [1, 1] of a single text."""
    return setting_B[:, None] if len(setting_B) == 1 else setting_B[:, None].expand(-1, rows).reshape(-1, 1)


def _seen(logits_TV: Tensor, level_T: Tensor, numbers: Tensor, temperature_T1: Tensor, free_T1: Tensor) -> Seen:
    """Opens the blocks that can hold the winner, and makes the noise of their tokens.

    With ``least`` an exponential over 64, as the noise has it, 64 E is ``64 * own + least``. So all totals are lower by
    log 64, and so are the bounds of blocks.
    """
    # The greatest is taken off first: a quotient by a small temperature would round the differences away.
    height_TV = ((logits_TV - logits_TV.amax(-1, keepdim=True)) / temperature_T1).log_softmax(-1)
    rows, blocks = height_TV.shape[0], -(-height_TV.shape[1] // BLOCK)
    short, levels = blocks * BLOCK - height_TV.shape[1], numbers.shape[2]
    padded = F.pad(height_TV, (0, short), value=_LEAST) if short else height_TV
    height_TGX = padded.view(rows, blocks, BLOCK)
    # The first half of the rows are exponentials, the second half are the ids that have them.
    spent_HG, lane_HG = (t.flatten(0, 1) for t in block_noise(numbers, blocks))
    highest_TG = height_TGX.amax(-1)
    bound_TG = torch.where(free_T1, highest_TG - torch.log(spent_HG).index_select(0, level_T), highest_TG)
    opened_Tn, unseen_T1 = _open(bound_TG)
    # Not torch.tensor: a device compiles it as another constant than a file has.
    whole = partial(torch.full, (), dtype=torch.int32, device=level_T.device)
    order_T1 = torch.arange(rows, dtype=torch.int32, device=level_T.device)[:, None] * blocks
    height_TS = height_TGX.view(-1, BLOCK).index_select(0, (order_T1 + opened_Tn).flatten()).view(rows, -1)
    noted_Tn = torch.ops.draftwood.multiply_add(opened_Tn, level_T[:, None], whole(blocks))
    least_Tn1 = spent_HG.flatten().index_select(0, noted_Tn.flatten()).view(rows, -1, 1)
    lane_Tn1 = lane_HG.flatten().index_select(0, (noted_Tn + levels * blocks).flatten()).view(rows, -1, 1)
    lanes_X = torch.arange(BLOCK, dtype=torch.int32, device=level_T.device)
    ids_TnX = torch.ops.draftwood.multiply_add(lanes_X, opened_Tn[..., None], whole(BLOCK))
    own_TnX = own_noise(numbers.index_select(2, level_T), ids_TnX.flatten(1)).view_as(ids_TnX)
    apart_TnX = torch.where(lanes_X == lane_Tn1, 0.0, own_TnX)
    spent_TS = torch.log(torch.ops.draftwood.add_scaled(least_Tn1, apart_TnX, BLOCK)).flatten(1)
    return Seen(ids_TnX.flatten(1), height_TS, height_TS - spent_TS, unseen_T1)


def _open(bound_TG: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of the greatest bounds, int32 [T, n], and the bound that no other block exceeds, [T, 1]."""
    rows, blocks = bound_TG.shape
    if blocks <= OPENED:
        every_G = torch.arange(blocks, dtype=torch.int32, device=bound_TG.device)
        return every_G.expand(rows, blocks), torch.full((rows, 1), _LEAST, device=bound_TG.device)
    best_Tn, opened_Tn = torch.ops.draftwood.best(bound_TG, OPENED)
    return opened_Tn, best_Tn[:, -1:]


def _kept(ranked_TK: Tensor, ids_TK: Tensor, settings: DrawSettings) -> Tensor:
    """Which tokens top-k and top-p may keep, and which they keep however their sums round, bool [T, J, K], of the best
    tokens in order. They keep the first ones; equal ones count by lower id, in whatever order they come."""
    order_K = torch.arange(KEPT, device=ids_TK.device)
    better_KK = (order_K < order_K[:, None]).float()
    # A product sums the mass before every rank and the mass that top-p is a share of.
    weight_BLK = (settings.mass_BJK.view(-1, 2, 1, KEPT) - better_KK).flatten(1, 2)
    slack_TL = sums(ranked_TK.exp(), weight_BLK, settings.limit_BJK.view(len(weight_BLK), -1))
    kept_TJ1 = (slack_TL.view(-1, 2, KEPT) > 0).float().sum(-1, keepdim=True)
    tied_TKK = ranked_TK[:, None] == ranked_TK[..., None]
    before_TKK = torch.where(tied_TKK, (ids_TK[:, None] < ids_TK[..., None]).float(), better_KK)
    return kept_TJ1 > before_TKK.sum(-1)[:, None]


def sums(x_TK: Tensor, weight_BLK: Tensor, added_BL: Tensor) -> Tensor:
    """Sums [T, L] of each text's rows by its own weights."""
    if len(weight_BLK) == 1:
        return F.linear(x_TK, weight_BLK.squeeze(0), added_BL.squeeze(0))
    x_BTK = x_TK.view(len(weight_BLK), -1, x_TK.shape[1])
    return (x_BTK @ weight_BLK.transpose(-1, -2) + added_BL[:, None]).flatten(0, 1)
