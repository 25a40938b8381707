"""The process that decodes from one bundle: opens, proves and warms it, then answers what comes over its socket.

It ends when the server's side of the socket is closed, however that came about.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import draftwood
from draftwood.errors import NumericError, UserError
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.opened import OpenedBundle, prompt_ids
from draftwood.runtime.speculation.logprobs import TokenLogprobs
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.serve import messages
from draftwood.tools.serve.messages import (
    Ask,
    Begun,
    Cancel,
    Drawn,
    Encode,
    Encoded,
    Ended,
    Failed,
    Finish,
    Piece,
    Ready,
    Refused,
    Step,
    Token,
    ToServer,
)

WARM_TOKENS = 8

log = logging.getLogger("draftwood.engine")


class Worker:
    """Texts of one bundle, each in a thread; their launches are shared where the engine shares them."""

    def __init__(self, model: OpenedBundle, connection: socket.socket, places: int) -> None:
        self._model, self._socket = model, connection
        self._sending = threading.Lock()
        self._cancelled: dict[int, threading.Event] = {}
        self._threads = ThreadPoolExecutor(places, "text")
        self._encoding = ThreadPoolExecutor(1, "encode")

    def run(self, source: IO[bytes]) -> None:
        """Answers until the other side ends."""
        manifest, tokenizer = self._model.manifest, self._model.bundle.tokenizer
        self._send(
            Ready(
                context=manifest.dims.context,
                vocabulary=manifest.dims.vocabulary,
                engine=type(self._model.engine).__name__,
                chat=tokenizer is not None and tokenizer.has_chat,
                batch=self._model.engine.max_batch,
            )
        )
        while len(head := source.read(messages.HEAD_BYTES)) == messages.HEAD_BYTES:
            message = messages.decode_for_engine(source.read(int.from_bytes(head, "big")))
            match message:
                case Ask():
                    self._cancelled[message.id] = threading.Event()
                    self._threads.submit(self._answer, message)
                case Cancel():
                    if (event := self._cancelled.get(message.id)) is not None:
                        event.set()
                case Encode():
                    self._encoding.submit(self._encode, message)

    def _send(self, message: ToServer) -> None:
        with self._sending:
            self._socket.sendall(messages.framed(message))

    def _answer(self, ask: Ask) -> None:
        """One text; whatever happens, its last message frees its place."""
        last: ToServer
        try:
            last = Ended(ask.id, self._decode(ask))
        except NumericError as error:
            last = Failed(ask.id, str(error))
        except UserError as error:
            last = _refusal(ask.id, str(error))
        except MemoryError:
            last = Failed(ask.id, "not enough memory for this text")
        except Exception as error:
            log.exception("text %d", ask.id)
            last = Failed(ask.id, f"the engine failed: {type(error).__name__}")
        del self._cancelled[ask.id]
        self._send(last)

    def _decode(self, ask: Ask) -> Finish:
        cancelled = self._cancelled[ask.id]
        if cancelled.is_set():
            return "cancelled"
        ids = prompt_ids(self._model.bundle, ask.prompt)
        room = self._model.manifest.dims.context - len(ids)
        if room < 1:
            raise _TooLong(len(ids), self._model.manifest.dims.context)
        decoding = self._model.stream(
            ids,
            policy=ask.policy,
            max_new_tokens=ask.max_new_tokens if ask.max_new_tokens is not None else min(ask.limit, room),
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=ask.seed,
            stop=ask.stop,
            ignore_eos=ask.ignore_eos,
            logprobs=ask.logprobs,
        )
        self._send(Begun(ask.id, len(ids)))
        for piece in self._pieces(ask, decoding):
            self._send(piece)
            if cancelled.is_set():
                return "cancelled"
        assert decoding.result is not None
        return decoding.result.finish_reason

    def _pieces(self, ask: Ask, decoding: Decoding) -> Iterator[Piece]:
        """A message for every step."""
        sent, seen = 0, None
        for text in decoding:
            piece = Piece(id=ask.id, text=text, tokens=len(decoding.tokens) - sent)
            if ask.logprobs is not None:
                piece.logprobs = [
                    self._drawn(token, found)
                    for token, found in zip(decoding.tokens[sent:], decoding.logprobs[sent:], strict=True)
                ]
            if decoding.last is not None and decoding.last is not seen:
                seen = decoding.last
                piece.drafted, piece.accepted = seen.rows - 1, len(seen.path)
                piece.step = self._step(decoding) if ask.steps else None
            sent = len(decoding.tokens)
            if piece.tokens or piece.text:
                yield piece

    def _step(self, decoding: Decoding) -> Step:
        last = decoding.last
        assert last is not None and last.draft is not None
        tree, drafted = last.draft.tree, last.draft.tokens_T.tolist()
        accepted = [0]
        for token in last.tokens[:-1]:  # a path is told by its tokens: no parent has two children of one token
            parents = tree.parents.tolist()
            accepted.append(next(r for r in range(1, tree.rows) if parents[r] == accepted[-1] and drafted[r] == token))
        return Step(
            gear=last.gear.name,
            parents=tree.parents.tolist(),
            tokens=[self._text(token) for token in drafted],
            accepted=accepted,
            bonus=self._text(last.tokens[-1]),
            ms=last.total_us / 1e3,
            texts=last.texts,
        )

    def _drawn(self, token: int, found: TokenLogprobs) -> Drawn:
        top = [Token(self._text(one), logprob) for one, logprob in found.top]
        return Drawn(self._text(token), found.logprob, top)

    def _text(self, token: int) -> str:
        tokenizer = self._model.bundle.tokenizer
        return str(token) if tokenizer is None else tokenizer.decode([token]) or tokenizer.spelling(token) or ""

    def _encode(self, message: Encode) -> None:
        try:
            tokenizer = self._model.bundle.tokenizer
            if isinstance(message.prompt, str) and isinstance(tokenizer, Tokenizer):
                ids = tokenizer.encode(message.prompt, special=message.special)
            else:
                ids = prompt_ids(self._model.bundle, message.prompt)
            self._send(Encoded(message.id, ids))
        except UserError as error:
            self._send(_refusal(message.id, str(error)))
        except Exception as error:
            log.exception("tokenize")
            self._send(Failed(message.id, f"the engine failed: {type(error).__name__}"))


class _TooLong(UserError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, but the model's context is {context} with the answer; shorten it"
        )


def _refusal(text: int, message: str) -> Refused:
    """What our errors say, with the field of the request that they are about, where that is known."""
    if "context is" in message:
        return Refused(id=text, message=message, param="messages", code="context_length_exceeded")
    names = ("temperature", "top_p", "top_k", "seed", "logprobs", "stop", "policy")
    param = next((name for name in names if message.startswith((f"sampling: {name}", f"{name}", f"--{name}"))), None)
    return Refused(id=text, message=message, param=param)


def warm(model: OpenedBundle) -> None:
    """A short text, so that the first client does not wait for what is made once."""
    for policy in ("plain", "adaptive"):
        model.generate([0], max_new_tokens=min(WARM_TOKENS, model.manifest.dims.context - 1), policy=policy)


def main() -> int:
    """``python -m draftwood.tools.serve.worker SOCKET BUNDLE PLACES ENGINE THREADS``, as the server starts it."""
    number, bundle, places, engine, threads = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    connection = socket.socket(fileno=int(number))
    share_threads(int(threads) or None)
    try:
        model = draftwood.open(Path(bundle), engine=engine or None, threads=int(threads) or None)
        warm(model)
    except UserError as error:
        print("draftwood: error:", error, file=sys.stderr)
        return 2
    with contextlib.suppress(OSError):  # the server may be gone at any moment
        Worker(model, connection, int(places)).run(connection.makefile("rb"))
    sys.stderr.flush()
    os._exit(0)  # texts that are still being decoded have nobody to read them


if __name__ == "__main__":
    sys.exit(main())
