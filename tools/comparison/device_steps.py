"""Does a step on the device do what the host does?

Acceptance in a graph gives the tokens of the host's. A whole step in one launch leaves the same as its parts, tensor by
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.compiler.steps.noise import level_noise
from draftwood.manifest import Gear, TensorSignature, whole_name
from draftwood.noise import numbers_of
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.inputs import draws_of
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.shared_noise import SharedNoise
from draftwood.runtime.speculation.step import Outcome, speculative_step
from draftwood.tools.comparison.compare import DIFFERING_TOKENS, Comparison, Pair

STEPS = 4
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=1),
    "filtered": Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=2),
}


def compare_acceptance(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Steps of a gear twice on one engine: accepted by its graphs, and by the host from the logits of all rows.

    The difference is the share of tokens that are not the same; none may be.
    """
    engine = pair.engine
    for draws, sampling in SAMPLINGS.items():
        got, want = (engine.begin(gear.slots, sampling) for _ in range(2))
        texts: list[list[int]] = [[], []]
        for text, state in zip(texts, (got, want), strict=True):
            text += engine.start(state, prompt).tokens
            while len(text) <= STEPS:
                (done,) = engine.step([state], [gear]) if state is got else speculative_step(engine, [state], [gear])
                text += done.tokens
        differing = [token != expected for token, expected in zip(*texts, strict=False)]
        share, where = float(np.mean(differing)), f"{len(differing)} tokens"
        yield pair.found(gear.name, gear.graph, f"{draws} tokens", share, where, 0.0)


def compare_whole(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Steps of a gear twice on one engine, in one launch each and part by part; after each all that they have left.

    The parts get the noise that the graph makes, or a draft could differ by a rounding. If one does, as a device's
    logarithm may have it, the rest is of another tree and left out. The share of such steps is bounded.
    """
    engine = pair.engine
    assert isinstance(engine, StaticEngine)
    for sampling in SAMPLINGS.values():
        graph = whole_name(gear.name, draws_of(sampling))
        states = [engine.begin(gear.slots, sampling) for _ in range(2)]
        roots = [engine.start(state, prompt).tokens for state in states]
        assert roots[0] == roots[1], "prefill has one form alone"
        with engine.drafting.given(_GraphNoise(engine.bundle)):
            for step in range(STEPS):
                got, want = _both(engine, states, gear)
                alike = (got.tokens, got.path, got.confidence) == (want.tokens, want.path, want.confidence)
                allowed = 0.0 if sampling.greedy else DIFFERING_TOKENS * pair.tolerance / STEPS
                yield pair.found(gear.name, graph, "step", float(not alike), f"step {step}", allowed)
                if not alike:
                    break
                for quantity, mine, other in _left(engine, *states):
                    yield pair.compared(gear.name, graph, quantity, mine, other, f"step {step}")


def _both(engine: StaticEngine, states: list[SequenceState], gear: Gear) -> list[Outcome]:
    """A step in one launch, and one in parts."""
    outcomes = []
    for state, apart in zip(states, (False, True), strict=True):
        with in_parts(engine, apart):
            outcomes += engine.step([state], [gear])
    return outcomes


@contextmanager
def in_parts(engine: StaticEngine, apart: bool = True) -> Iterator[None]:
    """In the body, the engine launches the parts of a step one by one, or does not."""
    before, engine.on_device.apart = engine.on_device.apart, apart
    try:
        yield
    finally:
        engine.on_device.apart = before


def _left(engine: StaticEngine, got: SequenceState, want: SequenceState) -> Iterator[tuple[str, NDArray, NDArray]]:
    """The remains of a step for the next, of either text; slots of the caches that are no text may hold anything."""
    read, length = engine.executor.read, got.kv.placed
    yield "branch", read(got.kv.branch), read(want.kv.branch)
    for mine, other in zip(got.kv.buffers, want.kv.buffers, strict=True):
        yield "cache", read(mine)[:, :length], read(other)[:, :length]
    if got.draft is None or want.draft is None:
        return
    count = got.draft.waiting
    yield "features", got.draft.features(count), want.draft.features(count)
    written = got.draft.length  # plain decoding writes nothing there
    for mine, other in zip(got.draft.buffers, want.draft.buffers, strict=True) if written else ():
        yield "draft cache", read(mine)[:, :written], read(other)[:, :written]


class _GraphNoise(SharedNoise):
    """The rows that a graph makes for itself."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._vocabulary, ids_U = bundle.manifest.dims.vocabulary, bundle.draft_ids
        self._ids_U = None if ids_U is None else torch.from_numpy(np.array(ids_U, np.int64))
        self._places = bundle.manifest.dims.path_rows

    def rows(
        self,
        spec: TensorSignature,
        sampling: Sampling,
        position: int,
        place: int = 0,
        allowed: Sequence[NDArray[np.bool_]] = (),
    ) -> NDArray[np.float32]:
        assert not allowed, "no text of a comparison is held to a grammar"
        noise = np.zeros(self.shape(spec), np.float32)
        levels = min(len(noise), self._places)
        numbers = torch.from_numpy(numbers_of(sampling.seed, range(position, position + levels)))
        noise_LU = level_noise(numbers, self._vocabulary, self._ids_U)
        noise[:levels] = noise_LU.numpy() * np.float32(sampling.temperature)
        return noise
