"""The engine: texts go in, one call advances them all by a step.

Decoding asks it for steps; `draftwood.runtime.speculation.step` puts a step together of the engine's parts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.manifest import Gear, GraphSignature, TokenRows, of_rank
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.turns import Turns
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.drafting import Drafting, RunGraph
from draftwood.runtime.speculation.kv_cache import Zeros, host_zeros
from draftwood.runtime.speculation.logprobs import token_logprobs
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import (
    Draft,
    HostParts,
    Outcome,
    Parts,
    Prefill,
    TeacherOutput,
    speculative_step,
)

# T tree rows, R rows with logits, n prompt tokens


class Engine(HostParts, ABC):
    """Decodes from a bundle; it gives the parts of a step, to `speculative_step` and to those who compare them.

    May be called from several threads; everything of a text is in its state alone. The graphs' buffers are shared by
    all texts, so ``step`` and each launch of ``start`` wait for their turn. The parts do not.

    Raises from any call:
        NumericError: the teacher's logits are no numbers; the text cannot go on.
    """

    # Sequences that one step takes at most.
    max_batch = 1
    # Numbers of texts, besides one, that there are graphs for, ascending.
    batches: tuple[int, ...] = ()
    # Whether a launch of several texts pads the rows of each to those of the largest tree.
    padded = False
    # Whether every row has the bits of plain decoding, and is held to them.
    bitwise = False
    # Whether the caches of a text that has ended may serve another one that begins alike.
    keeps = False
    # Devices that the model is split over; each has its heads of every cache.
    ranks = 1

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature], run_draft: RunGraph) -> None:
        self.bundle = bundle
        self.drafting = Drafting(bundle, graphs, run_draft, lambda shape: self.zeros(shape))
        self._turns = Turns()
        self._closed = False

    def begin(self, slots: int, sampling: Sampling | None = None) -> SequenceState:
        """An empty text with caches of ``slots`` slots."""
        kv, drafter = self.new_kv(slots), self.bundle.manifest.drafter
        draft = self.new_draft(kv, of_rank(drafter.buffers, self.ranks), drafter.features) if drafter else None
        return SequenceState(kv, draft, sampling, self.drafting.corpus)

    def start(self, state: SequenceState, prompt_n: NDArray[np.int64]) -> Prefill:
        """Commits the prompt after the text so far, and draws the first new token, its root."""
        return drained(self.read(state, prompt_n))

    def read(self, state: SequenceState, prompt_n: NDArray[np.int64]) -> Generator[None, None, Prefill]:
        """``start`` launch by launch: every ``next`` is one, and the last one ends it."""
        verify_ns, left = 0, len(prompt_n)
        for chunk_n in self._chunks(state, prompt_n):
            with self._turn():  # between two launches of a long prompt other texts take their steps
                began = time.perf_counter_ns()
                logits_V = self._launched(state, chunk_n).logits_RV[-1].copy()
                verify_ns += time.perf_counter_ns() - began
            left -= len(chunk_n)
            if left:
                yield
        verified = time.perf_counter_ns()
        state.root = state.draw(logits_V, state.length)
        if state.top is not None:
            state.logprobs = [token_logprobs(logits_V, state.root, state.top)]
        accept_us = (time.perf_counter_ns() - verified) / 1e3
        return Prefill((state.root,), len(prompt_n), verify_ns / 1e3, accept_us)

    @property
    def parts(self) -> Parts[Any]:
        """The parts of a step: the engine's own, unless it has some that leave more on its device."""
        return self

    def step(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Outcome]:
        """One step of every text, at most ``max_batch``, each with its own gear and that gear's KV length."""
        with self._turn():
            self.make_ready(states, gears)
            for state in states:  # before the step: a failure after its commits would lose its tokens
                self.drafting.catch_up(state)
            return speculative_step(self.parts, states, gears)

    def make_ready(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> None:
        """Opens what a step would open: no time of the step, by which policies judge its gears.

        Threads may open at the same time, and during a step of others. A thread that needs what another one opens waits
        for it.
        """

    def open_all(self) -> None:
        """Opens what steps of several texts run, one graph after another, while others take their steps."""
        for texts, gear in product(self.batches, self.bundle.manifest.gears):
            self.refuse_closed()
            self.make_ready([self.begin(gear.slots)] * texts, [gear] * texts)

    def draft(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Draft]:
        """For every text a tree of its gear after its root."""
        return self.drafting.drafts(states, gears)

    @abstractmethod
    def new_kv(self, slots: int) -> Any:
        """An empty `KvCache` of this engine."""

    def new_draft(self, kv: Any, rows: Sequence[TokenRows], width: int) -> DraftCache:
        """An empty drafter's cache next to a teacher's; ``width`` is that of the features."""
        return DraftCache(rows, width, self.zeros)

    def prefill(self, state: SequenceState, tokens_n: NDArray[np.int64]) -> TeacherOutput:
        """Appends and commits tokens in as many launches as it takes; returns the last row's outputs (R = 1)."""
        for chunk_n in self._chunks(state, tokens_n):
            output = self._launched(state, chunk_n)
        return output

    def _launched(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        output = self.append(state, chunk_n)
        self.drafting.catch_up(state)
        return TeacherOutput(output.logits_RV[-1:], output.choice_R[-1:], output.features_RF[-1:])

    def _chunks(self, state: SequenceState, tokens_n: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The tokens launch by launch; a launch is chosen when those before it have run."""
        at = 0
        while at < len(tokens_n):
            count = self.chunk(state, len(tokens_n) - at)
            yield np.ascontiguousarray(tokens_n[at : at + count], np.int64)
            at += count

    @abstractmethod
    def chunk(self, state: SequenceState, left: int) -> int:
        """How many of a prompt's tokens that are left the next launch takes."""

    def launches(self, slots: int) -> tuple[int, ...]:
        """Tokens of a prompt that a launch takes at most, for every graph for prompts at a KV length, ascending."""
        return ()

    @abstractmethod
    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        """Appends and commits the tokens of one launch; of the outputs the last row's are used."""

    @abstractmethod
    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        """Runs the trees' rows after the committed texts (R = T)."""

    @property
    def zeros(self) -> Zeros:
        """Makes the buffers of a cache, in the memory that this engine needs."""
        return host_zeros

    @property
    def nodes(self) -> Mapping[str, int]:
        """Nodes of the open graphs by the provider of onnxruntime that runs them; none if there is one provider."""
        return {}

    @property
    def half(self) -> bool:
        """Whether it computes in half precision, in which rows of one function differ more."""
        return int(self.zeros((1,)).itemsize) < 4

    def close(self) -> None:
        """Waits for the step that runs, and refuses all later ones; memory goes with the last reference."""
        with self._turns:
            self._closed = True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time; RequestError once the engine is closed."""
        with self._turns:
            self.refuse_closed()
            yield

    def refuse_closed(self) -> None:
        """Raises RequestError once the engine is closed."""
        if self._closed:
            raise RequestError(f"{self.bundle.folder}: is closed; open it again")


def drained(reading: Generator[None, None, Prefill]) -> Prefill:
    """The results of a prompt's launches, one after another."""
    while True:
        try:
            next(reading)
        except StopIteration as ended:
            done: Prefill = ended.value
            return done
