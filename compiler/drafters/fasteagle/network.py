"""The FastEagle drafter (Huang et al., 2025, arXiv 2509.20416): a cascade of N blocks, one pass, N levels.

fc over three states of the teacher and the embedding of the next token make the first hidden state; block i
turns that of level i - 1 into that of level i, and the output matrix ranks the i-th token after the root.
Candidates mean what Medusa's do: a level's ranking depends on the context and not on the nodes above it. With a cell,
which is ours, it depends on them, too: the cell ranks anew, for every node, the tokens that its level by itself ranks
best. So the output matrix is read once for all levels, as it is without a cell, and a few rows of it once a level.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.drafters.common.layers import CachedNetwork, DraftLayer, Extended, Waiting
from draftwood.compiler.drafters.fasteagle.cell import Cell
from draftwood.compiler.drafters.fasteagle.config import FastEagleConfig
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import TeacherEnds

# P rows that extend the cache, F width of the teacher's states, H hidden, I levels, D levels of a tree, E nodes of a
# depth, S tokens of a shortlist, U draft vocabulary, R width of the cell's state, X = 3R


class Cascade(NamedTuple):
    """What an extend pass returns: the root's levels behind the last norm, and the caches."""

    normed_IH: Tensor
    caches: list[Tensor]

    @property
    def normed(self) -> Tensor:
        """The levels, by the name that every extend pass gives them."""
        return self.normed_IH


class FastEagle(CachedNetwork):
    """The network; every block has a cache of accepted text. Parameter names are the bundle's weight names."""

    def __init__(self, config: FastEagleConfig, positions: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one depth, and what their cells have left: the state, and the hidden state that ranks their children.

    Nothing was run for the root, whose state is zeros.
    """

    drafter: CellCascade
    teacher: TeacherEnds
    # Of every level: its hidden state, what the cell reads of it, its noise, its logits with their noise.
    levels_DH: Tensor
    reads_DX: Tensor
    noise_DU: Tensor
    logits_DU: Tensor
    # Draft ids of every level's shortlist.
    short_DS: Tensor
    state_ER: Tensor
    hidden_EH: Tensor | None = None
    depth: int = 0

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        drafter, at = self.drafter, slice(self.depth, self.depth + 1)
        if self.hidden_EH is None:
            return drafter.chosen(self.logits_DU[at], k)
        ids_S = self.short_DS[self.depth]
        rows_SH = drafter.head_rows(ids_S, self.teacher, self.hidden_EH.dtype)
        noise_1S = self.noise_DU[at].index_select(1, ids_S)
        return drafter.chosen(drafter.perturbed(F.linear(self.hidden_EH, rows_SH), noise_1S), k, ids_S)

    def below(self, tokens_E: Tensor, source_E: Tensor, masked_ES: Tensor) -> Nodes:
        depth, at = self.depth + 1, slice(self.depth + 1, self.depth + 2)
        parents_ER = self.state_ER.index_select(0, source_E)
        embedded_EH = self.drafter.embed(tokens_E, self.teacher)
        gain_EH, state_ER = self.drafter.cell(parents_ER, embedded_EH, self.reads_DX[at])
        return replace(self, state_ER=state_ER, hidden_EH=self.levels_DH[at] + gain_EH, depth=depth)


class CellCascade(FastEagle):
    """The network with a cell, which every node of a draft tree runs."""

    config: FastEagleConfig

    def __init__(self, config: FastEagleConfig, positions: int) -> None:
        super().__init__(config, positions)
        self.cell = Cell(config.block.hidden, config.cell_size)

    def root(self, extended: Extended, teacher: TeacherEnds, noise_DU: Tensor) -> Nodes:
        levels_DH = extended.normed[: noise_DU.shape[0]]
        logits_DU = self.perturbed(self.logits(levels_DH, teacher), noise_DU)
        short_DS = logits_DU.topk(self.config.cell_shortlist, -1).indices
        state_1R = levels_DH.new_zeros(1, self.config.cell_size)
        return Nodes(self, teacher, levels_DH, self.cell.level(levels_DH), noise_DU, logits_DU, short_DS, state_1R)
