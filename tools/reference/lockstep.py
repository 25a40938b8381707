"""Whole texts of two engines compared; where a token differs, the step at which it happened is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policy
from draftwood.runtime.speculation.sampling import Sampling, draw, margin
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, StepOutcome, TeacherOutput, speculative_step
from draftwood.tools.comparison import single
from draftwood.tools.comparison.single import Rows, rows_of
from draftwood.tools.lab.differences import explain, logit_noise
from draftwood.tools.reference.dump import StepDump, observed
from draftwood.trees import TreeBuffers

Side = Literal["reference", "engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDifference:
    """Where a text leaves the reference's plain one, and how near its decision was to another.

    ``margin`` and ``tolerance`` are those of ``draftwood bench``: a ``tie`` is a decision closer than the noise of
    both engines' logits. ``dump`` is the folder of the step, where one was asked for and the step was found.
    """

    side: Side
    mode: str
    position: int
    expected: int
    got: int
    margin: float
    tolerance: float
    tie: bool
    dump: str | None


def compare_texts(
    engine: StagedEngine,
    reference: StagedEngine,
    prompt: Sequence[int],
    options: Options,
    modes: dict[str, Policy],
    dump: Path | None = None,
) -> tuple[tuple[int, ...], list[TextDifference]]:
    """The reference's text in its first mode, plain decoding, and how all other texts differ from it.

    Args:
        modes: name -> policy; both engines decode in each.
        dump: where the first step goes at which a text that differs by more than a tie goes wrong; the names of
            side and mode are added.
    """
    (plain, policy), *_ = modes.items()
    base = Decoding(reference, prompt, options, policy).run().token_ids
    found = []
    for side, one, other in (("reference", reference, engine), ("engine", engine, reference)):
        for mode, policy in modes.items():
            if one is reference and mode == plain:
                continue
            text = Decoding(one, prompt, options, policy).run().token_ids
            if text != base:
                found.append(_difference(side, mode, one, other, prompt, base, text, options, policy, dump))
    return base, found


def _difference(
    side: Side,
    mode: str,
    one: StagedEngine,
    other: StagedEngine,
    prompt: Sequence[int],
    base: tuple[int, ...],
    text: tuple[int, ...],
    options: Options,
    policy: Policy,
    dump: Path | None,
) -> TextDifference:
    whole = [*prompt, *base]
    noise = logit_noise(one, whole) + logit_noise(other, whole)
    found = explain(other if side == "engine" else one, mode, prompt, base, text, options.sampling, noise)
    step = None if found.tie or dump is None else first_difference(one, other, prompt, options, policy, found.tolerance)
    folder = step.write(dump.with_name(f"{dump.name}-{side}-{mode}")) if step and dump else None
    return TextDifference(
        side=side,
        mode=mode,
        position=found.position,
        expected=found.plain_token,
        got=found.speculative_token,
        margin=found.margin,
        tolerance=found.tolerance,
        tie=found.tie,
        dump=str(folder) if folder else None,
    )


def first_difference(
    engine: StagedEngine,
    reference: StagedEngine,
    prompt: Sequence[int],
    options: Options,
    policy: Policy,
    allowed: float = 0.0,
) -> StepDump | None:
    """Decodes with ``engine`` while ``reference`` runs every step too; the first step that draws another token.

    A row's draw may differ where the reference's own margin is within ``allowed``.
    """
    try:
        Decoding(_Lockstep(engine, reference, allowed), prompt, options, policy).run()
    except _Found as found:
        return found.dump
    return None


class _Found(Exception):
    def __init__(self, dump: StepDump) -> None:
        super().__init__(dump.message)
        self.dump = dump


class _BothStates(SequenceState):
    """The text's state on each engine, moved alike; what decoding sees is the first's."""

    def __init__(self, engine: SequenceState, reference: SequenceState) -> None:
        super().__init__(engine.kv, engine.draft, engine.sampling)
        self.engine, self.reference = engine, reference
        self.text: list[int] = []
        self.tokens_T: NDArray[np.int64] = np.zeros(0, np.int64)

    def grow(self, slots: int) -> None:
        for state in (self.engine, self.reference):
            state.grow(slots)

    def commit(self, rows: Sequence[int], root: int | None = None) -> None:
        for state in (self.engine, self.reference):
            state.commit(rows, root)
            state.check()
        self.text += self.tokens_T[list(rows)].tolist()
        self.root = self.engine.root


class _Lockstep:
    """Two engines that a decoding takes for one: what it sees is the first's."""

    max_batch = 1

    def __init__(self, engine: StagedEngine, reference: StagedEngine, allowed: float) -> None:
        self.bundle = engine.bundle
        self._engine, self._reference, self._allowed = engine, reference, allowed

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        return _BothStates(self._engine.begin(slots, sampling), self._reference.begin(slots, sampling))

    def start(self, state: Any, prompt_n: NDArray[np.int64]) -> StepOutcome:
        self._reference.start(state.reference, prompt_n)
        state.text += prompt_n.tolist()
        outcome = self._engine.start(state.engine, prompt_n)
        state.root = state.engine.root
        return outcome

    def step(self, states: Sequence[SequenceState], gear: Gear) -> list[StepOutcome]:
        return speculative_step(self, states, gear)

    def draft(self, states: Sequence[Any], gear: Gear) -> list[Draft]:
        return self._engine.draft([state.engine for state in states], gear)

    def verify(self, states: Sequence[Any], drafts: Sequence[Draft]) -> TeacherOutput:
        ((state, (tokens_T, _, tree, _)),) = zip(states, drafts, strict=True)
        state.tokens_T = tokens_T
        want = single.verify(self._reference, state.reference, tokens_T, tree)
        got = self._engine.verify([state.engine], drafts)
        for row in np.flatnonzero(tree.valid):
            position = state.length + int(tree.depths[row]) + 1
            drawn = [draw(logits[row], state.sampling, position) for logits in (want.logits_RV, got.logits_BRV[0])]
            if drawn[0] != drawn[1] and margin(want.logits_RV[row], state.sampling, position) > self._allowed:
                message = f"row {row} draws {drawn[1]} for position {position}, expected {drawn[0]}"
                raise _Found(self._dump(state, tree, message, want, rows_of(got)))
        return got

    def close(self) -> None:
        """Both belong to the caller."""

    def _dump(self, state: _BothStates, tree: TreeBuffers, message: str, want: Rows, got: Rows) -> StepDump:
        rows = state.length + tree.rows
        return StepDump(
            reason="tokens",
            message=message,
            teacher=self.bundle.manifest.teacher.digest,
            slots=state.slots,
            text=tuple(state.text),
            tokens=state.tokens_T,
            tree=tree,
            expected=observed(state.reference, rows, want),
            got=observed(state.engine, rows, got),
        )
