"""How far rounding moves a text's logits and caches: measured on the engine itself, by plain steps alone.

Values of the caches are moved as a rounding moves them. A plain step over them is compared with one over the unmoved
caches. So the allowed difference follows from the graph: its depth, width and arithmetic. A wrong tree takes no part in
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.speculation.sequence import SequenceState

# n rows, V vocabulary, K key/value heads, D head dimension

# The least that is allowed. By rounding and the order of sums, rows of one function differ by some 1e-6 in fp32 for
# shallow models. In half precision they differ by a few roundings of 4e-3. A wrong mask or position moves logits by
# 1e-1.
TOLERANCE, HALF_TOLERANCE = 1e-4, 3e-2
# If rows are rounded to int8 and no more is known: measured 2.4e-2 at most of shallow teachers.
QUANTISED_TOLERANCE = 5e-2
# Of the largest value: a step of its rounding to int8.
STEP = 1 / 127
# Few rows of plain steps are measured, but the worst of many compared ones counts. Sums differ in every product of a
# layer. Rounding to int8 is moved in every value of the caches; a graph moves it in few.
FACTOR, FACTOR_OF_STEPS = 8, 2
STEPS = 3

# Takes a plain step of a text, and gives its logits.
Plain = Callable[[SequenceState], NDArray[np.float32]]


class Rounding(NamedTuple):
    """The differences allowed: of logits as a share of the largest, of each cache as one of its rows' length."""

    logits: float
    # By buffer, key then value of every layer; none if caches do not lie in the host's memory.
    caches: tuple[float, ...] = ()


def chosen(engine: Engine, rounded: bool) -> Rounding:
    """The allowance if no caches can be moved: the one that shallow teachers need."""
    least = HALF_TOLERANCE if engine.half else TOLERANCE
    return Rounding(max(least, QUANTISED_TOLERANCE if rounded else 0.0))


def measured(engine: Engine, begin: Callable[[], SequenceState], plain: Plain) -> Rounding:
    """Measures with the text that ``begin`` gives, its root set, twice."""
    quantised = engine.bundle.manifest.quantised
    still, moved = begin(), begin()
    if not all(isinstance(buffer, np.ndarray) for buffer in still.kv.buffers):
        return chosen(engine, quantised)
    _move(moved, STEP / 2 if quantised else float(np.finfo(np.float32).eps))
    length, logits = still.length, 0.0
    for _ in range(STEPS):
        want_V, got_V = plain(still), plain(moved)
        logits = max(logits, logits_apart(got_V, want_V))
        moved.root = still.root  # one text, with any draws
    rows = zip(rows_of(moved, length), rows_of(still, length), strict=True)
    apart = [rows_apart(got, want) for got, want in rows]
    least, factor = (max(TOLERANCE, STEP), FACTOR_OF_STEPS) if quantised else (TOLERANCE, FACTOR)
    # The first layer's rows depend on no cache.
    worst = [max(apart[: max(number + 1, 4)]) for number in range(len(apart))]
    return Rounding(max(least, factor * logits), tuple(max(least, factor * apart) for apart in worst))


def _move(state: SequenceState, share: float) -> None:
    """Every value of the text's caches by so much of itself, up or down."""
    random = np.random.default_rng(0)
    for buffer in state.kv.buffers:
        rows = state.kv.text(buffer, state.length)
        rows *= np.where(random.random(rows.shape) < 0.5, 1 + share, 1 - share).astype(np.float32)


def rows_of(state: SequenceState, first: int = 0) -> Iterator[NDArray[np.float32]]:
    """Rows of each cache of the text from its token ``first`` on, [K, n, D]; the last commit has to be written."""
    for buffer in state.kv.buffers:
        yield state.kv.text(buffer, state.length)[:, first:]


def logits_apart(got_nV: NDArray[np.float32], want_nV: NDArray[np.float32]) -> float:
    """As a share of the largest, which counts as at least 1."""
    return _number(float(np.abs(got_nV - want_nV).max() / max(1.0, float(np.abs(want_nV).max()))))


def rows_apart(got_KnD: NDArray[np.float32], want_KnD: NDArray[np.float32]) -> float:
    """The worst row's, as a share of the mean row's length."""
    size = float(np.sqrt(np.square(want_KnD).sum(-1).mean())) or 1.0
    return _number(float(np.linalg.norm(got_KnD - want_KnD, axis=-1).max()) / size)


def _number(share: float) -> float:
    return share if np.isfinite(share) else float("inf")
