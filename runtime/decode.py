"""The decoding loop: prefill, then draft, verify, accept and commit until the text ends.

At every row of the walk the teacher draws one token from its own distribution with the uniform number of
that absolute position; a child that carries the token is accepted, otherwise the token is the bonus. The
text for a seed is therefore the same for every tree, plain decoding included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.clock import StepClock
from draftwood.runtime.engine import Engine, StepResult
from draftwood.runtime.policy import Outcome, Policy
from draftwood.runtime.sampling import Sampling, draw
from draftwood.runtime.stream import Stream
from draftwood.runtime.trace import StepEvent, StepKind, Trace
from draftwood.trees import Accepted, TreeBuffers

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How one text is decoded."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    # Go on past the teacher's end tokens.
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"--max-new-tokens {self.max_new_tokens}: expected at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished text. ``token_ids`` are the new tokens, the end token counted; times are in seconds."""

    token_ids: tuple[int, ...]
    text: str | None
    steps: int
    accept_length_mean: float
    prefill_seconds: float
    decode_seconds: float
    # Share of decode_seconds spent outside graph execution.
    host_share: float
    finish_reason: FinishReason


class Decoding:
    """One text being decoded; iterating yields pieces of text as they become final (empty without tokenizer).

    ``result`` is set when the iteration has ended.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        options: Options,
        policy: Policy,
        trace: Trace | None = None,
    ) -> None:
        bundle = engine.bundle
        self.engine, self.options, self.policy, self.trace = engine, options, policy, trace
        self.prompt = _checked_prompt(bundle, prompt)
        self.tokens: list[int] = []
        self.result: Result | None = None
        if options.stop_strings and bundle.text is None:
            raise RequestError("stop strings need a tokenizer, and this bundle has none; stop by token ids instead")
        self._stream = Stream(bundle.text, options.stop_strings) if bundle.text else None
        self._pieces: list[str] = []
        self._ends = frozenset() if options.ignore_eos else frozenset(bundle.manifest.teacher.eos)
        self._clock = StepClock()
        self._steps = 0
        self._finish: FinishReason | None = None

    def __iter__(self) -> Iterator[str]:
        began = time.perf_counter()
        gear = self.policy.choose(len(self.prompt)) or max(self.engine.bundle.manifest.gears, key=lambda g: g.slots)
        self._cache = self.engine.new_cache(gear.slots)
        yield self._take([self._prefill()])
        prefilled = time.perf_counter()
        self._clock.graph_us = 0.0
        while self._finish is None:
            yield self._take(self._step(self.tokens[-1]))
        ended = time.perf_counter()
        yield self._flush()
        self.result = self._conclude(prefilled - began, ended - prefilled)

    def run(self) -> Result:
        """Decodes to the end."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    def _prefill(self) -> int:
        clock = self._clock.restart()
        result = self.engine.prefill(self._cache, np.array(self.prompt, np.int64))
        clock.mark("verify")
        token = self._draw(result, 0, len(self.prompt))
        clock.mark("accept")
        self._record("prefill", "prefill", 0, len(self.prompt), len(self.prompt), (), [token])
        return token

    def _step(self, root: int) -> list[int]:
        """One draft, verify, accept and commit: the tokens gained."""
        cache, clock, position = self._cache, self._clock.restart(), self._cache.length
        gear = self.policy.choose(position)
        assert gear is not None, "a text that fills the context has ended"
        if cache.slots < gear.slots:
            cache.grow(gear.slots)
        clock.mark("host")
        drafted = None if gear.draft is None else self.engine.draft(cache, gear, root)
        if drafted is None:
            tokens_T, tree = np.array([root], np.int64), self.engine.bundle.trees[gear.tree][1]
        else:
            tokens_T, tree = drafted.tokens_T, drafted.tree
        clock.mark("draft")
        result = self.engine.verify(cache, tokens_T, tree)
        clock.mark("verify")
        accepted = walk(tree, tokens_T, lambda row, depth: self._draw(result, row, position + depth + 1))
        gained = [*tokens_T[list(accepted.rows[1:])].tolist(), accepted.bonus]
        cache.commit(accepted.rows)
        clock.mark("accept")
        self._steps += 1
        kind: StepKind = "verify" if drafted else "decode"
        clock.mark("host")
        outcome = Outcome(
            gear=gear,
            length=position,
            path=accepted.path,
            gained=len(gained),
            rank=drafted.rank(len(accepted.path), accepted.bonus) if drafted else None,
            draft_us=clock.us["draft"],
            verify_us=clock.us["verify"],
            host_us=clock.us["accept"] + clock.us["host"],
            confidence=drafted.confidence if drafted else None,
        )
        self._record(kind, gear.name, position, tree.rows, len(gained), accepted.path, gained, outcome)
        self.policy.observe(outcome)
        return gained

    def _draw(self, result: StepResult, row: int, position: int) -> int:
        if self.options.sampling.greedy:
            return int(result.choice_R[row])
        return draw(result.logits_RV[row], self.options.sampling, position)

    def _take(self, gained: list[int]) -> str:
        """Keeps tokens up to the first end and decides whether the text is finished; returns final text."""
        room = self.engine.bundle.manifest.dims.context - len(self.prompt) - len(self.tokens)
        asked = self.options.max_new_tokens - len(self.tokens)
        kept = gained[: min(asked, max(room, 1))]
        if len(kept) == asked:
            self._finish = "length"
        elif len(kept) >= room:
            self._finish = "context"
        end = next((i for i, token in enumerate(kept) if token in self._ends), None)
        if end is not None:
            kept, self._finish = kept[: end + 1], "stop"
        return self._emit(kept)

    def _emit(self, kept: list[int]) -> str:
        if self._stream is None:
            self.tokens += kept
            return ""
        piece = ""
        for token in kept:
            self.tokens.append(token)
            piece += self._stream.push([token])
            if self._stream.stopped:
                self._finish = "stop"
                break
        return self._piece(piece)

    def _flush(self) -> str:
        if self._stream is None:
            return ""
        piece = self._piece(self._stream.finish())
        if self._stream.stopped:  # held-back text turned out to end in a stop string
            self._finish = "stop"
        return piece

    def _piece(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _record(
        self,
        kind: StepKind,
        gear: str,
        position: int,
        rows: int,
        accepted: int,
        path: tuple[int, ...],
        tokens: list[int],
        outcome: Outcome | None = None,
    ) -> None:
        clock = self._clock
        clock.mark("host")
        if self.trace is None:
            return
        expected = self.policy.expected(outcome.gear, position) if outcome else None
        self.trace.add(
            StepEvent(
                kind=kind,
                step=self._steps,
                gear=gear,
                position=position,
                rows=rows,
                accepted=accepted,
                path=path,
                tokens=tuple(tokens),
                start_us=clock.start_us,
                draft_us=clock.us["draft"],
                verify_us=clock.us["verify"],
                accept_us=clock.us["accept"],
                host_us=clock.us["host"],
                rank=outcome.rank if outcome else None,
                confidence=outcome.confidence if outcome else None,
                expected_tokens=expected.tokens if expected else None,
                expected_us=expected.us if expected else None,
            )
        )

    def _conclude(self, prefill_seconds: float, decode_seconds: float) -> Result:
        assert self._finish is not None
        return Result(
            token_ids=tuple(self.tokens),
            text="".join(self._pieces) if self._stream else None,
            steps=self._steps,
            accept_length_mean=(len(self.tokens) - 1) / self._steps if self._steps else 0.0,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            host_share=1 - self._clock.graph_us / 1e6 / decode_seconds if self._steps else 0.0,
            finish_reason=self._finish,
        )


def walk(tree: TreeBuffers, tokens_T: NDArray[np.int64], draw: Callable[[int, int], int]) -> Accepted:
    """Follows the teacher's tokens down a tree; ``draw`` gives its one token at a row of some depth.

    As `draftwood.trees.walk`, for a tree that is known by its buffers alone: of siblings with equal tokens the
    first in row order is taken.
    """
    parents, tokens = tree.parents.tolist(), tokens_T.tolist()
    rows = [0]
    while True:
        at = rows[-1]
        token = draw(at, len(rows) - 1)
        child = next((r for r in range(at + 1, len(parents)) if parents[r] == at and tokens[r] == token), None)
        if child is None:
            return Accepted(tuple(rows), token, tuple(int(tree.ranks[row]) for row in rows[1:]))
        rows.append(child)


def _checked_prompt(bundle: Bundle, prompt: Sequence[int]) -> tuple[int, ...]:
    dims = bundle.manifest.dims
    if not prompt:
        raise RequestError("prompt: empty; expected at least one token")
    if len(prompt) >= dims.context:
        raise RequestError(
            f"prompt: {len(prompt)} tokens, but the bundle's context is {dims.context} with the answer;"
            " shorten it or build with a larger --kv"
        )
    bad = next((token for token in prompt if not 0 <= token < dims.vocabulary), None)
    if bad is not None:
        raise RequestError(f"prompt: token id {bad} is outside the vocabulary 0 to {dims.vocabulary - 1}")
    return tuple(prompt)
