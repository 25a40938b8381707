"""Weighs the gears of a bundle on this machine: expected accept length over measured step time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from draftwood.manifest import Gear
    from draftwood.runtime.cache import Cache
    from draftwood.runtime.engine import Engine
    from draftwood.trees import RankPaths

COMMITTED = 200  # tokens of text behind which steps are timed
ACCEPTED = 3  # rows that a draft step finds to be written, as many as a step accepts or so
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


def weigh(engine: Engine, paths: RankPaths) -> list[Weighed]:
    """Times every gear of the bundle, plain decoding first, and weighs it by its expected accept length.

    Gears of budget trees are left out: rank paths say nothing of a tree that is chosen at every step.
    """
    gears = [gear for gear in engine.bundle.manifest.gears if gear.tree in engine.bundle.trees]
    caches = {slots: _filled(engine, slots, gears) for slots in {gear.slots for gear in gears}}
    times: dict[str, list[tuple[float, float]]] = {gear.name: [] for gear in gears}
    began = time.perf_counter()
    rounds = 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - began < TIMED_SECONDS * len(gears):
        for gear in gears:
            times[gear.name].append(_step_seconds(engine, caches[gear.slots], gear))
        rounds += 1
    medians = {name: np.median(np.array(pairs), axis=0) for name, pairs in times.items()}
    plain = min(float(medians[gear.name].sum()) for gear in gears if gear.tree == "plain")
    return [_weighed(engine, gear, paths, *map(float, medians[gear.name]), plain) for gear in gears]


def best_tree(weighed: list[Weighed]) -> Weighed:
    """The best gear that speculates, also where plain decoding is the faster choice."""
    return max((one for one in weighed if one.rows > 1), key=lambda one: one.expected_tokens_per_s)


def _filled(engine: Engine, slots: int, gears: Sequence[Gear]) -> Cache:
    """A text as it stands after a step: the drafter's caches hold all of it but the last rows."""
    cache = engine.new_cache(slots)
    engine.prefill(cache, np.zeros(min(COMMITTED, slots // 2), np.int64))
    drafting = next((gear for gear in gears if gear.slots == slots and gear.draft), None)
    if drafting:
        engine.draft(cache, drafting, 0)
        engine.prefill(cache, np.zeros(ACCEPTED, np.int64))
    return cache


def _step_seconds(engine: Engine, cache: Cache, gear: Gear) -> tuple[float, float]:
    began = time.perf_counter()
    if gear.draft:
        tokens_T, _, tree, _ = engine.draft(cache, gear, 0)
    else:
        tokens_T, tree = np.zeros(1, np.int64), engine.bundle.trees[gear.tree][1]
    drafted = time.perf_counter()
    engine.verify(cache, tokens_T, tree)
    verified = time.perf_counter()
    cache.rollback(cache.length)
    return drafted - began if gear.draft else 0.0, verified - drafted


def _weighed(engine: Engine, gear: Gear, paths: RankPaths, draft: float, verify: float, plain: float) -> Weighed:
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
