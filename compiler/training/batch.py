"""A drafter's training data: texts with the teacher's hidden states, and the tokens a text has further on.

A context is a place t in a text (a *slot* of the drafter). There the runtime has the teacher's states of token t and
the root, which is token t + 1. It asks for token t + 2 at level 0, token t + 3 at level 1, and so on. Roots are the
teacher's own tokens, so t starts at the last token of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# N contexts, B texts a batch, S tokens of the longest, C contexts of the longest, I levels, H hidden size, F width of
# the aux states

# A target after the end of the text.
NONE = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts with the teacher's states, padded on the right, which no context reads.

    Contexts are numbered text by text: values of "each context", [N], are in that order.
    """

    # int64 [B, S].
    ids_BS: Tensor
    # int64 [B].
    length_B: Tensor
    # The slot of each context, int64 [B, C]; past a text's last context it repeats a slot that exists.
    slot_BC: Tensor
    # bool [B, C]: False past a text's last context. N of them are True.
    there_BC: Tensor
    # The teacher's states after its final norm, [B, S, H], which its output matrix reads.
    last_BSH: Tensor
    # Its states entering the aux layers, low to high, [B, S, F].
    aux_BSF: Tensor
    # The temperature that a text was drawn at, float32 [B].
    temperature_B: Tensor

    def pick(self, states_BSH: Tensor) -> Tensor:
        """The rows of the contexts' own slots, [N, H]."""
        row_N, place_N = self.there_BC.nonzero().unbind(1)
        return states_BSH[row_N, self.slot_BC[row_N, place_N]]

    def spread(self, states_BSH: Tensor) -> Tensor:
        """The rows of the contexts' own slots, [B, C, H]."""
        index_BCH = self.slot_BC[:, :, None].expand(-1, -1, states_BSH.shape[-1])
        return states_BSH.gather(1, index_BCH)

    def ahead(self, distance: int) -> Tensor:
        """The token ``distance`` after each context's slot, int64 [B, C]; the padding's if there is none."""
        return self.ids_BS.gather(1, (self.slot_BC + distance).clamp(max=self.ids_BS.shape[1] - 1))

    def targets(self, levels: int) -> Tensor:
        """The target of each level in each context, int64 [N, I]: tokens, NONE after the end."""
        targets = []
        for level in range(levels):
            inside_BC = self.slot_BC + 2 + level < self.length_B[:, None]
            targets.append(torch.where(inside_BC, self.ahead(2 + level), NONE)[self.there_BC])
        return torch.stack(targets, 1)

    def temperatures(self) -> Tensor:
        """The temperature of each context's text, float32 [N]."""
        return self.temperature_B[self.there_BC.nonzero()[:, 0]]

    def places(self, levels: int) -> Tensor:
        """Where, among B * S rows, the teacher's state lies that predicts the same token, int64 [N, I]."""
        size = self.ids_BS.shape[1]
        first_BC = torch.arange(len(self.ids_BS), device=self.ids_BS.device)[:, None] * size
        slots = [(self.slot_BC + 1 + level).clamp(max=size - 1) for level in range(levels)]
        return torch.stack([(first_BC + slot_BC)[self.there_BC] for slot_BC in slots], 1)
