"""The DSpark drafter (2026, arXiv 2607.05147): DFlash's block, whose levels a sequential head ties to the path.

The block makes a hidden state and logits for every level. To the logits of a node's children the sequential head adds a
bias that the node's token makes. The confidence head says how likely the best of them is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.layers import Extended, cast_to
from draftwood.compiler.drafters.common.trees import taken
from draftwood.compiler.drafters.dflash.network import Denoised, DFlash, DFlashConfig
from draftwood.compiler.teachers.decoder import TeacherEnds

# E nodes, D levels of a tree, H hidden, R rank, V vocabulary, U draft vocabulary, k candidates

# No confidence is lower than the probability of this logit: below it fp32 has no logarithm of a probability.
_LEAST_LOGIT = -60.0

Head = Literal["vanilla", "gated", "rnn"]
Confidence = Literal["none", "hidden", "markov"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkConfig(DFlashConfig):
    """DFlash's block and its two heads."""

    # Rank of the bias that the token before a level adds to its logits, and how it is made.
    markov_rank: int
    markov_head: Head
    # Input of the confidence head: none; a level's hidden state; or that and the token before.
    confidence: Confidence


class MarkovHead(nn.Module):
    """The bias that the token before a level adds to the level's logits; parameters have DeepSpec's names.

    A matrix makes the bias from a latent of low rank. The latent has three forms. Vanilla is the token's row. Gated is
    that row, gated by the level's hidden state. Rnn is the output of a recurrence along the path, which reads both.
    """

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


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one depth after the heads. They hold the latent of their children's bias and the state of the
    recurrence. If there is a head for it, they also hold the logarithm of their children's confidence [E, 1]."""

    drafter: DSpark
    levels_DH: Tensor
    # Logits of the levels without bias, with their noise.
    logits_DU: Tensor
    depth: int
    latent_ER: Tensor
    state_ER: Tensor
    confidence_E1: Tensor | None

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        """With a confidence head the best candidate has its confidence, and the others keep their ratio to it."""
        bias_EU = cast_to(self.drafter.markov_head.markov_w2(self.latent_ER), torch.float32)
        ids_Ek, logp_Ek = self.drafter.chosen(self.logits_DU[self.depth : self.depth + 1] + bias_EU, k)
        if self.confidence_E1 is not None:
            logp_Ek = logp_Ek - logp_Ek[:, :1] + self.confidence_E1
        return ids_Ek, logp_Ek

    def below(self, tokens_E: Tensor, source_E: Tensor | None, masked_ES: Tensor | None) -> Nodes:
        state_ER = taken(self.state_ER, source_E)
        depth = self.depth + 1
        run = self.drafter.run(tokens_E, self.levels_DH[depth : depth + 1], state_ER)
        return replace(self, depth=depth, latent_ER=run[0], state_ER=run[1], confidence_E1=run[2])


class DSpark(DFlash):
    """The network. Parameter names are the bundle's weight names; the caller fills them."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, positions: int) -> None:
        super().__init__(config, positions)
        hidden, rank = config.block.hidden, config.markov_rank
        self.markov_head = MarkovHead(
            config.markov_head, config.block.vocabulary, config.draft_vocabulary, hidden, rank
        )
        if config.confidence != "none":
            self.confidence_proj = nn.Linear(hidden + (rank if config.confidence == "markov" else 0), 1)

    def root(self, extended: Extended, teacher: TeacherEnds, noise_DU: Tensor) -> Nodes:
        assert isinstance(extended, Denoised), "what DFlash's block leaves"
        levels_DH = extended.normed_IH[: noise_DU.shape[0]]
        logits_DU = self.perturbed(self.logits(levels_DH, teacher), noise_DU)
        state_1R = levels_DH.new_zeros(1, self.config.markov_rank)
        run = self.run(extended.root_1, levels_DH[:1], state_1R)
        return Nodes(self, levels_DH, logits_DU, 0, *run)

    def run(self, tokens_E: Tensor, level_1H: Tensor, state_ER: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The heads on nodes of one depth: the latent of the bias [E, R], the state [E, R], the confidence [E, 1]."""
        level_EH = level_1H.expand(tokens_E.shape[0], -1)
        token_ER, latent_ER, state_ER = self.markov_head(tokens_E, level_EH, state_ER)
        return latent_ER, state_ER, self._confidence(token_ER, level_EH)

    def _confidence(self, token_ER: Tensor, level_EH: Tensor) -> Tensor | None:
        if self.config.confidence == "none":
            return None
        read = torch.cat((level_EH, token_ER), -1) if self.config.confidence == "markov" else level_EH
        logit_E1 = cast_to(self.confidence_proj(read), torch.float32)
        return torch.sigmoid(logit_E1.clamp(min=_LEAST_LOGIT)).log()
