"""DFlash's draft step: one pass, whose levels are ranked."""

from __future__ import annotations

from draftwood.compiler.drafters.common.ranked import ranked_outputs
from draftwood.compiler.drafters.common.steps import CachedStep, draft_step, form_at
from draftwood.compiler.drafters.dflash.network import DFlash
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder

# I levels, K candidates


class DFlashStep(CachedStep):
    """Candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    drafter: DFlash

    def __init__(self, drafter: DFlash, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, committed, accepted, *caches):  # type: ignore[no-untyped-def]
        levels = self.extended(tokens, features, committed, accepted, caches)
        return (*self.drafter.best(levels.normed, self.teacher, self.candidates), *levels.caches)


def dflash_step(
    drafter: DFlash, decoder: Decoder, candidates: int, rows: int, slots: int, dtype: str = "float32"
) -> Step:
    """DFlash's draft step behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    outputs = ranked_outputs(drafter.config.levels, candidates, "float32")
    return draft_step(DFlashStep(drafter, decoder, candidates, form_at(slots)), "draft", outputs, rows, slots, dtype)
