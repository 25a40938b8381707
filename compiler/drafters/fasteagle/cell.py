"""The cell of a FastEagle cascade: what a level's hidden state becomes where a draft node's token is known.

A gated recurrence along the path, as DSpark's sequential head (2026, arXiv 2607.05147) is one, but in front of the
output matrix. It reads the state that the parent's cell has left, the embedding of the node's token and the hidden
state of the level that ranks its children, and makes the hidden state that they are ranked by. The root has none: the
cascade itself reads the root's token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# E nodes, H hidden, R width of the state


class Cell(nn.Module):
    """Three matrices make gate, content and output of what is read; ``out`` makes of the output what a level gains.

    The gate says how much of the state stays, and the content takes the rest's place.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, 3 * width, bias=False)
        self.token = nn.Linear(hidden, 3 * width, bias=False)
        self.level = nn.Linear(hidden, 3 * width)
        self.out = nn.Linear(width, hidden, bias=False)

    def forward(self, state_ER: Tensor, embedded_EH: Tensor, level_EX: Tensor) -> tuple[Tensor, Tensor]:
        """(what the level gains [E, H], what the children's cells read [E, R]).

        ``level`` [E, 3R] or [1, 3R] is what ``level`` makes of the level's hidden state, alike for all its nodes.
        """
        gate_ER, content_ER, output_ER = (self.state(state_ER) + self.token(embedded_EH) + level_EX).chunk(3, -1)
        content_ER = torch.tanh(content_ER)
        state_ER = content_ER + torch.sigmoid(gate_ER) * (state_ER - content_ER)
        return self.out(torch.tanh(output_ER)), state_ER
