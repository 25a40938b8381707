"""The draft step of drafters that rank levels in one pass: an extend pass, whose levels are ranked."""

from __future__ import annotations

from draftwood.compiler.drafters.common.layers import CachedNetwork
from draftwood.compiler.drafters.common.ranked import ranked_outputs
from draftwood.compiler.drafters.common.steps import CachedStep, draft_step, form_at
from draftwood.compiler.steps.step import Step
from draftwood.compiler.teachers.block import Form
from draftwood.compiler.teachers.decoder import Decoder

# I levels, K candidates


class LevelStep(CachedStep):
    """Candidates int64 [I, K] and scores float32 [I, K] as Medusa's, then the caches."""

    def __init__(self, drafter: CachedNetwork, decoder: Decoder, candidates: int, form: Form = "fused") -> None:
        super().__init__(drafter, decoder, form)
        self.candidates = candidates

    def forward(self, tokens, features, committed, accepted, noise, *caches):  # type: ignore[no-untyped-def]
        found = self.extended(tokens, features, committed, accepted, caches)
        levels_IH = self.drafter.levels(found, self.teacher)
        return (*self.drafter.best(levels_IH, self.teacher, self.candidates, noise), *found.caches)


def level_step(
    drafter: CachedNetwork,
    decoder: Decoder,
    levels: int,
    candidates: int,
    rows: int,
    slots: int,
    dtype: str = "float32",
) -> Step:
    """The draft step behind ``rows`` rows at KV length ``slots``; 0 and 0 mean any."""
    outputs = ranked_outputs(levels, candidates, "float32")
    module = LevelStep(drafter, decoder, candidates, form_at(slots))
    return draft_step(module, "draft", levels, outputs, rows, slots, dtype)
