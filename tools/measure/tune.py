"""What a step of every gear takes on this machine, behind texts of two lengths, in seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from draftwood.planned import StepTime

if TYPE_CHECKING:
    from draftwood.manifest import Gear
    from draftwood.runtime.engines import StagedEngine
    from draftwood.runtime.speculation.sequence import SequenceState

# Text lengths, as parts of the KV length, behind which a gear is timed: a line through them is its table.
PLACES = (0.2, 0.8)
# Rows that a draft finds to be written, as many as a step accepts or so.
ACCEPTED = 3
LEAST_ROUNDS = 3
# Steps in a row, as a text takes them; the first one finds the processor's caches full of another gear's weights, and
# a graph perhaps not yet opened, and is not counted.
IN_A_ROW = 4
# Tokens of plain decoding or of a prompt that a late draft finds to be written.
LATE = 128


def tune(engine: StagedEngine, seconds: float) -> list[StepTime]:
    """Times every gear for about ``seconds`` in all, in turns, so that a drift hits all of them; medians.

    What a step does on the host beside its graphs (the draw, the walk) is counted, too.
    """
    texts = [(gear, length) for gear in engine.bundle.manifest.gears for length in _lengths(engine, gear)]
    caches = {key: filled(engine, *key) for key in sorted({(gear.slots, length) for gear, length in texts})}
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    began = time.perf_counter()
    rounds = 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - began < seconds:
        for gear, length in texts:
            row = [_step_us(engine, caches[gear.slots, length], gear) for _ in range(IN_A_ROW)]
            found[gear.name, length] += row[1:]
        rounds += 1
    return [
        *(
            StepTime(gear=gear.name, length=length, us=round(float(np.median(found[gear.name, length])), 2))
            for gear, length in texts
        ),
        *_late(engine),
    ]


def _lengths(engine: StagedEngine, gear: Gear) -> Sequence[int]:
    rows = next(tree.rows for tree in engine.bundle.manifest.trees if tree.name == gear.tree)
    return sorted({max(1, int((gear.slots - 2 - rows) * place)) for place in PLACES})


def filled(engine: StagedEngine, slots: int, length: int) -> SequenceState:
    """A text as it stands after a step: the drafter's caches hold all of it but the last rows."""
    state = engine.begin(slots)
    drafting = next((gear for gear in engine.bundle.manifest.gears if gear.slots == slots and gear.draft), None)
    if drafting is None or length <= ACCEPTED:
        engine.prefill(state, np.zeros(length, np.int64))
        return state
    engine.prefill(state, np.zeros(length - ACCEPTED, np.int64))
    engine.draft([state], drafting)
    engine.prefill(state, np.zeros(ACCEPTED, np.int64))
    return state


def _late(engine: StagedEngine) -> list[StepTime]:
    """A step whose draft finds `LATE` tokens that its caches lack; none where the drafter has no caches."""
    manifest = engine.bundle.manifest
    gear = min((gear for gear in manifest.gears if gear.draft), key=lambda gear: gear.slots, default=None)
    if gear is None or not manifest.drafter or not manifest.drafter.layers:
        return []
    length = min(2 * LATE, gear.slots // 2)
    late, found = length // 2, []
    for _ in range(LEAST_ROUNDS + 2):
        state = filled(engine, gear.slots, length - late)
        engine.prefill(state, np.zeros(late, np.int64))
        found.append(_step_us(engine, state, gear))
    return [StepTime(gear=gear.name, length=length, us=round(float(np.median(found)), 2), late=late)]


def _step_us(engine: StagedEngine, state: SequenceState, gear: Gear) -> float:
    """All of a step but its commit, which a text that is timed again must not have."""
    from draftwood.runtime.speculation.step import accept

    began = time.perf_counter_ns()
    drafts = engine.draft([state], gear)
    (output,) = engine.verify([state], drafts)
    accept(state, drafts[0], output.logits_RV)
    took = (time.perf_counter_ns() - began) / 1000
    state.rollback(state.length)
    return took
