"""The draft step of Medusa heads: ``features`` [1, H], the teacher's last hidden state, and ``noise`` [I, U]."""

from __future__ import annotations

from torch import Tensor, nn

from draftwood.compiler.drafters.common.ranked import ranked_outputs
from draftwood.compiler.drafters.medusa.network import MedusaHeads
from draftwood.compiler.steps.step import Step, tensor
from draftwood.compiler.teachers.decoder import Decoder, TeacherEnds
from draftwood.manifest import StepSignature


class MedusaStep(nn.Module):
    """One hidden state and each level's noise in, candidates of every level out."""

    def __init__(self, heads: MedusaHeads, decoder: Decoder, candidates: int) -> None:
        super().__init__()
        self.drafter, self.candidates = heads, candidates
        self.teacher = TeacherEnds(decoder, scores=heads.tied)

    def forward(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.drafter(features, noise, self.teacher, self.candidates)


def medusa_step(heads: MedusaHeads, decoder: Decoder, candidates: int, dtype: str = "float32") -> Step:
    """The draft step of Medusa heads."""
    signature = StepSignature(
        name="draft",
        kind="draft",
        rows=1,
        slots=0,
        inputs=(
            tensor("features", dtype, 1, decoder.feature_width),
            tensor("noise", dtype, len(heads.heads), heads.draft_vocabulary),
        ),
        outputs=tuple(ranked_outputs(len(heads.heads), candidates, dtype)),
        aliases={},
    )
    return Step(MedusaStep(heads, decoder, candidates), signature)
