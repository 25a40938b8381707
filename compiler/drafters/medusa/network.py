"""Medusa heads (Cai et al., 2024) and their draft step: a hidden state in, the best tokens of every level out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftwood.compiler.steps.step import Step, signed
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds

# H hidden, V vocabulary, U draft vocabulary, I heads (levels), K candidates a level


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Heads, residual blocks of each, and whether the teacher's output matrix serves them all."""

    heads: int
    blocks: int
    tied: bool
    # Whether blocks have a bias.
    bias: bool = True
    # Tokens that can be proposed; None for the teacher's vocabulary.
    vocabulary: int | None = None
    # Linear layers of the network that are W8A8.
    quantised: tuple[str, ...] = ()


class Head(nn.Module):
    """Residual blocks x + silu(Wx + b), then an output matrix; ``out`` is absent if heads are tied."""

    def __init__(self, hidden: int, vocabulary: int, blocks: int, tied: bool, bias: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(blocks))
        if not tied:
            self.out = nn.Linear(hidden, vocabulary, bias=False)

    def features(self, hidden_1H: Tensor) -> Tensor:
        for block in self.blocks:
            hidden_1H = hidden_1H + F.silu(block(hidden_1H))
        return hidden_1H


class MedusaHeads(nn.Module):
    """Head i proposes the token i + 2 places after the one whose hidden state is given (0-based i).

    Tied heads have no output matrix of their own: they are given the teacher's. Heads that rank a part of the
    vocabulary, ``drafted`` ids, have a map to the teacher's.
    """

    teacher_ids: Tensor

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        heads: int,
        blocks: int,
        tied: bool,
        bias: bool = True,
        drafted: int | None = None,
    ) -> None:
        super().__init__()
        self.tied, self.mapped = tied, drafted is not None
        self.draft_vocabulary = drafted or vocabulary
        self.heads = nn.ModuleList(Head(hidden, self.draft_vocabulary, blocks, tied, bias) for _ in range(heads))
        if drafted is not None:
            self.register_buffer("teacher_ids", torch.zeros(drafted, dtype=torch.int64))

    def forward(
        self, hidden_1H: Tensor, noise_IV: Tensor, teacher: TeacherEnds, candidates: int
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens int64 [I, K] and their log-probabilities [I, K], best first.

        ``noise`` is the noise that drafter and teacher share, times the temperature: 0 for greedy text.
        """
        heads = cast(Iterable[Head], self.heads)
        if self.tied:
            logits_IV = teacher.scores(torch.cat([head.features(hidden_1H) for head in heads]))
        else:
            logits_IV = torch.cat([head.out(head.features(hidden_1H)) for head in heads])
        logits_IV = logits_IV + noise_IV
        top_IK, tokens_IK = logits_IV.topk(candidates, -1)
        if self.mapped:
            tokens_IK = self.teacher_ids.index_select(0, tokens_IK.flatten()).view_as(tokens_IK)
        return tokens_IK, top_IK - logits_IV.logsumexp(-1, keepdim=True)


class MedusaStep(nn.Module):
    """``features`` [1, H], the teacher's last hidden state, and ``noise`` [I, U] in; candidates of every level out."""

    def __init__(self, heads: MedusaHeads, decoder: Decoder, candidates: int) -> None:
        super().__init__()
        self.drafter, self.candidates = heads, candidates
        self.teacher = TeacherEnds(decoder, scores=heads.tied)

    def forward(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.drafter(features, noise, self.teacher, self.candidates)


def medusa_step(heads: MedusaHeads, decoder: Decoder, candidates: int, dtype: str = "float32") -> Step:
    """The draft step of Medusa heads."""
    levels = len(heads.heads)
    sizes = {"N": 1, "W": decoder.feature_width, "D": levels, "U": heads.draft_vocabulary, "K": candidates}
    signature = signed("draft", "draft", sizes, {}, rows=1, dtype=dtype, parts={"noise", "heads"})
    return Step(MedusaStep(heads, decoder, candidates), signature)
