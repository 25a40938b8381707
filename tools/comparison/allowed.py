"""How far rounding may move what a bundle computes, measured on its own model: of its depth, width and precision.

Measured on texts in plain order, by eager PyTorch alone. No tree and no graph takes part: a fault in those would else
excuse itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.kernels.nbits import BLOCK
from draftwood.manifest import Manifest
from draftwood.tools.reference.followed import ExchangedEager, beyond_last_bits

# T rows, H hidden

# Last bits are moved at every norm, and a sum in another order moves them between norms too. Measured on SmolLM2: a
# graph differed from eager PyTorch by 0.7 to 1.6 of what this moves. If summands cancel it is more than in sampled
# rows. So 32 for halves; a planted fault moves them by 5e-2 and more, a thousand times what 32 allows.
FACTOR, FACTOR_OF_HALVES = 8, 32
# In half precision a graph moves fewer values: it sums in fp32, and another order changes what is rounded afterwards
# now and then. Measured on teachers of two layers: the interpreter differed by nothing, in W8A8 and with sums of two
# ranks by half of what this moves. A dropped commit differed by 1.5 times that.
FACTOR_IN_HALF = 1
# One value of every row is moved by a whole step of its rounding. A graph moves few, and several in few rows. Measured
# on SmolLM2: 0.4 of that in four bits, 0.3 in W8A8.
FACTOR_OF_STEPS = 2
SEEDS = 2
STEPS = 127  # of a row's, or a block's, largest value if it is rounded to int8
# A row with less added to it than this share of the median's counts as one with so much. Otherwise the last bits of a
# state that is a thousand times as large would be all of it.
_LEAST = 0.1

# By the number of a norm, without the last one's: the half block that ends there.
HALVES = ("MLP", "attention")


def host(values: Any, heads: int = 0) -> NDArray[np.float32]:
    """A cache's values as fp32 in the host's memory, wherever the engine keeps them; all ``heads`` of several ranks."""
    if hasattr(values, "parts"):
        parts = [host(part) for part in values.parts]
        # If there are fewer heads than ranks, several ranks hold the same ones.
        return np.concatenate(parts[:: len(parts) * len(parts[0]) // heads])
    return np.asarray(values.float().cpu().numpy() if hasattr(values, "float") else values)


class Allowed(NamedTuple):
    """The difference that is allowed, and where it comes from."""

    value: float
    reason: str


def relative_difference(got: NDArray, want: NDArray) -> float:
    """Largest absolute difference, as a share of the largest reference value (at least 1); inf for no number."""
    difference = float(np.abs(got - want).max() / max(1.0, float(np.abs(want).max())))
    return difference if np.isfinite(difference) else float("inf")


def row_difference(apart: NDArray, want: NDArray) -> float:
    """The largest length of a row's difference, as a share of the row's own; inf if there is no number."""
    sizes = np.linalg.norm(want, axis=-1)
    least = max(_LEAST * float(np.median(sizes)), float(np.finfo(np.float32).tiny))
    largest = float((np.linalg.norm(apart, axis=-1) / np.maximum(sizes, least)).max(initial=0))
    return largest if np.isfinite(largest) else float("inf")


def rounded_together(manifest: Manifest) -> int:
    """The inputs of a block's layers that share a step of rounding, 0 for a whole row."""
    whole = any(layer.startswith("layers.") for layer in manifest.teacher.config["quantised"])
    return BLOCK if manifest.packed and not whole else 0


def half_name(number: int) -> str:
    """The half of a block that ends where norm ``number`` reads; the embedding counts as the MLP before the first."""
    return HALVES[number % 2]


class _Move:
    """Moves every state of a launch by its last bits, and one value of each normed row by a step of its rounding.

    With ``given``, the states of a launch that was not moved, each half of a block starts from those.
    """

    def __init__(self, block: int | None, seed: int | None = None, given: Sequence[Tensor] = ()) -> None:
        self._block, self._given = block, given
        self._random = None if seed is None else torch.Generator().manual_seed(seed)
        self.added: list[Tensor] = []
        self.states: list[Tensor] = []

    def state(self, number: int, added_TH: Tensor, state_TH: Tensor) -> Tensor:
        if self._given and number:
            state_TH = self._given[number - 1] + added_TH
        self.added.append(added_TH)
        self.states.append(state_TH)
        return self._moved(self._given[number] if self._given else state_TH)

    def normed(self, number: int, normed_TH: Tensor) -> Tensor:
        # For the whole only the first input is moved by a step, for halves the input of each.
        if self._random is None or self._block is None or (number and not self._given):
            return normed_TH
        (rows, width), block = normed_TH.shape, self._block or normed_TH.shape[-1]
        at_T1 = torch.randint(width, (rows, 1), generator=self._random)
        step_TX = normed_TH.unflatten(-1, (-1, block)).abs().amax(-1) / STEPS
        return normed_TH.scatter_add(1, at_T1, step_TX.gather(1, at_T1 // block))

    def _moved(self, state_TH: Tensor) -> Tensor:
        if self._random is None:
            return state_TH
        up, epsilon = torch.rand(state_TH.shape, generator=self._random) < 0.5, torch.finfo(state_TH.dtype).eps
        return torch.where(up, state_TH * (1 + epsilon), state_TH * (1 - epsilon))


class _Read(NamedTuple):
    """A prompt that was read."""

    move: _Move
    logits_TV: NDArray[np.float32]
    features_TF: NDArray[np.float32]
    caches: list[NDArray[np.float32]]


def _read(engine: ExchangedEager, prompt: NDArray[np.int64], move: _Move) -> _Read:
    state = engine.begin(max(gear.slots for gear in engine.bundle.manifest.gears))
    engine.exchange = move
    output = engine.append(state, prompt)
    engine.exchange = None
    caches = [host(state.kv.text(buffer, len(prompt))) for buffer in state.kv.buffers]
    return _Read(move, output.logits_RV, output.features_RF, caches)


def measured(
    engine: ExchangedEager, prompts: Iterable[NDArray[np.int64]]
) -> tuple[dict[str, Allowed], dict[str, Allowed]]:
    """The allowed differences by quantity: of a whole launch, and of halves of blocks. The first are shares of the
    largest value, the second of a row's length; see `relative_difference` and `row_difference`."""
    manifest, factor = engine.bundle.manifest, FACTOR_IN_HALF if engine.half else FACTOR
    block = rounded_together(manifest) if manifest.quantised else None
    whole, halves = Counter[str](), Counter[str]()
    for prompt in prompts:
        still = _read(engine, prompt, _Move(block))
        for seed in range(SEEDS):
            whole |= _worst(_whole(_read(engine, prompt, _Move(block, seed)), still))
            halves |= _worst(_halves(_read(engine, prompt, _Move(block, seed, still.move.states)), still))
    if block is None:
        last = "the last bits of its states"
        return _allowed(whole, factor, last), _allowed(halves, FACTOR_OF_HALVES, last)
    step = f"one step of rounding {'a block of ' * bool(block)}each row to int8"
    return _allowed(whole, factor, f"{step} at the input"), _allowed(halves, FACTOR_OF_STEPS, step)


def _allowed(moved: Counter[str], factor: int, what: str) -> dict[str, Allowed]:
    return {
        name: Allowed(factor * value, f"{factor} times the {value:.1e} by which {what} moves it")
        for name, value in moved.items()
    }


def _whole(got: _Read, want: _Read) -> Iterator[tuple[str, float]]:
    yield "logits", relative_difference(got.logits_TV, want.logits_TV)
    yield "choice", 2 * relative_difference(got.logits_TV, want.logits_TV)  # of two logits
    yield "features", relative_difference(got.features_TF, want.features_TF)
    for got_cache, want_cache in zip(got.caches, want.caches, strict=True):
        yield "cache after commit", relative_difference(got_cache, want_cache)


def _halves(got: _Read, want: _Read) -> Iterator[tuple[str, float]]:
    for number, (moved, still, added) in enumerate(
        zip(got.move.states, want.move.states, want.move.added, strict=True)
    ):
        yield half_name(number), row_difference(beyond_last_bits(moved, still).float().numpy(), added.float().numpy())
    apart = row_difference(got.logits_TV - want.logits_TV, want.logits_TV)
    yield "logits", apart
    yield "choice", 2 * apart
    yield "features", row_difference(got.features_TF - want.features_TF, want.features_TF)
    for got_cache, want_cache in zip(got.caches, want.caches, strict=True):
        yield "cache after commit", row_difference(got_cache - want_cache, want_cache)


def _worst(differences: Iterable[tuple[str, float]]) -> Counter[str]:
    """The largest of each quantity."""
    worst = Counter[str]()
    for name, value in differences:
        worst[name] = max(worst[name], value)  # type: ignore[assignment]
    return worst
