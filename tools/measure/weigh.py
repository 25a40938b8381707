"""Weighs the gears of a bundle on this machine: expected accept length over measured step time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from draftwood.tools.measure.tune import filled

if TYPE_CHECKING:
    from draftwood.manifest import Gear
    from draftwood.runtime.engines import StagedEngine
    from draftwood.runtime.speculation.sequence import SequenceState
    from draftwood.trees import RankPaths

COMMITTED = 200  # tokens of text behind which steps are timed
TIMED_SECONDS = 0.3  # a gear is timed over at least this long, gears in turn so that a drift hits all
LEAST_ROUNDS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """One gear: expected accept length, median times of its steps, and what follows from both."""

    gear: str
    rows: int
    expected_accept_length: float
    draft_ms: float
    verify_ms: float
    expected_tokens_per_s: float
    # The bound on its speed-up over plain decoding: no host time at all.
    bound: float


def weigh(engine: StagedEngine, paths: RankPaths) -> list[Weighed]:
    """Times every gear of the bundle, plain decoding first, and weighs it by its expected accept length.

    Gears of budget trees are left out: rank paths say nothing of a tree that is chosen at every step.
    """
    gears = [gear for gear in engine.bundle.manifest.gears if gear.tree in engine.bundle.trees]
    states = {slots: filled(engine, slots, min(COMMITTED, slots // 2)) for slots in {gear.slots for gear in gears}}
    times: dict[str, list[tuple[float, float]]] = {gear.name: [] for gear in gears}
    began = time.perf_counter()
    rounds = 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - began < TIMED_SECONDS * len(gears):
        for gear in gears:
            times[gear.name].append(_step_seconds(engine, states[gear.slots], gear))
        rounds += 1
    medians = {name: np.median(np.array(pairs), axis=0) for name, pairs in times.items()}
    plain = min(float(medians[gear.name].sum()) for gear in gears if gear.tree == "plain")
    return [_weighed(engine, gear, paths, *map(float, medians[gear.name]), plain) for gear in gears]


def best_tree(weighed: list[Weighed]) -> Weighed:
    """The best gear that speculates, also where plain decoding is the faster choice."""
    return max((one for one in weighed if one.rows > 1), key=lambda one: one.expected_tokens_per_s)


def _step_seconds(engine: StagedEngine, state: SequenceState, gear: Gear) -> tuple[float, float]:
    began = time.perf_counter()
    drafts = engine.draft([state], gear)
    drafted = time.perf_counter()
    engine.verify([state], drafts)
    verified = time.perf_counter()
    state.rollback(state.length)
    return drafted - began if gear.draft else 0.0, verified - drafted


def _weighed(engine: StagedEngine, gear: Gear, paths: RankPaths, draft: float, verify: float, plain: float) -> Weighed:
    topology, _ = engine.bundle.trees[gear.tree]
    expected = paths.expected_accept_length(topology)
    return Weighed(
        gear=gear.name,
        rows=topology.rows,
        expected_accept_length=expected,
        draft_ms=1000 * draft,
        verify_ms=1000 * verify,
        expected_tokens_per_s=expected / (draft + verify),
        bound=expected * plain / (draft + verify),
    )
