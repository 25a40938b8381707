"""A text drawn again in steps of one fixed shape: is every token the one that is drawn there?

What speculation gave came from trees of any shape; here the committed text runs through chains of one length, so that
two engines, machines or releases can be held against each other by one figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.sampling import Sampling, draw, margin
from draftwood.tools.comparison import single
from draftwood.trees import Topology, tensorize

ROWS = 16


class Audit(NamedTuple):
    """``tokens`` were drawn again by chains of ``rows``; those at ``differing`` came out otherwise. ``nearest`` is the
    smallest lead of a drawn token over the next, in logits, the noise of a draw counted; None where none had a next."""

    tokens: int
    rows: int
    differing: tuple[int, ...]
    nearest: float | None


def audit(engine: StagedEngine, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> Audit:
    """Draws the tokens behind a prompt again; ``differing`` are their places from 0."""
    state = engine.begin(max(gear.slots for gear in engine.bundle.manifest.gears))
    rows = min(ROWS, engine.bundle.manifest.dims.branch_rows)
    logits_nV = [single.prefill(engine, state, np.array(prompt, np.int64)).logits_RV[0].copy()]
    at = 0
    while at < len(tokens) - 1:
        count = min(rows, state.slots - 1 - state.length)  # at the end of the context there is less room
        given = np.resize(np.array(tokens[at : at + count]), count)
        found = single.verify(engine, state, given, tensorize(Topology.chain(count - 1))).logits_RV
        kept = min(count, len(tokens) - 1 - at)
        logits_nV += list(found[:kept].copy())
        state.commit(range(kept))
        at += kept
    return _compared(logits_nV, len(prompt), tokens, sampling, rows)


def _compared(
    logits_nV: list[NDArray[np.float32]], start: int, tokens: Sequence[int], sampling: Sampling, rows: int
) -> Audit:
    drawn = [draw(logits_V, sampling, start + place) for place, logits_V in enumerate(logits_nV)]
    nearest = min(margin(logits_V, sampling, start + place) for place, logits_V in enumerate(logits_nV))
    differing = (place for place, pair in enumerate(zip(drawn, tokens, strict=True)) if pair[0] != pair[1])
    return Audit(len(tokens), rows, tuple(differing), nearest if math.isfinite(nearest) else None)
