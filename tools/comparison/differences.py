"""The first difference of two texts, and whether rounding explains it.

A difference counts as a numeric tie only if each text took the token that the teacher would draw, or one that is behind
it by less than the measured noise of its logits. Any other difference is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.speculation.sampling import shortfall
from draftwood.tools.comparison import single
from draftwood.trees import Topology, tensorize

# Two logits decide, each off by the noise; and the noise is the worst of a sample, so twice that again.
NOISE_FACTOR = 4
TIES_PER_TOKEN = 1e-4  # more ties than this are a failure too


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first difference of a turn's two texts. ``margin`` is how far the worse of their tokens is behind the
    teacher's, in logits, the noise of a draw counted; inf if one text has ended, or its token cannot be drawn."""

    id: str
    position: int
    plain_token: int
    speculative_token: int
    margin: float
    tolerance: float
    tie: bool


class Noise(NamedTuple):
    """Logits of one position, computed with other rows next to it: the largest absolute difference, how many rows were
    compared, and how many of them had equal bits."""

    apart: float = 0.0
    rows: int = 0
    equal: int = 0

    def with_(self, other: Noise) -> Noise:
        """Both together."""
        return Noise(max(self.apart, other.apart), self.rows + other.rows, self.equal + other.equal)


def logit_noise(engine: Engine, ids: list[int]) -> float:
    """Largest absolute difference between logits of one position computed with other rows next to it."""
    return noise_of(engine, ids).apart


def noise_of(engine: Engine, ids: list[int]) -> Noise:
    """The last tokens are computed as a chain of one tree and one by one; in exact arithmetic both are equal.

    An engine that gives both the same bits can still sum in another order where a tree branches. No such tree is run to
    measure that, because a wrong one would excuse itself. `_moved_apart` estimates it instead.
    """
    trees = engine.bundle.manifest.trees
    rows = min(max(tree.rows for tree in trees), len(ids) - 1)
    if rows < 2:
        return Noise()
    chain, plain = tensorize(Topology.chain(rows - 1)), engine.bundle.trees["plain"][1]
    slots = max(gear.slots for gear in engine.bundle.manifest.gears)
    together, alone = engine.begin(slots), engine.begin(slots)
    head, tail = np.array(ids[:-rows]), np.array(ids[-rows:])
    engine.prefill(together, head)
    engine.prefill(alone, head)
    logits_TV = single.verify(engine, together, tail, chain).logits_RV.copy()
    noise = Noise()
    for row in range(rows):
        alone_V = single.verify(engine, alone, tail[row : row + 1], plain).logits_RV[0]
        noise = noise.with_(_between(alone_V, logits_TV[row]))
        alone.commit([0])
    branches = any(tree.rows > tree.depth + 1 for tree in trees)
    if branches and not (noise.apart or engine.bitwise):
        return noise._replace(apart=_moved_apart(engine, ids))
    return noise


def _moved_apart(engine: Engine, ids: list[int]) -> float:
    """How far the logits of a plain step are apart between its caches and the same moved by a last bit or not at all,
    about as far as sums in another order. No row of a chain is compared."""
    plain, last = engine.bundle.trees["plain"][1], np.array(ids[-1:])
    state = engine.begin(max(gear.slots for gear in engine.bundle.manifest.gears))
    engine.prefill(state, np.array(ids[:-1]))
    logits_V = single.verify(engine, state, last, plain).logits_RV[0].copy()
    state.rollback(state.length)
    random = np.random.default_rng(0)
    for buffer in state.kv.buffers:
        buffer[:] = np.where(random.random(buffer.shape) < 0.5, buffer, np.nextafter(buffer, np.float32(np.inf)))
    return _between(single.verify(engine, state, last, plain).logits_RV[0], logits_V).apart


def _between(got_V: NDArray[np.float32], want_V: NDArray[np.float32]) -> Noise:
    """One row's noise."""
    equal = np.array_equal(got_V.view(np.int32), want_V.view(np.int32))
    return Noise(float(np.abs(got_V - want_V).max()), 1, int(equal))


def explain(
    engine: Engine,
    name: str,
    ids: Sequence[int],
    plain: Sequence[int],
    speculative: Sequence[int],
    options: Options,
    noise: float,
) -> Difference:
    """The first difference of two texts after a prompt, and whether noise in the logits explains it."""
    at = agreement(plain, speculative)
    state = engine.begin(max(gear.slots for gear in engine.bundle.manifest.gears))
    logits_V = engine.prefill(state, np.array([*ids, *plain[:at]])).logits_RV[0]
    allowed = NOISE_FACTOR * noise
    token = [text[at] if at < len(text) else -1 for text in (plain, speculative)]
    short = [math.inf if t < 0 else shortfall(logits_V, options.sampling, len(ids) + at, t) for t in token]
    return Difference(
        id=name,
        position=at,
        plain_token=token[0],
        speculative_token=token[1],
        margin=max(short),
        tolerance=allowed,
        tie=max(short) <= allowed,
    )


def explained(
    engine: Engine, ids: Sequence[int], plain: Sequence[int], other: Sequence[int], options: Options
) -> dict[str, Any]:
    """``explain`` by the noise of the plain text itself, as JSON has it."""
    noise = logit_noise(engine, [*ids, *plain])
    return asdict(explain(engine, "", ids, plain, other, options, noise))


def told(difference: Mapping[str, Any]) -> str:
    """A difference as a line."""
    return (
        f"{'numeric tie' if difference['tie'] else 'DIFFERENCE'} {difference['id']} at token {difference['position']}:"
        f" {difference['plain_token']} or {difference['speculative_token']}, margin {difference['margin']:.2e},"
        f" tolerance {difference['tolerance']:.2e}"
    )


def agreement(plain: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens, from the first on, two texts have in common."""
    pairs = zip(plain, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
