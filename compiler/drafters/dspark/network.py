"""The DSpark drafter (2026, arXiv 2607.05147): DFlash's block, whose levels a sequential head ties to the path.

The block makes a hidden state and logits for every level. To the logits of a node's children the sequential head adds a
bias that the node's token makes. The confidence head says how likely the best of them is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from draftwood.compiler.drafters.common.layers import Extended, cast_to
from draftwood.compiler.drafters.dflash.network import Denoised, DFlash
from draftwood.compiler.drafters.dspark.config import DSparkConfig
from draftwood.compiler.drafters.dspark.head import MarkovHead
from draftwood.compiler.teachers.decoder import TeacherEnds

# E nodes, D levels of a tree, H hidden, R rank, U draft vocabulary, k candidates

# No confidence is lower than the probability of this logit: behind it fp32 has no logarithm of a probability.
_LEAST_LOGIT = -60.0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one depth as the heads have run them: what makes the bias of their children's logits, the state of the
    recurrence, and the logarithm of their children's confidence [E, 1], where there is a head for it."""

    drafter: DSpark
    levels_DH: Tensor
    # Of the levels by themselves, with their noise.
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

    def below(self, tokens_E: Tensor, source_E: Tensor, masked_ES: Tensor) -> Nodes:
        state_ER = self.state_ER.index_select(0, source_E)
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
        """The heads on nodes of one depth: what makes the bias [E, R], the state [E, R], the confidence [E, 1]."""
        level_EH = level_1H.expand(tokens_E.shape[0], -1)
        token_ER, latent_ER, state_ER = self.markov_head(tokens_E, level_EH, state_ER)
        return latent_ER, state_ER, self._confidence(token_ER, level_EH)

    def _confidence(self, token_ER: Tensor, level_EH: Tensor) -> Tensor | None:
        if self.config.confidence == "none":
            return None
        read = torch.cat((level_EH, token_ER), -1) if self.config.confidence == "markov" else level_EH
        logit_E1 = cast_to(self.confidence_proj(read), torch.float32)
        return torch.sigmoid(logit_E1.clamp(min=_LEAST_LOGIT)).log()
