"""The one rule of choice: what the teacher draws at a position depends on logits, seed and position alone.

One uniform number per (seed, position) goes through the inverse of the processed distribution's CDF, so
the text for a seed is the same with speculation on, off, or with another tree. Greedy is the argmax.

Shape suffixes: V vocabulary, K tokens kept by top-k and top-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import NumericError, RequestError

Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
Ids = NDArray[np.intp]

# First guess at the size of a nucleus, and how fast the guess grows: each round costs one pass over V.
_NUCLEUS_GUESS = 256
_NUCLEUS_GROWTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a token is drawn from the teacher's logits.

    Raises:
        RequestError: a value outside its range.

    Example:
        >>> Sampling().greedy, Sampling(temperature=0.7, top_p=0.9, seed=1).greedy
        (True, False)
    """

    # Divides the logits; 0 means greedy.
    temperature: float = 0.0
    # Smallest set of most probable tokens with this much mass is kept; 1 means off.
    top_p: float = 1.0
    # Most probable tokens kept; 0 means off.
    top_k: int = 0
    # Any unsigned 64-bit integer.
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_real(self.temperature) and 0 <= self.temperature < math.inf):
            raise _refusal("temperature", "a finite number >= 0", self.temperature, "0 decodes greedily")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise _refusal("top_p", "a number in (0, 1]", self.top_p, "1 switches it off")
        if not (_is_integer(self.top_k) and self.top_k >= 0):
            raise _refusal("top_k", "an integer >= 0", self.top_k, "0 switches it off")
        if not (_is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise _refusal("seed", "an integer in [0, 2**64)", self.seed, "take it modulo 2**64")

    @property
    def greedy(self) -> bool:
        """True if the draw is the argmax: no randomness, and top_p, top_k and seed have no effect."""
        return self.temperature == 0


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refusal(name: str, expected: str, got: Any, way_out: str) -> RequestError:
    return RequestError(f"sampling: {name}: expected {expected}, got {got!r}; {way_out}")


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of one absolute position, always the same for the same pair.

    Philox is counter-based: any position costs the same (about 10 us), in any order. The 53 bits are taken
    from the raw stream because numpy promises that one across versions, unlike ``Generator.random``.

    Example:
        >>> uniform(7, 100) == uniform(7, 100) != uniform(7, 101)
        True
    """
    raw = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def distribution(logits_V: Logits, sampling: Sampling) -> Probabilities:
    """The processed probabilities in token-id order: temperature, then top-k, then top-p, in float64.

    Tokens are ranked by value, ties by lower id, so exactly ``top_k`` tokens survive top-k. Top-p keeps the
    fewest most probable of those whose mass, among those, is at least ``top_p``.

    Args:
        logits_V: float32 [V], as the teacher returns them; -inf forbids a token.
        sampling: greedy gives the one-hot vector of the argmax.

    Returns:
        float64 [V] that sums to 1; removed tokens are exactly 0.

    Raises:
        NumericError: a NaN or +inf among the logits, or nothing but -inf.
    """
    probs_V = np.zeros(logits_V.shape[0])
    if sampling.greedy:
        probs_V[_argmax(logits_V)] = 1.0
        return probs_V
    ids_K, probs_K = _kept(logits_V, sampling)
    probs_V[ids_K if ids_K is not None else slice(None)] = probs_K
    return probs_V


def draw(logits_V: Logits, sampling: Sampling, position: int) -> int:
    """The token id that the teacher draws at an absolute position.

    Args:
        logits_V: float32 [V].
        sampling: greedy takes the argmax, the lowest id on a tie.
        position: index in the whole sequence (prompt included) of the token to draw, >= 0.

    Returns:
        The token in whose step of the CDF ``uniform(seed, position)`` lies, tokens in the order of ``_locate``.

    Raises:
        NumericError: a NaN or +inf among the logits, or nothing but -inf.

    Example:
        >>> draw(np.array([0.0, 2.0, 2.0], dtype=np.float32), Sampling(), position=5)
        1
    """
    if sampling.greedy:
        return _argmax(logits_V)
    ids_K, probs_K = _kept(logits_V, sampling)
    step, _, _ = _locate(probs_K, uniform(sampling.seed, position))
    return step if ids_K is None else int(ids_K[step])


def margin(logits_V: Logits, sampling: Sampling, position: int) -> float:
    """How far the draw at a position is from another outcome; small means rounding could change the token.

    Greedy: top-1 minus top-2 logit, in logits. Sampled: distance of the uniform number to the nearer edge
    of the drawn token's step of the CDF, in probability; the edges 0 and 1 of the CDF do not count. The
    second holds the kept set fixed: a token on the brink of top-k or top-p is not looked at.

    Returns:
        >= 0; inf if no other token can be drawn.
    """
    if sampling.greedy:
        best = _argmax(logits_V)
        rivals = np.delete(logits_V, best)
        return float(logits_V[best]) - float(rivals.max()) if rivals.size else math.inf
    _, probs_K = _kept(logits_V, sampling)
    u = uniform(sampling.seed, position)
    _, lower, upper = _locate(probs_K, u)
    # The edges 0 and 1 are those of the whole CDF: no other token lies beyond them.
    return min(u - lower if lower > 0 else math.inf, upper - u if upper < 1 else math.inf)


def _locate(probs_K: Probabilities, u: float) -> tuple[int, float, float]:
    """Inverse CDF: the index whose step holds ``u``, and the step's edges (0 and 1 at the ends of the CDF).

    Tokens stand in the order of rising octaves of probability (2^e <= p < 2^(e+1)), by index inside one. An
    edge is off by the rounding of all that lies below it; with the thousands of rare tokens first, nothing
    large lies below their edges, so the same token is drawn from logits that differ by rounding. In index
    order a draw in a thousand from a flat tail would not be.
    """
    octave_K = np.frexp(probs_K)[1]
    first = int(octave_K.min())
    octave_K[probs_K == 0] = first  # no octave consists of them alone, so none is entered for nothing
    edges = np.cumsum(np.bincount(octave_K - first, weights=probs_K))
    octave = min(int(np.searchsorted(edges, u, side="right")), edges.size - 1)
    start = float(edges[octave - 1]) if octave else 0.0
    members = np.flatnonzero((octave_K == first + octave) & (probs_K > 0))
    inner = start + np.cumsum(probs_K[members])
    # Rounding may leave the last edge a little below u.
    at = min(int(np.searchsorted(inner, u, side="right")), members.size - 1)
    lower = float(inner[at - 1]) if at else start
    last = octave == edges.size - 1 and at == members.size - 1
    return int(members[at]), lower, 1.0 if last else float(inner[at])


def _argmax(logits_V: Logits) -> int:
    best = int(logits_V.argmax())
    # argmax stops at a NaN, so one look at the winner covers the row.
    if not math.isfinite(logits_V[best]):
        raise NumericError(
            f"logits: expected finite values, got {logits_V[best]} at token {best}; the weights are damaged or overflow"
            " their precision; run draftwood check BUNDLE"
        )
    return best


def _kept(logits_V: Logits, sampling: Sampling) -> tuple[Ids | None, Probabilities]:
    """Ids (ascending; None stands for all of them) and probabilities of the tokens that can be drawn."""
    best = _argmax(logits_V)
    ids = _top_k(logits_V, sampling.top_k) if 0 < sampling.top_k < logits_V.size else None
    logits_K = logits_V if ids is None else logits_V[ids]
    probs_K = _softmax(logits_K, logits_V[best], sampling.temperature)
    if sampling.top_p >= 1:
        return ids, probs_K
    inside = _nucleus(probs_K, sampling.top_p)
    probs_K = probs_K[inside]
    return (inside if ids is None else ids[inside]), probs_K / probs_K.sum()


def _softmax(logits_K: Logits, peak: np.float32, temperature: float) -> Probabilities:
    scaled_K = logits_K.astype(np.float64)
    scaled_K -= peak
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the peak to -inf, as it should
        scaled_K /= temperature
    np.exp(scaled_K, out=scaled_K)
    scaled_K /= scaled_K.sum()
    return scaled_K


def _top_k(logits_V: Logits, k: int) -> Ids:
    start = logits_V.size - k
    return _first_ranked(logits_V, np.partition(logits_V, start)[start], k)


def _nucleus(probs_K: Probabilities, top_p: float) -> Ids:
    """Ascending indices of the shortest prefix, in order of (probability, lower id), with mass >= top_p.

    Only the largest probabilities are sorted, and only their values: the sums are those of the full sort,
    because cumsum adds in sequence, and ids matter only among ties of the smallest value kept.
    """
    size = _NUCLEUS_GUESS
    while True:
        ranked = _largest(probs_K, size)
        mass = np.cumsum(ranked)
        if mass[-1] >= top_p or ranked.size == probs_K.size:
            break
        size *= _NUCLEUS_GROWTH
    count = min(int(np.searchsorted(mass, top_p, side="left")) + 1, ranked.size)
    return _first_ranked(probs_K, ranked[count - 1], count)


def _largest(probs_K: Probabilities, size: int) -> Probabilities:
    """The ``size`` largest values, or all of them if there are fewer, in descending order."""
    if size >= probs_K.size:
        return np.sort(probs_K)[::-1]
    start = probs_K.size - size
    return np.sort(np.partition(probs_K, start)[start:])[::-1]


def _first_ranked(values_V: NDArray[Any], threshold: np.floating[Any], count: int) -> Ids:
    """Ascending indices of the ``count`` largest values; ``threshold`` is the smallest of them."""
    above = np.flatnonzero(values_V > threshold)
    ties = np.flatnonzero(values_V == threshold)[: count - above.size]
    return np.sort(np.concatenate([above, ties]))
