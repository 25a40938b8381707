"""The process that decodes from one bundle: opens, proves and warms it, then answers what comes over its socket.

It ends when the server's side of the socket is closed, however that came about.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import IO, cast

import msgspec
import numpy as np

import draftwood
from draftwood.errors import BusyError, NumericError, RequestError, UserError
from draftwood.manifest import Gear
from draftwood.runtime import reasoning
from draftwood.runtime.decoding import Decoding, Finish
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.opened import OpenedBundle, Prompt, continues, prompt_ids
from draftwood.runtime.speculation.apart import ApartGrammar, ApartGrammars
from draftwood.runtime.speculation.logprobs import TokenLogprobs
from draftwood.runtime.text.grammar import Grammar
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.threads import share_threads
from draftwood.tools.serve import calls, messages
from draftwood.tools.serve.messages import (
    Ask,
    Begun,
    Busy,
    CacheUse,
    Cancel,
    DraftedStep,
    Encode,
    Encoded,
    Ended,
    EngineArguments,
    Failed,
    Last,
    Piece,
    Reading,
    Ready,
    Refused,
    TokenLogprob,
    TopLogprob,
    ToServer,
    WrittenChat,
)

WARM_TOKENS = 3
# Of a request, that an error may begin with.
FIELDS = (
    *("prompt", "temperature", "top_p", "top_k", "seed", "logprobs", "stop", "grammar", "allowed_token_ids"),
    *("bad_words", "min_tokens", "logit_bias", "continue_final_message", "add_generation_prompt", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("tools", "chat_template_kwargs"),
)
# How a prompt that the context has no room for is refused.
_TOO_LONG = re.compile(r"(the prompt has|prompt:) \d+ tokens, but the (model|bundle)'s context is ")
# Grammars that are read at the same time: each may take a processor for seconds.
COMPILED_AT_ONCE = 2

log = logging.getLogger("draftwood.engine")


@dataclass(eq=False, slots=True)
class _Here:
    """A text that has been asked for and has not ended; ``decoding`` is there once its prompt is known to be good."""

    decoding: Decoding | None = None
    # The grammar that it is held to, in its own process.
    grammar: ApartGrammar | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Called from another thread. The code that sets ``decoding`` or ``grammar`` looks at ``cancelled``
        afterwards."""
        self.cancelled = True
        if self.decoding is not None:
            self.decoding.cancel()
        elif self.grammar is not None:
            self.grammar.close()


class Worker:
    """Texts of one bundle, each in a thread, which waits until the bundle has room for its caches."""

    def __init__(self, model: OpenedBundle, connection: socket.socket) -> None:
        self._model, self._socket = model, connection
        self._sending = threading.Lock()
        self._texts: dict[int, _Here] = {}
        self._encoding = ThreadPoolExecutor(1, "encode")
        self._grammars = _grammars(model)
        self._compiling = threading.BoundedSemaphore(COMPILED_AT_ONCE)
        self._reasoning = reasoning.form_of(model.bundle.tokenizer)

    def run(self, source: IO[bytes]) -> None:
        """Answers until the other side ends."""
        manifest, tokenizer = self._model.manifest, self._model.bundle.tokenizer
        ready = Ready(
            context=manifest.dims.context,
            sampling=manifest.teacher.sampling,
            calls=calls.form_of(tokenizer),
            reasoning=self._reasoning,
        )
        self._send(ready)
        threading.Thread(target=open_rest, args=[self._model], daemon=True).start()
        while len(head := source.read(messages.HEAD_BYTES)) == messages.HEAD_BYTES:
            message = messages.decode_for_engine(source.read(int.from_bytes(head, "big")))
            match message:
                case Ask():
                    self._texts[message.id] = _Here()
                    threading.Thread(target=self._answer, args=[message], daemon=True).start()
                case Cancel():
                    self._cancel(message.id)
                case Encode():
                    self._encoding.submit(self._encode, message)

    def _send(self, message: ToServer) -> None:
        with self._sending:
            self._socket.sendall(messages.framed(message))

    def _cancel(self, text: int) -> None:
        if (here := self._texts.get(text)) is not None:
            here.cancel()

    def _answer(self, ask: Ask) -> None:
        """One text; whatever happens, it has a last message."""
        last: Last
        try:
            last = Ended(ask.id, self._decode(ask))
        except BusyError:
            last = Busy(ask.id)
        except NumericError as error:
            last = Failed(ask.id, self._told(error))
        except UserError as error:
            last = _refusal(ask.id, self._told(error))
        except MemoryError:
            last = Failed(ask.id, "not enough memory for this text")
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.exception("text %d", ask.id)
            last = Failed(ask.id, f"the engine failed: {type(error).__name__}")
        here = self._texts.pop(ask.id)
        if here.grammar is not None:
            here.grammar.close()
        try:
            self._tell_caches()
        finally:
            self._send(last)

    def _told(self, error: UserError) -> str:
        """An error's text without the place of the bundle, which is no client's business."""
        return str(error).replace(str(self._model.bundle.folder), "the bundle")

    def _tell_caches(self) -> None:
        """Figures are taken while nothing else is sent, so that the last ones to arrive are the last ones taken."""
        with self._sending:
            figures = self._model.figures()
            self._socket.sendall(messages.framed(CacheUse(figures.running_bytes, figures.budget_bytes)))

    def _decode(self, ask: Ask) -> Finish:
        self._send(Reading(ask.id, done=False))
        decoding, here = self._decoding(ask), self._texts[ask.id]
        self._send(Reading(ask.id, done=True))
        here.decoding = decoding
        if here.cancelled:
            decoding.cancel()
        texts = iter(decoding)
        next(texts)  # there is room
        if not decoding.finished:
            self._tell_caches()
            chat, tokenizer = isinstance(ask.prompt, WrittenChat), self._model.bundle.tokenizer
            begins = chat and reasoning.begins_in(decoding.prompt, self._reasoning, tokenizer)
            self._send(Begun(ask.id, len(decoding.prompt), decoding.state.length, begins))
        for piece in self._pieces(ask, decoding, texts):
            self._send(piece)
        assert decoding.result is not None
        return decoding.result.finish_reason

    def _decoding(self, ask: Ask) -> Decoding:
        prompt = _read(ask.prompt)
        ids = prompt_ids(self._model.bundle, prompt)
        if len(ids) >= self._model.manifest.dims.context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the model's context is {self._model.manifest.dims.context} with"
                " the answer; shorten it"
            )
        grammar = ask.options.get("grammar")
        in_process = None if grammar is None else self._held(ask, grammar, ids)
        return self._model.stream(ids, policy=ask.policy, held=in_process, continued=continues(prompt), **ask.options)

    def _held(self, ask: Ask, grammar: Grammar, prompt: Sequence[int]) -> ApartGrammar:
        """A grammar in its own process, which a text's end ends wherever that is."""
        if self._grammars is None:
            raise RequestError("grammar: this bundle has no tokenizer, which says what its tokens spell")
        tokenizer, here = self._model.bundle.tokenizer, self._texts[ask.id]
        thought = reasoning.thought_after(prompt, self._reasoning, tokenizer) if ask.reasons else None
        with self._compiling:
            here.grammar = compiled = self._grammars.begin()
            if here.cancelled:
                compiled.close()
            compiled.compile(grammar, len(prompt), thought)
        return compiled

    def _pieces(self, ask: Ask, decoding: Decoding, texts: Iterator[str]) -> Iterator[Piece]:
        """A message for every step."""
        sent, seen = 0, None
        for text in texts:
            piece = Piece(id=ask.id, text=text, tokens=len(decoding.tokens) - sent)
            if ask.options.get("logprobs") is not None:
                piece.logprobs = [
                    self._drawn(token, logprobs)
                    for token, logprobs in zip(decoding.tokens[sent:], decoding.logprobs[sent:], strict=True)
                ]
                piece.offsets = decoding.offsets[sent:]
            if decoding.last is not None and decoding.last is not seen:
                seen = decoding.last
                # Tokens after the end, or beyond max_tokens, are not the text's.
                piece.drafted, piece.accepted = seen.rows - 1, min(len(seen.path), piece.tokens)
                piece.step = self._step(decoding) if ask.steps else None
            sent = len(decoding.tokens)
            if piece.tokens or piece.text:
                yield piece

    def _step(self, decoding: Decoding) -> DraftedStep:
        last = decoding.last
        assert last is not None and last.draft is not None
        tree, drafted = last.draft.tree, last.draft.tokens_T.tolist()
        accepted, parents = [0], tree.parents.tolist()
        for token in last.tokens[:-1]:  # of siblings with one token, acceptance takes the first
            accepted.append(next(r for r in range(1, tree.rows) if parents[r] == accepted[-1] and drafted[r] == token))
        return DraftedStep(
            gear=last.gear.name,
            parents=parents,
            tokens=[self._text(token) for token in drafted],
            accepted=accepted,
            bonus=self._text(last.tokens[-1]),
            ms=last.total_us / 1e3,
            texts=last.texts,
        )

    def _drawn(self, token: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = [TopLogprob(*self._told_of(other, logprob)) for other, logprob in logprobs.top]
        return TokenLogprob(*self._told_of(token, logprobs.logprob), top)

    def _told_of(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        """Name, log-probability and bytes; a special token has a name, and no bytes of the text."""
        name, tokenizer = self._text(token), self._model.bundle.tokenizer
        data = name.encode() if tokenizer is None else tokenizer.bytes_of(token)
        shown = data.decode(errors="backslashreplace")
        if data:
            name = shown if shown.encode() == data else f"bytes:{shown}"  # parts of characters are no text
        return name, logprob, list(data)

    def _text(self, token: int) -> str:
        tokenizer = self._model.bundle.tokenizer
        return str(token) if tokenizer is None else tokenizer.text_of(token) or tokenizer.name_of(token) or ""

    def _encode(self, message: Encode) -> None:
        try:
            tokenizer = self._model.bundle.tokenizer
            if isinstance(message.prompt, str) and isinstance(tokenizer, Tokenizer):
                ids = tokenizer.encode(message.prompt, special=message.special)
            else:
                ids = prompt_ids(self._model.bundle, _read(message.prompt))
            self._send(Encoded(message.id, ids))
        except UserError as error:
            self._send(_refusal(message.id, self._told(error)))
        except BaseException as error:  # as for a text
            log.exception("tokenize")
            self._send(Failed(message.id, f"the engine failed: {type(error).__name__}"))


def _grammars(model: OpenedBundle) -> ApartGrammars | None:
    """Grammars over a bundle's tokenizer; their program is started, so that the first text need not wait for it."""
    tokenizer = model.bundle.tokenizer
    if tokenizer is None:
        return None
    grammars = ApartGrammars(tokenizer, model.manifest.dims.vocabulary, model.manifest.teacher.eos)
    grammars.warm()
    return grammars


def _read(prompt: str | list[int] | WrittenChat) -> Prompt:
    return cast(Prompt, prompt.read()) if isinstance(prompt, WrittenChat) else prompt


def _refusal(text: int, message: str) -> Refused:
    """An error's text with the field of the request that it is about, if that is known."""
    if _TOO_LONG.match(message):  # clients cut a chat that is refused so
        return Refused(id=text, message=message, param="messages", code="context_length_exceeded")
    about, name = re.match(r"(sampling: |chat: |gear |--|)(\w*)", message).groups()  # type: ignore[union-attr]
    others = {"chat: ": "messages", "gear ": "draftwood.policy"}
    return Refused(id=text, message=message, param=name if name in FIELDS else others.get(about))


def warm(model: OpenedBundle) -> None:
    """A step of every gear, so that the first client does not wait for what is made once.

    The gears are named, since the adaptive policy would learn from this text and choose worse in those that follow.
    """
    tokens = min(WARM_TOKENS, model.manifest.dims.context - 1)
    for gear in model.manifest.gears:
        model.generate([0], max_new_tokens=tokens, policy=gear.name)
    model.stream([0], max_new_tokens=1)  # makes the adaptive policy's tables; nothing is decoded
    if model.engine.padded:
        _warm_together(model.engine, model.manifest.gears)


def _warm_together(engine: Engine, gears: Sequence[Gear]) -> None:
    """Steps of several texts, of every number and gear that there are graphs for."""
    for texts, gear in product(engine.batches, gears):
        states = [engine.begin(gear.slots) for _ in range(texts)]
        for state in states:
            engine.start(state, np.zeros(1, np.int64))
        engine.step(states, [gear] * texts)


def open_rest(model: OpenedBundle) -> None:
    """Opens the graphs of several texts, if they need no more than that, while the first clients are served already."""
    if not model.engine.padded:
        with contextlib.suppress(UserError):  # the bundle was closed, or the text that needs the graph gets the error
            model.engine.open_all()


def main() -> int:
    """``python -m draftwood.tools.serve.worker SOCKET ARGUMENTS``, as the server starts it."""
    number, encoded = sys.argv[1:]
    arguments = msgspec.json.decode(encoded, type=EngineArguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    connection = socket.socket(fileno=int(number))
    share_threads(arguments.opening.threads)
    try:
        model = draftwood.open(arguments.bundle, arguments.opening)
        warm(model)
    except UserError as error:
        print("draftwood: error:", error, file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # the server may be gone at any moment
        Worker(model, connection).run(connection.makefile("rb"))
    sys.stderr.flush()
    os._exit(0)  # texts that are still being decoded have nobody to read them


if __name__ == "__main__":
    sys.exit(main())
