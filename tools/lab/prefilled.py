"""A text behind its prompt that is decoded many times: one prefill serves every policy, round and temperature."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Outcome, Prefill


class Prefilled:
    """An `Engine` for one prompt: ``start`` copies what a prefill has left, instead of running it."""

    max_batch = 1
    padded = False

    def __init__(self, engine: StagedEngine, prompt_n: NDArray[np.int64], slots: int) -> None:
        self.bundle, self.behind = engine.bundle, engine
        self._filled = engine.begin(slots)
        # The engine's next step writes over its outputs.
        self._logits_V = engine.prefill(self._filled, prompt_n).logits_RV[-1].copy()

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        """A copy of the text behind its prompt, at ``slots`` slots or the prefill's, if those are more."""
        state = copy.deepcopy(self._filled)
        state.sampling = sampling or Sampling()
        if state.slots < slots:
            state.grow(slots)
        return state

    def start(self, state: SequenceState, prompt_n: NDArray[np.int64]) -> Prefill:
        """Draws the first token; the prompt is in the caches."""
        state.root = draw(self._logits_V, state.sampling, state.length)
        return Prefill((state.root,), len(prompt_n))

    def step(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Outcome]:
        """A step of the engine that prefilled."""
        return self.behind.step(states, gears)

    def close(self) -> None:
        """Nothing is open here."""
