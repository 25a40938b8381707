"""How far rounding to int8 may move drafts, measured on the bundle's own drafter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.step import Draft
from draftwood.tools.comparison import single
from draftwood.tools.comparison.allowed import FACTOR_OF_STEPS, STEPS, Allowed, rounded_together

# n rows, F features, X blocks of a row

# The worst of few drafts is sought, each with other values moved.
_SEEDS = 4


def measured_drafts(engine: Engine, prompts: Iterable[NDArray[np.int64]]) -> Allowed:
    """The difference of draft scores that is allowed of a drafter in int8, as a share of the largest, at least 1.

    One value of each row of the teacher's states is moved by a whole step of its rounding. Scores of nodes are
    compared that were drafted after equal tokens.
    """
    apart = 0.0
    gears = {gear.tree: gear for gear in engine.bundle.manifest.gears if gear.neural}
    for prompt in prompts:
        for gear in gears.values():
            want, *others = _drafted(engine, gear, prompt)
            for got in others:
                alike = np.logical_and.accumulate(want.tokens_T == got.tokens_T)[:-1]  # before the first that differs
                differences = np.abs(want.scores_M - got.scores_M)[alike[: len(want.scores_M)]]
                apart = max(apart, float(differences.max() / max(1.0, float(np.abs(want.scores_M).max()))))
    moved = f"one step of rounding each row to int8 in the teacher's states moves it by {apart:.1e}"
    return Allowed(FACTOR_OF_STEPS * apart, f"{FACTOR_OF_STEPS} times that: {moved}")


def _drafted(engine: Engine, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Draft]:
    """A draft after a prompt, then one for each seed from states that are moved."""
    state, block = engine.begin(gear.slots), rounded_together(engine.bundle.manifest)
    engine.prefill(state, prompt[:-1])
    assert state.draft is not None
    unseen = state.draft
    for seed in (None, *range(_SEEDS)):
        state.draft = deepcopy(unseen)
        if seed is not None:
            _move(state.draft, seed, block)
        yield single.draft(engine, state, gear, int(prompt[-1]))


def _move(cache: DraftCache, seed: int, block: int) -> None:
    """One value of each row of the states that wait moves by a step of its block's, or its row's, rounding."""
    features, random = cache.features, np.random.default_rng(seed)

    def moved(count: int) -> NDArray[np.float32]:
        rows_nF = features(count).copy()
        rows, width = rows_nF.shape
        at_n, every = random.integers(width, size=rows), np.arange(rows)
        largest_nX = np.abs(rows_nF.reshape(rows, -1, block or width)).max(-1)
        rows_nF[every, at_n] += largest_nX[every, at_n // (block or width)] / STEPS
        return rows_nF

    cache.features = moved  # type: ignore[method-assign]
