"""The DFlash drafter (2026, arXiv 2602.06036): a block of rows denoised in one pass.

The rows are the root and mask tokens after it. The text enters as fc over some states of the teacher. Every layer makes
keys and values of that with its own matrices, and keeps them in its cache. A row sees all of the text and all rows of
the block, later ones too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.config import CachedConfig
from draftwood.compiler.drafters.common.layers import CachedNetwork, DraftLayer, Waiting
from draftwood.compiler.teachers.block import Form, Norm
from draftwood.compiler.teachers.decoder import TeacherEnds

# P rows that extend the cache, B rows of the block, I levels, H hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(CachedConfig):
    """A block of rows, the root and mask tokens, over the teacher's states as keys and values."""

    # Rows of the block, the root's counted.
    rows: int
    mask_token: int
    # Whether the root's row makes the first draft; otherwise the first mask row does, and the root's is not read.
    from_root: bool

    @property
    def levels(self) -> int:
        """Tokens drafted in one pass."""
        return self.rows if self.from_root else self.rows - 1


class Denoised(NamedTuple):
    """The result of a pass: the levels after the last norm, and the caches."""

    normed_IH: Tensor
    caches: list[Tensor]
    # The root's token id, int64 [1].
    root_1: Tensor

    @property
    def normed(self) -> Tensor:
        """The levels, by the name that every extend pass gives them."""
        return self.normed_IH


class DFlash(CachedNetwork):
    """The network. Parameter names are the bundle's weight names; the caller fills them."""

    config: DFlashConfig

    def __init__(self, config: DFlashConfig, positions: int) -> None:
        super().__init__(config, positions)
        self.root_states = config.levels
        self.feature_norm = Norm(config.block.hidden, config.block.rms_norm_eps)
        self.stack = nn.ModuleList(DraftLayer(config.block) for _ in range(config.block.layers))

    def extend(self, waiting: Waiting, caches: list[Tensor], teacher: TeacherEnds, form: Form = "fused") -> Denoised:
        """Writes the waiting rows' states into the caches and runs the block after them. ``caches`` are flat [K*C, D],
        or with ``form`` "cpu" [1, K, C, D], key then value of every layer."""
        at = self.extension(waiting, caches[0], form)
        known_PH = self.feature_norm(self.fc(waiting.features_PF))
        root_1, device = waiting.tokens_P.index_select(0, at.last_1), waiting.tokens_P.device
        masks = torch.full((self.config.rows - 1,), self.config.mask_token, dtype=torch.int64, device=device)
        tokens_B = torch.cat((root_1, masks))
        cos_B1D, sin_B1D = self.rotary(waiting.committed_1 + torch.arange(self.config.rows, device=device))
        residual_BH, added_BH, written = self.embed(tokens_B, teacher), cast(Tensor | None, None), []
        for i, layer in enumerate(cast(Iterable[DraftLayer], self.stack)):
            pair = at.write(layer, known_PH, caches[2 * i : 2 * i + 2])
            normed_BH, residual_BH = layer.enter(added_BH, residual_BH)
            q_BND, *pair_BKD = layer.rotated(normed_BH, cos_B1D, sin_B1D)
            k_KBD, v_KBD = (rows.transpose(0, 1) for rows in pair_BKD)
            attended = layer.attend_tree(q_BND, pair, at.unseen_C, (k_KBD, v_KBD))
            added_BH, residual_BH = layer.feed_forward(attended, residual_BH)
            written += pair
        assert added_BH is not None, "a drafter has a layer at least"
        normed_BH = self.draft_norm.added(added_BH, residual_BH)[0]
        return Denoised(normed_BH[self.config.rows - self.config.levels :], written, root_1)
