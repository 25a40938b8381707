"""The one rule of choice: the teacher's draw at a position depends on logits, seed and position alone.

Noise for every (seed, position, token) is added to the logits of the tokens that the filters keep, and the greatest sum
is drawn (`draftwood.noise`). So the text for a seed is the same with speculation on, off, or with another tree.
Greedy is the argmax, the case without noise.

Shape suffixes: V vocabulary, K tokens kept by top-k, top-p and min-p, B blocks of the noise, L ids of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import NumericError, RequestError
from draftwood.noise import BLOCK, Key, block_gumbels, bounds_at, gumbel_row, gumbels, key_of

Logits = NDArray[np.float32]
Probabilities = NDArray[np.float64]
Ids = NDArray[np.int32]

# Up to this many tokens, making the noise of all is as fast as finding out which may win. In a larger vocabulary this
# many blocks are looked at first.
_WHOLE = 1 << 14
_FIRST_BLOCKS = 16


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
    # Tokens of at least this share of the most probable one's probability are kept; 0 means off (Nguyen et al., 2024,
    # arXiv 2407.01082).
    min_p: float = 0.0
    # Any unsigned 64-bit integer.
    seed: int = 0

    def __post_init__(self) -> None:
        if not (_is_real(self.temperature) and 0 <= self.temperature <= 100):
            raise _refusal("temperature", "a number in [0, 100]", self.temperature, "0 decodes greedily")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            raise _refusal("top_p", "a number in (0, 1]", self.top_p, "1 switches it off")
        if not (_is_integer(self.top_k) and self.top_k >= 0):
            raise _refusal("top_k", "an integer >= 0", self.top_k, "0 switches it off")
        if not (_is_real(self.min_p) and 0 <= self.min_p <= 1):
            raise _refusal("min_p", "a number in [0, 1]", self.min_p, "0 switches it off")
        if not (_is_integer(self.seed) and 0 <= self.seed < 2**64):
            raise _refusal("seed", "an integer in [0, 2**64)", self.seed, "take it modulo 2**64")

    @property
    def greedy(self) -> bool:
        """True if the draw is the argmax: no randomness, and top_p, top_k, min_p and seed have no effect."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether some tokens may be kept out of the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refusal(name: str, expected: str, got: Any, way_out: str) -> RequestError:
    return RequestError(f"sampling: {name}: expected {expected}, got {got!r}; {way_out}")


def distribution(logits_V: Logits, sampling: Sampling) -> Probabilities:
    """The processed probabilities in token-id order: temperature, then top-k, top-p and min-p, in float64.

    Tokens are ranked by value, ties by lower id, so exactly ``top_k`` tokens survive top-k. Top-p keeps the
    fewest most probable of those whose mass, among those, is at least ``top_p``. Min-p keeps those whose probability
    is at least ``min_p`` times the greatest.

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
    best, ids_K = _argmax(logits_V), _kept(logits_V, sampling)
    chosen = slice(None) if ids_K is None else ids_K
    probs_V[chosen] = _softmax(logits_V[chosen], logits_V[best], sampling.temperature)
    return probs_V


def draw(logits_V: Logits, sampling: Sampling, position: int) -> int:
    """The token id that the teacher draws at an absolute position.

    Args:
        logits_V: float32 [V].
        sampling: greedy takes the argmax, the lowest id on a tie.
        position: index in the whole sequence (prompt included) of the token to draw, >= 0.

    Returns:
        Of the tokens that the filters keep the one of the greatest ``logit / T + G(seed, position, token)``.

    Raises:
        NumericError: a NaN or +inf among the logits, or nothing but -inf.

    Example:
        >>> draw(np.array([0.0, 2.0, 2.0], dtype=np.float32), Sampling(), position=5)
        1
    """
    best = _argmax(logits_V)
    if sampling.greedy:
        return best
    ids_K = _kept(logits_V, sampling)
    if ids_K is None:
        return _winner(logits_V, logits_V[best], sampling, position)
    heights_K = _heights(logits_V[ids_K], logits_V[best], sampling.temperature)
    heights_K += gumbels(ids_K, key_of(sampling.seed, position))
    return int(ids_K[heights_K.argmax()])


def shortfall(logits_V: Logits, sampling: Sampling, position: int, token: int) -> float:
    """How far a token is from being drawn at a position; small means that rounding could have drawn it.

    The lead of the drawn token over it, in logits. Greedy decoding compares logits, and sampling ``logit + T * G``. The
    latter holds the kept set fixed: a token on the brink of a filter is not looked at.

    Returns:
        0 for the drawn token; inf for one that cannot be drawn.
    """
    if sampling.greedy:
        return float(logits_V.max()) - float(logits_V[token])
    ids_K = _kept(logits_V, sampling)
    if ids_K is None:
        ids_K = np.arange(logits_V.size, dtype=np.int32)
    values_K = logits_V[ids_K].astype(np.float64) - float(logits_V.max())
    values_K += sampling.temperature * gumbels(ids_K, key_of(sampling.seed, position))
    own = values_K[ids_K == token]
    return float(values_K.max() - own[0]) if own.size else math.inf


def _winner(logits_V: Logits, peak: np.float32, sampling: Sampling, position: int) -> int:
    """The draw among all tokens. In a large vocabulary noise is made for those blocks alone that may hold it.

    A block's best logit and its greatest G bound the sums in it. The best of a few blocks is found first; most often no
    other block can hold a better one.
    """
    key, temperature = key_of(sampling.seed, position), sampling.temperature
    if logits_V.size <= _WHOLE:
        heights_V = _heights(logits_V, peak, temperature)
        heights_V += gumbel_row(logits_V.size, key)
        return int(heights_V.argmax())
    bounds_B = _heights(_block_peaks(logits_V), peak, temperature)
    bounds_B += bounds_at(logits_V.size, sampling.seed, position)
    first_n = np.sort(np.argpartition(bounds_B, -_FIRST_BLOCKS)[-_FIRST_BLOCKS:])
    best, height = _best_of(first_n, logits_V, peak, temperature, key)
    bounds_B[first_n] = -math.inf
    others_n = np.flatnonzero(bounds_B >= height)
    if others_n.size:
        rival, rival_height = _best_of(others_n, logits_V, peak, temperature, key)
        best = max((height, -best, best), (rival_height, -rival, rival))[2]  # the lowest id if both are as high
    return best


def _best_of(
    blocks_n: NDArray[np.intp], logits_V: Logits, peak: np.float32, temperature: float, key: Key
) -> tuple[int, float]:
    """The winner of some blocks, which ascend, so that ties go to the lowest id; and how high it is."""
    ids_nL = blocks_n[:, None] * BLOCK + np.arange(BLOCK)
    heights_nL = _heights(logits_V.take(ids_nL, mode="clip"), peak, temperature)
    heights_nL += block_gumbels(blocks_n.astype(np.int32), key)
    heights_nL[ids_nL >= logits_V.size] = -math.inf
    at = int(heights_nL.argmax())
    return int(ids_nL.flat[at]), float(heights_nL.flat[at])


def _block_peaks(logits_V: Logits) -> Logits:
    """The greatest logit of every block; the last block may be short."""
    return np.maximum.reduceat(logits_V, np.arange(0, logits_V.size, BLOCK))  # twice as fast as a maximum by rows


def _heights(logits_n: Logits, peak: np.float32, temperature: float) -> NDArray[np.float64]:
    """Logits over the temperature, 0 at the peak."""
    scaled_n = logits_n.astype(np.float64)
    scaled_n -= peak
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the peak to -inf, as it should
        scaled_n /= temperature
    return scaled_n


def _argmax(logits_V: Logits) -> int:
    best = int(logits_V.argmax())
    # argmax stops at a NaN, so one look at the winner covers the row.
    if not math.isfinite(logits_V[best]):
        raise NumericError(
            f"logits: expected finite values, got {logits_V[best]} at token {best}; the weights are damaged or overflow"
            " their precision; run draftwood check BUNDLE"
        )
    return best


def _kept(logits_V: Logits, sampling: Sampling) -> Ids | None:
    """Ids of the tokens that can be drawn, ascending; None stands for all of them."""
    if not sampling.filters:
        return None
    peak, ids_K, logits_K = logits_V.max(), None, logits_V
    if 0 < sampling.top_k < logits_V.size:
        ids_K = _top_k(logits_V, sampling.top_k)
        logits_K = logits_V[ids_K]
    if sampling.top_p < 1:
        nucleus = _nucleus(_softmax(logits_K, peak, sampling.temperature), sampling.top_p)
        ids_K, logits_K = nucleus if ids_K is None else ids_K[nucleus], logits_K[nucleus]
    if sampling.min_p > 0:
        near = np.flatnonzero(_heights(logits_K, peak, sampling.temperature) >= math.log(sampling.min_p))
        ids_K = near.astype(np.int32) if ids_K is None else ids_K[near]
    return ids_K


def _softmax(logits_K: Logits, peak: np.float32, temperature: float) -> Probabilities:
    probs_K = _heights(logits_K, peak, temperature)
    np.exp(probs_K, out=probs_K)
    probs_K /= probs_K.sum()
    return probs_K


def _top_k(logits_V: Logits, k: int) -> Ids:
    """Ascending ids of the k greatest. None is below the k-th greatest block peak, so most tokens are not ranked."""
    peaks_B = _block_peaks(logits_V)
    bound = np.partition(peaks_B, -k)[-k] if k < peaks_B.size else -math.inf
    likely = np.flatnonzero(logits_V >= bound).astype(np.int32)
    logits_n = logits_V[likely]
    return likely[_first_ranked(logits_n, np.partition(logits_n, -k)[-k], k)]


def _nucleus(probs_K: Probabilities, top_p: float) -> Ids:
    """Ascending indices of the shortest prefix, in order of (probability, lower id), with mass >= top_p.

    Tokens below a K-th of the mass that may be left out have less than that mass together, so the others are looked at
    alone. The sums are those of a full sort, because cumsum adds in sequence.
    """
    likely = np.flatnonzero(probs_K >= (1 - top_p) / probs_K.size)
    ranked = np.sort(probs_K[likely])[::-1]
    mass = np.cumsum(ranked)
    if not ranked.size or mass[-1] < top_p:  # by rounding
        likely = np.arange(probs_K.size)
        ranked = np.sort(probs_K)[::-1]
        mass = np.cumsum(ranked)
    count = min(int(np.searchsorted(mass, top_p, side="left")) + 1, ranked.size)
    return likely[_first_ranked(probs_K[likely], ranked[count - 1], count)].astype(np.int32)


def _first_ranked(values_V: NDArray[Any], threshold: np.floating[Any], count: int) -> Ids:
    """Ascending indices of the ``count`` largest values; ``threshold`` is the smallest of them."""
    above = np.flatnonzero(values_V > threshold)
    ties = np.flatnonzero(values_V == threshold)[: count - above.size]
    return np.sort(np.concatenate([above, ties])).astype(np.int32)
