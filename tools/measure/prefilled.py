"""A text after its prompt that is decoded many times: one prefill serves every policy, round and temperature."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, Outcome, Parts, Prefill, TeacherOutput


class Prefilled(Engine):
    """An engine for one prompt: a text begins with a copy of its caches; the ``wrapped`` engine does the rest."""

    def __init__(self, engine: Engine, prompt_n: NDArray[np.int64], slots: int) -> None:
        self.bundle, self.wrapped = engine.bundle, engine
        self._filled = engine.begin(slots)
        # The engine's next step writes over its outputs.
        self._logits_V = engine.prefill(self._filled, prompt_n).logits_RV[-1].copy()

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        """A copy of the text after its prompt, at ``slots`` slots or the prefill's, if those are more."""
        state = copy.deepcopy(self._filled)
        state.sampling = sampling or Sampling()
        if state.slots < slots:
            state.grow(slots)
        return state

    def read(self, state: SequenceState, prompt_n: NDArray[np.int64]) -> Generator[None, None, Prefill]:
        """Draws the first token in no launch; the prompt is in the caches."""
        state.root = draw(self._logits_V, state.sampling, state.length)
        yield from ()
        return Prefill((state.root,), len(prompt_n))

    @property
    def parts(self) -> Parts[Any]:
        return self.wrapped.parts

    def step(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Outcome]:
        return self.wrapped.step(states, gears)

    def new_kv(self, slots: int) -> Any:
        return self.wrapped.new_kv(slots)

    def chunk(self, state: SequenceState, left: int) -> int:
        return self.wrapped.chunk(state, left)

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        return self.wrapped.append(state, chunk_n)

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        return self.wrapped.verify(states, drafts)

    def close(self) -> None:
        """Nothing is open here."""
