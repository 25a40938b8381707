"""The step timers: the time of a step on this machine, part by part, and of every gear of a bundle as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from draftwood.planned import StepTime

if TYPE_CHECKING:
    from draftwood.manifest import Gear
    from draftwood.runtime.engines.engine import Engine
    from draftwood.runtime.speculation.sequence import SequenceState
    from draftwood.runtime.speculation.step import Draft

# Text lengths, as parts of the KV length, after which a gear is timed: a line through them is its table.
PLACES = (0.2, 0.8)
# Rows that a draft finds to be written, as many as a step accepts or so.
ACCEPTED = 3
LEAST_ROUNDS = 3
# Steps in a row, as a text takes them. The first one is not counted: it finds the processor's caches full of another
# gear's weights, and a graph perhaps not yet opened.
IN_A_ROW = 4
# Tokens of plain decoding or of a prompt that a late draft finds to be written.
LATE = 128


class Spent(NamedTuple):
    """Microseconds of a step's parts; ``accept`` is the draw and the walk on the host."""

    draft: float
    verify: float
    accept: float


def time_step(
    engine: Engine,
    states: Sequence[SequenceState],
    gear: Gear | None,
    verified: Sequence[Draft],
    path: Sequence[int],
) -> Spent:
    """One step of texts in one launch, which commits ``path``. ``verified`` replaces the gear's draft, which is timed
    all the same."""
    from draftwood.runtime.speculation.step import accept

    began = time.perf_counter_ns()
    if gear:
        engine.draft(states, [gear] * len(states))
    drafted = time.perf_counter_ns()
    outputs = engine.verify(states, verified)
    ran = time.perf_counter_ns()
    for state, draft, output in zip(states, verified, outputs, strict=True):
        state.branched(draft.tokens_T, output.features_RF)
        accept(state, draft, output.logits_RV.__getitem__)
        state.commit(path)
    took = time.perf_counter_ns()
    return Spent((drafted - began) / 1e3, (ran - drafted) / 1e3, (took - ran) / 1e3)


def in_rounds(visit: Callable[[], None], least: int, seconds: float) -> int:
    """Repeats a round at least so often and so long; how many there were."""
    began, rounds = time.perf_counter(), 0
    while rounds < least or time.perf_counter() - began < seconds:
        visit()
        rounds += 1
    return rounds


def time_gears(
    engine: Engine, texts: Sequence[tuple[Gear, int]], count: int, seconds: float
) -> dict[tuple[str, int], float]:
    """Median microseconds for every gear of the steps that ``count`` texts of a length share, gears in turns, so that a
    drift meets all of them: as a decoding takes them, in its launches, commits and all, each after the last one's."""
    keys = sorted({(gear.slots, length) for gear, length in texts})
    caches = {key: [filled(engine, *key) for _ in range(count)] for key in keys}
    spent: dict[tuple[str, int], list[float]] = {(gear.name, length): [] for gear, length in texts}

    def visit() -> None:
        for gear, length in texts:
            states = caches[gear.slots, length]
            _go_back(states, length)
            row = [_step_us(engine, states, gear, length) for _ in range(IN_A_ROW)]
            spent[gear.name, length] += row[1:]

    in_rounds(visit, LEAST_ROUNDS, seconds)
    return {key: float(np.median(times)) for key, times in spent.items()}


def _step_us(engine: Engine, states: Sequence[SequenceState], gear: Gear, length: int) -> float:
    """One such step; texts that have no room for it go back to their beginning."""
    if not all(state.kv.room(_rows(engine, gear)) for state in states):
        _go_back(states, length)
    began = time.perf_counter_ns()
    engine.step(states, [gear] * len(states))
    return (time.perf_counter_ns() - began) / 1e3


def _go_back(states: Sequence[SequenceState], length: int) -> None:
    for state in states:
        state.rollback(length)


def filled(engine: Engine, slots: int, length: int) -> SequenceState:
    """A text as it stands after a step: the drafter's caches hold all of it but the last rows."""
    state = engine.begin(slots)
    drafting = next((gear for gear in engine.bundle.manifest.gears if gear.slots == slots and gear.neural), None)
    if drafting is None or length <= ACCEPTED:
        engine.prefill(state, np.zeros(length, np.int64))
        return state
    engine.prefill(state, np.zeros(length - ACCEPTED, np.int64))
    engine.draft([state], [drafting])
    engine.prefill(state, np.zeros(ACCEPTED, np.int64))
    return state


def tune(engine: Engine, seconds: float, batches: Sequence[int] = ()) -> list[StepTime]:
    """Times of a step of every gear, after texts of two lengths, measured for about ``seconds``. As long again for
    every number of texts in ``batches`` that share a launch."""
    texts = [(gear, length) for gear in engine.bundle.manifest.gears for length in _lengths(engine, gear)]
    alone, *shared = (
        [
            StepTime(gear=name, length=length, us=round(us, 2), texts=count)
            for (name, length), us in time_gears(engine, texts, count, seconds).items()
        ]
        for count in (1, *batches)
    )
    return [*alone, *_late(engine), *chain.from_iterable(shared)]


def _rows(engine: Engine, gear: Gear) -> int:
    return next(tree.rows for tree in engine.bundle.manifest.trees if tree.name == gear.tree)


def _lengths(engine: Engine, gear: Gear) -> Sequence[int]:
    return sorted({max(1, int((gear.slots - 2 - _rows(engine, gear)) * place)) for place in PLACES})


def _late(engine: Engine) -> list[StepTime]:
    """A step whose draft finds `LATE` tokens that its caches lack; none if the drafter has no caches."""
    manifest = engine.bundle.manifest
    gear = min((gear for gear in manifest.gears if gear.neural), key=lambda gear: gear.slots, default=None)
    if gear is None or not manifest.drafter or not manifest.drafter.buffers:
        return []
    length = min(2 * LATE, gear.slots // 2)
    late, late_us = length // 2, list[float]()
    for _ in range(LEAST_ROUNDS + 2):
        state = filled(engine, gear.slots, length - late)
        engine.prefill(state, np.zeros(late, np.int64))
        late_us.append(_step_us(engine, [state], gear, length))
    return [StepTime(gear=gear.name, length=length, us=round(float(np.median(late_us)), 2), late=late)]
