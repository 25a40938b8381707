"""Engines whose drafts get other noise than the teacher draws with.

For measuring only. What the teacher draws is the same, so texts are; only how many drafts are accepted is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, TensorSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.shared_noise import SharedNoise
from draftwood.runtime.speculation.step import Outcome, Prefill

# D levels, U draft vocabulary

RULED_OUT = np.float32(-1e4)  # beside logits of some tens


class NoNoise(SharedNoise):
    """The noise of greedy text, whatever the sampling: a drafter proposes its most probable tokens."""

    def rows(self, spec: TensorSignature, sampling: Sampling, position: int) -> NDArray[np.float32]:
        """Zeros [D, U]."""
        return super().rows(spec, Sampling(), position)


class Subset(SharedNoise):
    """The teacher's noise, with all tokens ruled out that are not in ``kept``, teacher's ids."""

    def __init__(self, bundle: Bundle, kept: NDArray[np.int64]) -> None:
        super().__init__(bundle)
        proposed_U = np.arange(bundle.manifest.dims.vocabulary) if bundle.draft_ids is None else bundle.draft_ids
        self._out_U = np.where(np.isin(proposed_U, kept), np.float32(0), RULED_OUT)

    def rows(self, spec: TensorSignature, sampling: Sampling, position: int) -> NDArray[np.float32]:
        """[D, U]."""
        return super().rows(spec, sampling, position) + self._out_U


class OtherNoise:
    """An `Engine` before another, whose sessions and caches it uses."""

    max_batch = 1

    def __init__(self, engine: StagedEngine, noise: SharedNoise) -> None:
        self.bundle, self.behind, self._noise = engine.bundle, engine, noise

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        """An empty text of the engine behind."""
        return self.behind.begin(slots, sampling)

    def start(self, state: SequenceState, prompt_n: NDArray[np.int64]) -> Prefill:
        """Its prefill, in which nothing is drafted."""
        return self.behind.start(state, prompt_n)

    def step(self, states: Sequence[SequenceState], gear: Gear) -> list[Outcome]:
        """Its step, with drafts that get the other noise."""
        with self.behind.drafting.given(self._noise):
            return self.behind.step(states, gear)

    def close(self) -> None:
        """Nothing is open here."""
