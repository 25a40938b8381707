"""DSpark's sequential head (2026, arXiv 2607.05147): what the token before a level adds to the level's logits.

The token makes a latent of low rank, and a matrix makes the bias of it: the token's own row (vanilla), that row gated
by the level's hidden state (gated), or the output of a recurrence along the path that reads both (rnn).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.dspark.config import Head

# E nodes, H hidden, R rank, V vocabulary, U draft vocabulary


class MarkovHead(nn.Module):
    """Parameter names are those of DeepSpec's layout."""

    def __init__(self, kind: Head, vocabulary: int, draft: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, draft, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, tokens_E: Tensor, level_EH: Tensor, state_ER: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the tokens' rows [E, R], the latent that ``markov_w2`` reads [E, R], the recurrence's state [E, R])."""
        token_ER = self.markov_w1(tokens_E)
        if self.kind == "gated":
            gate_ER = torch.sigmoid(self.gate_proj(torch.cat((level_EH, token_ER), -1)))
            return token_ER, gate_ER * token_ER, state_ER
        if self.kind == "vanilla":
            return token_ER, token_ER, state_ER
        joint_EX = self.joint_proj(torch.cat((state_ER, token_ER, level_EH), -1))
        gate_ER, content_ER, output_ER = joint_EX.chunk(3, -1)
        content_ER = torch.tanh(content_ER)
        state_ER = content_ER + torch.sigmoid(gate_ER) * (state_ER - content_ER)
        return token_ER, torch.tanh(output_ER), state_ER
