"""FastEagle's draft step: an extend pass whose levels are ranked."""

from __future__ import annotations

from draftwood.compiler.drafters.common.ranked import ranked_outputs
from draftwood.compiler.drafters.common.steps import CachedStep, draft_step, form_at
from draftwood.compiler.drafters.fasteagle.network import FastEagle
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder

# I levels, K candidates


class FastEagleStep(CachedStep):
    """Candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    drafter: FastEagle

    def __init__(self, drafter: FastEagle, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, committed, accepted, noise, *caches):  # type: ignore[no-untyped-def]
        cascade = self.extended(tokens, features, committed, accepted, caches)
        return (*self.drafter.best(cascade.normed, self.teacher, self.candidates, noise), *cascade.caches)


def fasteagle_step(
    drafter: FastEagle, decoder: Decoder, candidates: int, rows: int, slots: int, dtype: str = "float32"
) -> Step:
    """FastEagle's draft step behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    levels = drafter.config.block.layers
    outputs = ranked_outputs(levels, candidates, "float32")
    module = FastEagleStep(drafter, decoder, candidates, form_at(slots))
    return draft_step(module, "draft", levels, outputs, rows, slots, dtype)
