"""P-EAGLE's draft step: an extend pass, a pass over mask rows, and a ranking of all levels."""

from __future__ import annotations

from typing import cast

from draftwood.compiler.drafters.common.ranked import ranked_outputs
from draftwood.compiler.drafters.common.steps import CachedStep, draft_step, form_at
from draftwood.compiler.drafters.eagle3.network import Written
from draftwood.compiler.drafters.peagle.network import PEagle
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder

# I levels, K candidates


class PEagleStep(CachedStep):
    """Candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    drafter: PEagle

    def __init__(self, drafter: PEagle, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        written = cast(Written, self.extended(tokens, features, committed, accepted, caches))
        levels = self.drafter.levels(written, self.teacher)
        return (*self.drafter.best(levels, self.teacher, self.candidates), *written.caches)


def peagle_step(
    drafter: PEagle, decoder: Decoder, candidates: int, rows: int, slots: int, dtype: str = "float32"
) -> Step:
    """P-EAGLE's draft step behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    outputs = ranked_outputs(drafter.config.levels, candidates, "float32")
    return draft_step(PEagleStep(drafter, decoder, candidates, form_at(slots)), "draft", outputs, rows, slots, dtype)
