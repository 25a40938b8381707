"""Two engines in lockstep: the first step at which they draw another token, and the first tensor that differs there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policy
from draftwood.runtime.proof import TOLERANCE
from draftwood.runtime.speculation.draft_cache import DeviceRows
from draftwood.runtime.speculation.sampling import Sampling, draw, margin
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import (
    Draft,
    HostParts,
    Outcome,
    Prefill,
    TeacherOutput,
    speculative_step,
)
from draftwood.tools.comparison.compare import host, relative_difference


def first_difference(
    engine: StagedEngine,
    reference: StagedEngine,
    prompt: Sequence[int],
    options: Options,
    policy: Policy,
    allowed: float = 0.0,
) -> str | None:
    """Decodes with ``engine`` while ``reference`` runs every step too; says what the first wrong step does wrong.

    A row's draw may differ where the reference's own margin is within ``allowed``. None where no step is wrong.
    """
    try:
        Decoding(_Lockstep(engine, reference, allowed), prompt, options, policy).run()
    except _Found as found:
        return str(found)
    return None


class _Found(Exception):
    pass


class _BothStates(SequenceState):
    """The text's state on each engine, moved alike; what decoding sees is the first's."""

    def __init__(self, engine: SequenceState, reference: SequenceState) -> None:
        super().__init__(engine.kv, engine.draft, engine.sampling)
        self.engine, self.reference = engine, reference

    def grow(self, slots: int) -> None:
        for state in (self.engine, self.reference):
            state.grow(slots)

    def branched(self, tokens_T: NDArray[np.int64], features_TF: NDArray[np.float32] | None = None) -> None:
        """Both branches are open since `_Lockstep.verify` compared them."""

    def commit(
        self, rows: Sequence[int], root: int | None = None, features: NDArray[np.float32] | DeviceRows | None = None
    ) -> None:
        for state in (self.engine, self.reference):
            state.commit(rows, root)
            state.check()
        self.root = self.engine.root


class _Lockstep(HostParts):
    """Two engines that a decoding takes for one: what it sees is the first's."""

    max_batch = 1
    padded = False

    def __init__(self, engine: StagedEngine, reference: StagedEngine, allowed: float) -> None:
        self.bundle = engine.bundle
        self._engine, self._reference, self._allowed = engine, reference, allowed

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        return _BothStates(self._engine.begin(slots, sampling), self._reference.begin(slots, sampling))

    def start(self, state: Any, prompt_n: NDArray[np.int64]) -> Prefill:
        self._reference.start(state.reference, prompt_n)
        done = self._engine.start(state.engine, prompt_n)
        state.root = state.engine.root
        return done

    def step(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Outcome]:
        return speculative_step(self, states, gears)

    def draft(self, states: Sequence[Any], gears: Sequence[Gear]) -> list[Draft]:
        return self._engine.draft([state.engine for state in states], gears)

    def verify(self, states: Sequence[Any], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        (state,), (draft,) = states, drafts
        (want,), (got,) = self._reference.verify([state.reference], drafts), self._engine.verify([state.engine], drafts)
        for one, output in ((state.reference, want), (state.engine, got)):
            one.branched(draft.tokens_T, output.features_RF)
        for row in range(draft.tree.rows):
            position = state.length + int(draft.tree.depths[row]) + 1
            drawn = [draw(output.logits_RV[row], state.sampling, position) for output in (want, got)]
            if drawn[0] != drawn[1] and margin(want.logits_RV[row], state.sampling, position) > self._allowed:
                where = _first_tensor(state.engine, state.reference, draft.tree.rows, got, want)
                raise _Found(f"row {row} draws {drawn[1]} for position {position}, expected {drawn[0]}; {where}")
        return [got]

    def close(self) -> None:
        """Both belong to the caller."""


def _first_tensor(
    engine: SequenceState, reference: SequenceState, rows: int, got: TeacherOutput, want: TeacherOutput
) -> str:
    """The first that differs in the order of the computation: committed slots, rows of the branch by layer, outputs.

    A committed slot that differs is the fault of an earlier step: the caches had parted before.
    """
    for name, part, mine, theirs, axis in _tensors(engine, reference, rows, got, want):
        apart = relative_difference(mine, theirs)
        if apart > TOLERANCE:
            by_row = np.abs(mine - theirs).max(axis=tuple(i for i in range(mine.ndim) if i != axis))
            first = int(np.argmax(~(by_row <= TOLERANCE * max(1.0, float(np.abs(theirs).max())))))
            return f"{name} differs first, {part} {first}, by {apart:.1e}"
    return "no tensor differs by more than rounding"


def _tensors(
    engine: SequenceState, reference: SequenceState, rows: int, got: TeacherOutput, want: TeacherOutput
) -> Iterator[tuple[str, str, NDArray, NDArray, int]]:
    """Name, what a row is called, what was got and what was expected, and the axis of rows."""
    length = engine.length
    for part, slots in (("committed slot", slice(0, length)), ("branch row", slice(length, length + rows))):
        for i, buffers in enumerate(zip(engine.kv.buffers, reference.kv.buffers, strict=True)):
            mine, theirs = (host(buffer[:, slots]) for buffer in buffers)
            if mine.shape == theirs.shape:
                yield f"{'value' if i % 2 else 'key'}_cache.{i // 2}", part, mine, theirs, 1
    yield "features", "row", got.features_RF, want.features_RF, 0
    yield "logits", "row", got.logits_RV, want.logits_RV, 0
