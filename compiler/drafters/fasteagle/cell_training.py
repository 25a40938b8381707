"""A FastEagle cascade with a cell in training: levels as the paper has them, and the cell along the true text.

Level i's node stands on the true token before its target, as the nodes of a tree on the true path do; gradients of its
loss reach the cascade. In a draft the cell ranks only those tokens that its level by itself ranks best (the shortlist),
so the levels go on learning by themselves, too, from a share of the contexts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.drafters.fasteagle.cell import Cell
from draftwood.compiler.drafters.fasteagle.training import FastEagleStudent
from draftwood.compiler.training.batch import Batch

# N contexts, I levels, H hidden size, V draft vocabulary, R width of the cell's state, S shortlist

# Of each level's contexts one in so many is learnt without the cell, too.
_ALONE = 4


class CellStudent(FastEagleStudent):
    """A cascade and its cell; features are [N, I, 2H], of the cell first and of the level by itself behind them."""

    def __init__(self, *arguments: Any, cell: int, shortlist: int, **terms: Any) -> None:
        super().__init__(*arguments, **terms)
        self.width, self.shortlist = cell, min(shortlist, len(self.output_VH))
        self.cell = Cell(self.sizes.hidden_size, cell)

    def start_from(self, teacher: Any) -> None:
        """The cascade begins as one without a cell, and the cell adds nothing at first."""
        super().start_from(teacher)
        self.cell.out.weight.data.zero_()

    def reads_embedding(self) -> dict[str, slice]:
        return {**super().reads_embedding(), "cell.token.weight": slice(None)}

    def features(self, batch: Batch) -> Tensor:
        alone_NIH = super().features(batch)
        reads_NIX = self.cell.level(alone_NIH)
        state_NR, found = reads_NIX.new_zeros(len(alone_NIH), self.width), [alone_NIH[:, 0]]
        for level in range(1, self.levels):
            token_N = batch.ahead(1 + level)[batch.there_BC]
            embedded_NH = self.scale * self.embedding_TH[token_N].to(reads_NIX.dtype)
            gain_NH, state_NR = self.cell(state_NR, embedded_NH, reads_NIX[:, level])
            found.append(alone_NIH[:, level] + gain_NH)
        return torch.cat((torch.stack(found, 1), alone_NIH), -1)

    def losses(self, batch: Batch, features_NIH: Tensor, weight_NI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        node_NIH, alone_NIH = features_NIH.chunk(2, -1)
        loss, parts = super().losses(batch, node_NIH, weight_NI)
        order_N, order_I = (torch.arange(size, device=weight_NI.device) for size in weight_NI.shape)
        # The first level has no cell.
        some_NI = ((order_N[:, None] + order_I) % _ALONE == 0) & (order_I > 0)
        alone, sums_I = self.distribution_loss(batch, alone_NIH, weight_NI * some_NI)
        return loss + alone, {**parts, "alone": sums_I * _ALONE}

    def logits(self, features_NH: Tensor, level: int, noise_NV: Tensor | None = None) -> Tensor:
        node_NH, alone_NH = features_NH.chunk(2, -1)
        logits_NV = super().logits(node_NH, level, noise_NV)
        if level == 0:
            return logits_NV
        alone_NV = super().logits(alone_NH, level, noise_NV)
        least_N1 = alone_NV.topk(self.shortlist).values[:, -1:]
        return logits_NV.masked_fill(alone_NV < least_N1, -torch.inf)

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "cell_size": self.width, "cell_shortlist": self.shortlist}
