"""The FastEagle drafter (Huang et al., 2025, arXiv 2509.20416): a cascade of N blocks, one pass, N levels.

fc over three states of the teacher and the embedding of the next token make the first hidden state. Block i turns the
hidden state of level i - 1 into that of level i, and the output matrix ranks the i-th token after the root. As with
Medusa, a level's ranking depends on the context and not on the nodes above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.layers import CachedNetwork, DraftLayer, Waiting
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import TeacherEnds

# P rows that extend the cache, F width of the teacher's states, H hidden, I levels


class Cascade(NamedTuple):
    """The result of an extend pass: the root's levels after the last norm, and the caches."""

    normed_IH: Tensor
    caches: list[Tensor]

    @property
    def normed(self) -> Tensor:
        """The levels, by the name that every extend pass gives them."""
        return self.normed_IH


class FastEagle(CachedNetwork):
    """The network; every block has a cache of accepted text. Parameter names are the bundle's weight names."""

    def __init__(self, config: CachedConfig, positions: int) -> None:
        super().__init__(config, positions)
        self.proj = nn.Linear(2 * config.block.hidden, config.block.hidden, bias=False)
        self.root_states = config.block.layers
        self.cascade = nn.ModuleList(DraftLayer(config.block) for _ in range(config.block.layers))

    def extend(self, waiting: Waiting, caches: list[Tensor], teacher: TeacherEnds, form: Form = "fused") -> Cascade:
        """Runs the waiting rows through all blocks, which write them into the caches.

        ``caches`` are flat [K*C, D], or with ``form`` "cpu" [1, K, C, D], key then value of every block.
        """
        at = self.extension(waiting, caches[0], form)
        embedded_PH = self.embed(waiting.tokens_P, teacher)
        residual_PH = self.proj(torch.cat((self.fc(waiting.features_PF), embedded_PH), -1))
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
