"""The P-EAGLE drafter (2026, arXiv 2602.01469): EAGLE-3's network over the text and then rows of mask tokens.

The root's row ranks the first token. The j-th mask row after it ranks the token j further on. A mask row reads the mask
token's embedding and a learnt vector instead of the teacher's states. It sees the text and the mask rows before it, and
writes no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.layers import Extended
from draftwood.compiler.drafters.eagle3.network import Eagle3, Eagle3Config, ExtendResult
from draftwood.compiler.teachers.decoder import TeacherEnds

# M mask rows, I = M + 1 levels, H hidden, F width of the teacher's states


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleConfig(Eagle3Config):
    """EAGLE-3's network, run once."""

    # The token whose embedding stands for a token that is not known yet.
    mask_token: int
    # Tokens drafted in one pass.
    levels: int


class PEagle(Eagle3):
    """The network. Parameter names are EAGLE-3's, and ``mask_hidden`` [1, 1, F]."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig, positions: int) -> None:
        super().__init__(config, positions)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, config.features))

    def levels(self, extended: Extended, teacher: TeacherEnds) -> Tensor:
        written = cast(ExtendResult, extended)
        masks = self.config.levels - 1
        if not masks:
            return written.normed
        order_M = torch.arange(masks, device=written.committed_1.device)
        embedded_MH = self.embed(torch.full_like(order_M, self.config.mask_token), teacher)
        hidden_MH = self.fused(self.mask_hidden[0]).expand(masks, -1)
        later_MM = order_M[None] > order_M[:, None]
        rows, _ = self.rows(embedded_MH, hidden_MH, written.committed_1 + order_M, None, later_MM, written)
        return torch.cat((written.normed, rows.normed_RH))
