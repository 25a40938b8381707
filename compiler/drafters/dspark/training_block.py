"""A layer of DFlash's block in training: the rows of each context's block over the text before it."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.compiler.drafters.common.block import Attention, Block, RMSNorm, Sizes

# B texts, S slots, C contexts, I rows of a block, T = C * I rows, H hidden size, Q query heads, E head size


class NormedAttention(Attention):
    """Attention whose query and key heads are normed, as Qwen3's are."""

    def __init__(self, sizes: Sizes, width: int) -> None:
        super().__init__(sizes, width)
        self.q_norm, self.k_norm = (RMSNorm(sizes.head_dim, sizes.rms_norm_eps) for _ in range(2))

    def queries(self, x_BTH: Tensor, position_BT: Tensor) -> Tensor:
        return self._rotated(self.q_norm(self._heads(self.q_proj(x_BTH))), position_BT)

    def keys_values(self, x_BTH: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        keys_BGTE = self._rotated(self.k_norm(self._heads(self.k_proj(x_BTH))), position_BT)
        values_BGTE = self._heads(self.v_proj(x_BTH))
        return keys_BGTE.repeat_interleave(self.groups, 1), values_BGTE.repeat_interleave(self.groups, 1)


class DenoisedBlock(Block):
    """A block whose rows see a text's slots up to their context, and each other, those behind them too."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.self_attn = NormedAttention(sizes, sizes.hidden_size)

    def denoised(self, x_BCIH: Tensor, known_BSH: Tensor, place_BCI: Tensor, seen_BCS: Tensor) -> Tensor:
        """``known`` are the fused states of the slots, ``place`` the rows' positions; [B, C, I, H]."""
        normed_BTH = self.input_layernorm(x_BCIH).flatten(1, 2)
        heads_BQTE = self._attended(normed_BTH, known_BSH, place_BCI, seen_BCS)
        x_BCIH = x_BCIH + self.self_attn.joined(heads_BQTE).view_as(x_BCIH)
        return x_BCIH + self.mlp(self.post_attention_layernorm(x_BCIH))

    def _attended(self, normed_BTH: Tensor, known_BSH: Tensor, place_BCI: Tensor, seen_BCS: Tensor) -> Tensor:
        attention, rows = self.self_attn, place_BCI.shape[1:]
        slot_1S = torch.arange(known_BSH.shape[1], device=known_BSH.device)[None]
        keys_BQSE, values_BQSE = attention.keys_values(known_BSH, slot_1S)
        own = attention.keys_values(normed_BTH, place_BCI.flatten(1))
        keys_BQCIE, values_BQCIE = (side.unflatten(2, rows) for side in own)
        queries_BQTE = attention.queries(normed_BTH, place_BCI.flatten(1))
        text_BQTS = (queries_BQTE @ keys_BQSE.transpose(-1, -2)).float()
        text_BQTS = text_BQTS.masked_fill(~seen_BCS.repeat_interleave(rows[1], 1)[:, None], -torch.inf)
        block_BQCII = (queries_BQTE.unflatten(2, rows) @ keys_BQCIE.transpose(-1, -2)).float()
        scores = torch.cat((text_BQTS, block_BQCII.flatten(2, 3)), -1) * queries_BQTE.shape[-1] ** -0.5
        shares = scores.softmax(-1).to(values_BQSE.dtype)
        of_text, of_block = shares.split((slot_1S.shape[1], rows[1]), -1)
        return of_text @ values_BQSE + (of_block.unflatten(2, rows) @ values_BQCIE).flatten(2, 3)
