"""One text from prompt to end: prefill, then steps until it stops.

A step itself is in `draftwood.runtime.speculation.step`. The seed and the position alone decide the token at a
position. So the text is the same for every gear and policy, plain decoding included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import numpy as np

from draftwood.errors import BusyError, RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.caches import Wanted
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Asking, Policy, a_gear
from draftwood.runtime.sharing import Sharing, advance
from draftwood.runtime.speculation.adjustment import Adjustment
from draftwood.runtime.speculation.apart import ApartGrammar, ApartGuide
from draftwood.runtime.speculation.constraint import Constraint
from draftwood.runtime.speculation.guide import Guide, Guiding
from draftwood.runtime.speculation.logprobs import TokenLogprobs
from draftwood.runtime.speculation.lookup import match_class
from draftwood.runtime.speculation.restriction import Restriction, check_ids, words_of
from draftwood.runtime.speculation.step import Outcome, Prefill
from draftwood.runtime.stream import Stream
from draftwood.runtime.text.grammar import Grammar, TextGrammar
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.runtime.trace import StepEvent, Trace

Finish = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished text. ``token_ids`` are the new tokens, the end token counted; ``decode_seconds`` are those of all but
    the first."""

    token_ids: tuple[int, ...]
    text: str | None
    steps: int
    accept_length_mean: float
    first_token_seconds: float
    decode_seconds: float
    # Share of decode_seconds spent outside graph execution.
    host_share: float
    finish_reason: Finish
    # Tokens of the prompt that were not read, since the caches of an ended text had them.
    prefix_tokens: int = 0
    # Of every token, if they were asked for.
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Decoding:
    """One text being decoded; iterating yields pieces of text as they become final (empty without tokenizer).

    With ``sharing`` it waits for room, and takes its steps in launches with other texts. The first piece is empty and
    comes once there is room. The text keeps its room until it has ended, its iterator is closed, or it is cancelled. A
    text whose iterator was closed early is cancelled; it is not begun anew. It has one iterator at a time.

    ``result`` is set when the iteration has ended.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        options: Options,
        policy: Policy,
        trace: Trace | None = None,
        sharing: Sharing | None = None,
        continues: bool = False,
    ) -> None:
        """``continues``: the text goes on with the prompt's own, so it keeps its first space."""
        bundle, self._sharing = engine.bundle, sharing
        self.engine, self.options, self.policy, self.trace = engine, options, policy, trace
        self.prompt = _checked_prompt(bundle, prompt)
        self.tokens: list[int] = []
        # Of every token, if they were asked for.
        self.logprobs: list[TokenLogprobs] = []
        # Of every token the characters of the text before it; a character of several tokens begins at the first.
        self.offsets: list[int] = []
        self.result: Result | None = None
        # Held by the iterator that is open.
        self._reader = Lock()
        # The record of the last step.
        self.last: Outcome | None = None
        if options.stop_strings and bundle.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this bundle has none; stop by token ids instead")
        check_ids("stop_token_ids", options.stop_token_ids, bundle.manifest.dims.vocabulary)
        _check_special(bundle.tokenizer, options.special_tokens)
        eos = () if options.ignore_eos else bundle.manifest.teacher.eos
        self._ends = frozenset((*options.stop_token_ids, *eos))
        self._silent = self._unshown()
        self._grammar: TextGrammar | ApartGrammar | None = (
            None if options.grammar is None else _grammar(engine, options.grammar)
        )
        self._constraint: Constraint | None = self._restriction() if options.wishes else self._grammar
        after = self.prompt if continues else ()
        self._stream = _stream(bundle.tokenizer, options, after) if bundle.tokenizer is not None else None
        self._pieces: list[str] = []
        self._looks_up = any(gear.looks_up for gear in bundle.manifest.gears)
        self._steps = self._late = self._prefix = 0
        # Tokens that the last draft's step gained. Every draft writes them, so they do not count as late.
        self._gained = 0
        self._finish: Finish | None = None
        self._origin_us = self._began_us = _now_us()
        self._prefill_us = self._graph_us = self._choice_us = 0.0

    def __iter__(self) -> Generator[str, None, None]:
        if not self._reader.acquire(blocking=False):
            raise RequestError("stream: another iterator over it is open, or it runs; a text has one reader at a time")
        try:
            if self._sharing is not None:
                yield self._next(self._admit)
            if self._finish is None:
                yield self._next(self._begin)
            while self._finish is None:
                yield self._next(self._step)
            if self.result is None:
                yield self.end()
        except BusyError:  # it has not begun, and may be asked for again
            raise
        except BaseException:  # the iterator was closed, too
            self._finish = self._finish or "cancelled"
            raise
        finally:
            if self._sharing is not None:
                self._sharing.cancel(self)
                if self.result is not None:  # whoever keeps the result does not keep its caches
                    vars(self).pop("state", None)
            self._reader.release()

    def cancel(self) -> None:
        """Ends the text after the step that runs, if one does; its room is free then. From any thread, at any time.

        An iteration over it then gets the pieces that are there, and a ``result`` whose ``finish_reason`` is
        ``cancelled``.
        """
        self._finish = self._finish or "cancelled"
        if self._sharing is not None:
            self._sharing.cancel(self)

    def _next(self, act: Callable[[], object]) -> str:
        """The text that an act gives."""
        sent = len(self._pieces)
        act()
        return "".join(self._pieces[sent:])

    def _admit(self) -> None:
        assert self._sharing is not None
        if self._finish is None and not self._sharing.admit(self):
            self._finish = "cancelled"

    def _begin(self) -> None:
        if self._sharing is None:
            self.start()
        elif not self._sharing.read(self) and self._finish is None:
            self._finish = "cancelled"

    def _step(self) -> None:
        if self._sharing is None:
            advance(self.engine, [self])
        elif not self._sharing.step(self) and self._finish is None:
            self._finish = "cancelled"

    def run(self) -> Result:
        """Decodes to the end."""
        for _ in self:
            pass
        assert self.result is not None
        return self.result

    @property
    def finished(self) -> bool:
        """Whether the text has ended; ``end`` then gives the pieces held back."""
        return self._finish is not None

    def start(self) -> str:
        """Prefill and the first token; returns final text."""
        self._began_us = _now_us()
        self.state = self.engine.begin(self.wanted().slots, self.options.sampling)
        self._hold()
        return self._started(self.engine.start(self.state, np.array(self.prompt, np.int64)))

    def wanted(self) -> Wanted:
        """The caches that it asks for."""
        manifest = self.engine.bundle.manifest
        length = len(self.prompt)
        gear = a_gear(self.policy.choose(length) or max(manifest.gears, key=lambda gear: gear.slots), length)
        self._rows(gear)
        longest = min(len(self.prompt) + self.options.max_new_tokens, manifest.dims.context)
        return Wanted(self.prompt, longest, gear.slots, self.options.sampling)

    def read(self) -> Generator[None, None, None]:
        """Prefill of the tokens that the caches do not have, one launch per ``next``; the last one gives the first
        token."""
        self._began_us, self._prefix = _now_us(), self.state.length
        self._hold()
        if self.state.slots < (slots := self.wanted().slots):
            self.state.grow(slots)
        rest_n = np.array(self.prompt[self._prefix :], np.int64)
        self._started((yield from self.engine.read(self.state, rest_n)))

    def _hold(self) -> None:
        """The state keeps the options, and the grammar that holds the text."""
        self.state.top, self.state.constraint = self.options.logprobs, self._constraint
        self.state.guide = self._guide()
        wishes = self.options.wishes
        self.state.adjustment = Adjustment(wishes, self.prompt) if wishes.adjusts else None

    def _restriction(self) -> Constraint | None:
        """The restriction, the grammar included; None if logits are adjusted alone."""
        wishes, tokenizer = self.options.wishes, self.engine.bundle.tokenizer
        vocabulary = self.engine.bundle.manifest.dims.vocabulary
        wishes.check(vocabulary)
        if wishes.bad_words and tokenizer is None:
            raise RequestError("bad_words: this bundle has no tokenizer, which says what its tokens spell")
        words = words_of(wishes.bad_words, tokenizer) if tokenizer is not None else set()
        if not (words or wishes.allowed_token_ids or wishes.min_tokens):
            return self._grammar
        return Restriction(wishes, words, self._ends, vocabulary, len(self.prompt), self._grammar)

    def _guide(self) -> Guiding | None:
        match self._grammar:
            case ApartGrammar():
                return ApartGuide(self._grammar, len(self.prompt))
            case TextGrammar():
                return Guide(self._grammar.copied(), len(self.prompt))
        return None

    def _started(self, done: Prefill) -> str:
        if self.trace is not None:
            self.trace.check_new()  # another text may have begun meanwhile
            self.trace.add(self._prefill_event(done))
        self._prefill_us = _now_us() - self._origin_us
        return self._take(list(done.tokens))

    def asking(self) -> Asking:
        """Facts that the gear of the next step is chosen by."""
        self._began_us = _now_us()
        self._late = self._behind()
        match = match_class(self.state.index().match) if self._looks_up else 0  # 0 if no gear looks there
        return Asking(self.policy, self.state.length, self._late, match)

    def take(self, gear: Gear) -> None:
        """The gear of the next step; the cache is grown to its KV length.

        Raises:
            RequestError: the policy, which may be a user's own, chose a gear whose rows have no room.
        """
        if self.state.length + self._rows(gear) >= gear.slots:
            raise RequestError(
                f"policy: chose gear {gear.name} of KV length {gear.slots} after {self.state.length} tokens; expected a"
                " gear of manifest.gears with room for its rows and a spare slot"
            )
        if self.state.slots < gear.slots:
            self.state.grow(gear.slots)
        self._choice_us = _now_us() - self._began_us

    def _rows(self, gear: Gear) -> int:
        """Rows of a gear's tree; RequestError if the policy, which may be a user's own, has made the gear up."""
        rows = self.engine.bundle.rows.get(gear)
        if rows is None:
            raise RequestError(f"policy: chose {gear!r:.80}; expected a gear of manifest.gears")
        return rows

    def _behind(self) -> int:
        """Tokens missing in the drafter's caches, beyond those that the last step gained."""
        draft = self.state.draft
        return max(draft.waiting - self._gained, 0) if draft is not None and draft.buffers else 0

    def receive(self, outcome: Outcome) -> str:
        """Takes the tokens of a step; returns final text."""
        self._steps += 1
        # The clock would count other texts' steps, too.
        outcome = outcome._replace(
            host_us=self._choice_us + outcome.host_us, late=self._late if outcome.gear.neural else 0
        )
        self._gained = outcome.gained if outcome.gear.neural else 0
        self._graph_us += outcome.draft_us + outcome.verify_us
        self.last = outcome
        if self.trace is not None:
            self.trace.add(self._event(outcome))
        self.policy.observe(outcome)
        return self._take(list(outcome.tokens))

    def end(self) -> str:
        """Text that was held back; sets ``result``."""
        ended_us = _now_us()
        piece = ""
        if self._stream is not None:
            piece = self._piece(self._stream.finish())
            if self._stream.stopped:  # held-back text turned out to end in a stop string
                self._finish = "stop"
        self.result = self._conclude(ended_us - self._origin_us - self._prefill_us)
        return piece

    def _unshown(self) -> frozenset[int]:
        """The ends that are not in the text. The tokenizer of some teachers has their end token as plain."""
        tokenizer, options = self.engine.bundle.tokenizer, self.options
        if tokenizer is None or options.include_stop_str_in_output:
            return frozenset()
        wanted = {tokenizer.special_id(token) for token in options.special_tokens}
        return self._ends - (wanted - {*options.stop_token_ids})

    def _take(self, gained: list[int]) -> str:
        """Keeps tokens up to the first end and decides whether the text is finished; returns final text."""
        room = self.engine.bundle.manifest.dims.context - len(self.prompt) - len(self.tokens)
        left = self.options.max_new_tokens - len(self.tokens)
        final = gained[: min(left, max(room, 1))]
        if len(final) == left:
            self._finish = "length"
        elif len(final) >= room:
            self._finish = "context"
        end = next((i for i, token in enumerate(final) if token in self._ends), None)
        if end is not None:
            final, self._finish = final[: end + 1], "stop"
        return self._emit(final)

    def _emit(self, tokens: list[int]) -> str:
        piece = ""
        for token in tokens:
            self.tokens.append(token)
            self.offsets.append(0 if self._stream is None else self._stream.offset_of(token))
            if self._stream is not None and token not in self._silent:
                piece += self._stream.push([token])
                if self._stream.stopped:
                    self._finish = "stop"
                    break
        self._keep_logprobs()
        return self._piece(piece)

    def _keep_logprobs(self) -> None:
        """Keeps the log-probabilities of the last tokens."""
        if self.options.logprobs is None:
            return
        assert self.state.logprobs is not None, "every step leaves those that are wanted"
        self.logprobs += self.state.logprobs[: len(self.tokens) - len(self.logprobs)]

    def _piece(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _prefill_event(self, done: Prefill) -> StepEvent:
        return StepEvent(
            kind="prefill",
            step=0,
            gear="prefill",
            position=self._prefix,
            rows=done.rows,
            accepted=done.rows,
            path=(),
            tokens=done.tokens,
            start_us=self._began_us - self._origin_us,
            draft_us=0.0,
            verify_us=done.verify_us,
            accept_us=done.accept_us,
            host_us=max(0.0, _now_us() - self._began_us - done.verify_us - done.accept_us),
        )

    def _event(self, outcome: Outcome) -> StepEvent:
        in_parts_us = outcome.draft_us + outcome.verify_us + outcome.accept_us
        return StepEvent.of(
            outcome,
            step=self._steps,
            start_us=self._began_us - self._origin_us,
            host_us=max(0.0, _now_us() - self._began_us - in_parts_us),
            expected=self.policy.expected(),
        )

    def _conclude(self, decode_us: float) -> Result:
        assert self._finish is not None
        return Result(
            token_ids=tuple(self.tokens),
            text="".join(self._pieces) if self._stream else None,
            steps=self._steps,
            accept_length_mean=(len(self.tokens) - 1) / self._steps if self._steps else 0.0,
            first_token_seconds=self._prefill_us / 1e6,
            decode_seconds=decode_us / 1e6,
            host_share=1 - self._graph_us / decode_us if self._steps else 0.0,
            finish_reason=self._finish,
            prefix_tokens=self._prefix,
            logprobs=None if self.options.logprobs is None else tuple(self.logprobs),
        )


def _checked_prompt(bundle: Bundle, prompt: Sequence[int]) -> tuple[int, ...]:
    dims = bundle.manifest.dims
    if not prompt:
        raise RequestError("prompt: empty; expected at least one token")
    if len(prompt) >= dims.context:
        raise RequestError(
            f"prompt: {len(prompt)} tokens, but the bundle's context is {dims.context} with the answer;"
            " shorten it or build with a larger --kv"
        )
    check_ids("prompt", prompt, dims.vocabulary)
    return tuple(prompt)


def _check_special(tokenizer: Tokenizer | None, names: Sequence[str]) -> None:
    strange = next((name for name in names if tokenizer is not None and tokenizer.token_id(name) is None), None)
    if strange is not None:
        raise RequestError(
            f"special_tokens: {strange!r:.80} is no token of this bundle; expected the spelling of its vocabulary"
        )


def _grammar(engine: Engine, grammar: Grammar | ApartGrammar) -> TextGrammar | ApartGrammar:
    return grammar if isinstance(grammar, ApartGrammar) else engine.bundle.grammars.begin(grammar)


def _stream(tokenizer: Tokenizer, options: Options, after: Sequence[int]) -> Stream:
    shows, least = options.include_stop_str_in_output, options.wishes.min_tokens
    stops, special_tokens = options.stop_strings, options.special_tokens
    return Stream(tokenizer, stops, special_tokens, shows_stop=shows, least=least, after=after)


def _now_us() -> float:
    return time.perf_counter_ns() / 1000
