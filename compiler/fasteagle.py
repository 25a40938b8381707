"""The FastEagle drafter (Huang et al., 2025, arXiv 2509.20416): a cascade of N blocks, one pass, N levels.

fc over three states of the teacher and the embedding of the next token make the first hidden state; block i
turns that of level i - 1 into that of level i, and the output matrix ranks the i-th token after the root.
Candidates mean what Medusa's do: a level's ranking depends on the context and not on the nodes above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.decoder import Form
from draftwood.compiler.drafter_config import DrafterConfig
from draftwood.compiler.drafter_layers import DraftLayer, DraftModule, TeacherWeights

# P rows that extend the cache, F = 3 * teacher's hidden size, H hidden, I levels, K candidates a level


class Cascade(NamedTuple):
    """What an extend pass returns: the root's levels behind the last norm, and the caches."""

    normed_IH: Tensor
    caches: list[Tensor]

    @property
    def normed(self) -> Tensor:
        """The levels, by the name that every extend pass gives them."""
        return self.normed_IH


class FastEagle(DraftModule):
    """The network; every block has a cache of accepted text. Parameter names are the bundle's weight names."""

    def __init__(self, config: DrafterConfig, positions: int) -> None:
        super().__init__(config, positions)
        self.proj = nn.Linear(2 * config.block.hidden, config.block.hidden, bias=False)
        self.cascade = nn.ModuleList(DraftLayer(config.block) for _ in range(config.block.layers))

    def extend(
        self,
        tokens_P: Tensor,
        features_PF: Tensor,
        committed_1: Tensor,
        accepted_1: Tensor,
        caches: list[Tensor],
        teacher: TeacherWeights,
        form: Form = "fused",
    ) -> Cascade:
        """Runs the accepted rows through all blocks.

        ``tokens`` are the tokens *after* those whose ``features`` are given; the last that counts is the root.
        ``caches`` are flat [K*C, D], or with ``form`` "cpu" [1, K, C, D], key then value of every block.
        """
        at = self.extension(tokens_P.shape[0], committed_1, accepted_1, caches[0], form)
        residual_PH = self.proj(torch.cat((self.fc(features_PF), self.embed(tokens_P, teacher)), -1))
        added_PH: Tensor | None = None
        levels, written = [], []
        for i, layer in enumerate(cast(Iterable[DraftLayer], self.cascade)):
            normed_PH, residual_PH = layer.enter(added_PH, residual_PH)
            attended, pair = at.attend(layer, normed_PH, caches[2 * i : 2 * i + 2])
            written += pair
            if i + 1 == len(self.cascade):  # no layer reads the other rows of the last one
                attended, residual_PH = (t.index_select(0, at.last_1) for t in (attended, residual_PH))
                levels.append(self.draft_norm.added(*layer.feed_forward(attended, residual_PH))[0])
            else:
                added_PH, residual_PH = layer.feed_forward(attended, residual_PH)
                last = (t.index_select(0, at.last_1) for t in (added_PH, residual_PH))
                levels.append(self.draft_norm.added(*last)[0])
        return Cascade(torch.cat(levels), written)

    def forward(
        self,
        tokens_P: Tensor,
        features_PF: Tensor,
        committed_1: Tensor,
        accepted_1: Tensor,
        caches: list[Tensor],
        teacher: TeacherWeights,
        candidates: int,
        form: Form = "fused",
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """``extend``, ranked: the teacher's ids int64 [I, K], their log-probabilities [I, K], and the caches."""
        cascade = self.extend(tokens_P, features_PF, committed_1, accepted_1, caches, teacher, form)
        return *self.best(cascade.normed_IH, teacher, candidates), cascade.caches
