"""An engine whose drafts do not share the teacher's noise: a drafter proposes its most probable tokens.

For measuring only. What the teacher draws is the same, so texts are; only how many drafts are accepted is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, TensorSignature
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.shared_noise import SharedNoise
from draftwood.runtime.speculation.step import StepOutcome

# D levels, U draft vocabulary


class NoNoise(SharedNoise):
    """The noise of greedy text, whatever the sampling."""

    def rows(self, spec: TensorSignature, sampling: Sampling, position: int) -> NDArray[np.float32]:
        """Zeros [D, U]."""
        return super().rows(spec, Sampling(), position)


class Uncoupled:
    """An `Engine` before another, whose sessions and caches it uses."""

    max_batch = 1

    def __init__(self, engine: StagedEngine) -> None:
        self.bundle, self.behind = engine.bundle, engine
        self._none = NoNoise(engine.bundle)

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        """An empty text of the engine behind."""
        return self.behind.begin(slots, sampling)

    def start(self, state: SequenceState, prompt_n: NDArray[np.int64]) -> StepOutcome:
        """Its prefill, in which nothing is drafted."""
        return self.behind.start(state, prompt_n)

    def step(self, states: Sequence[SequenceState], gear: Gear) -> list[StepOutcome]:
        """Its step, with drafts that see no noise."""
        drafting = self.behind.drafting
        shared, drafting.noise = drafting.noise, self._none
        try:
            return self.behind.step(states, gear)
        finally:
            drafting.noise = shared

    def close(self) -> None:
        """Nothing is open here."""
