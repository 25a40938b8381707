"""The program that keeps a tokenizer warm for grammars of strangers, and gives each text its own process.

A stranger's grammar may take any time and memory, and has ended the library that reads it. So
`draftwood.runtime.speculation.apart` starts this program. For every text it forks a process, which compiles the grammar
and answers the questions of the text's draws and drafts. That process has limits: the system limits its memory, and an
allowance its processor time, to which every answer adds a little. However it ends, only its text ends. It also ends
with the process that asked for it.

A message is four bytes of length, most significant first, then so many bytes of MessagePack. A request is a list of a
name and its arguments. The answer is a pair: a string with the refusal, if any, and the result.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from draftwood.errors import RequestError
from draftwood.runtime.speculation.guide import Guide
from draftwood.runtime.text.grammar import Grammars, TextGrammar, Thought
from draftwood.runtime.text.rendering import limit

# Besides the tokenizer's memory, which all processes share.
MOST_MEMORY = 256 << 20
# Processor seconds: for compiling; the most that can be saved up for answers (a launch waits for them); the allowance
# added with every answer.
COMPILE_SECONDS, ANSWER_SECONDS, ADDED_SECONDS = 2.0, 1.0, 0.005
HEAD_BYTES = 4


def framed(message: Any) -> bytes:
    """A message as it is sent."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(HEAD_BYTES, "big") + content


def read(source: IO[bytes]) -> Any:
    """The next message; None if the other side has ended."""
    head = source.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    content = source.read(int.from_bytes(head, "big"))
    return msgspec.msgpack.decode(content) if len(content) == int.from_bytes(head, "big") else None


class _Shape(NamedTuple):
    """The parts of a tree that a guide reads."""

    parents: np.ndarray[Any, Any]
    ranks: np.ndarray[Any, Any]


class _Answers:
    """The answers to one text about its grammar."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._grammar: TextGrammar | None = None
        self._guide: Guide | None = None

    def compile(self, text: str, is_schema: bool, position: int, thought: list[Any] | None) -> None:
        """See `draftwood.runtime.speculation.apart.ApartGrammar.compile`."""
        before = None if thought is None else Thought(*thought)
        self._grammar = self._grammars.begin(json.loads(text) if is_schema else text, before)
        self._guide = Guide(self._grammar.copied(), position)

    def allows(self, path: list[tuple[int, int]], position: int, token: int) -> bool:
        return self._after(path).allows(position, token)

    def allowed(self, path: list[tuple[int, int]], position: int) -> bytes:
        return _bits(self._after(path).allowed(position))

    def _after(self, path: list[tuple[int, int]]) -> TextGrammar:
        assert self._grammar is not None
        for position, token in path:
            self._grammar.take(position, token)
        return self._grammar

    @property
    def _guiding(self) -> Guide:
        assert self._guide is not None
        return self._guide

    def follow(self, position: int, tokens: list[int], root: int) -> bool:
        return self._guiding.follow_on(position, tokens, root)

    def first_levels(self, count: int) -> list[bytes]:
        return [_bits(allowed_V) for allowed_V in self._guiding.first_levels(count)]

    def allowed_after(self, path: list[int], tokens: list[int]) -> list[int]:
        return [*self._guiding.allowed(path, tokens)]

    def levels(self, parents: list[int], tokens: list[int], scores: list[float]) -> list[bytes]:
        tree = _Shape(np.array(parents), np.zeros(len(parents), np.int64))
        known = self._guiding.levels(tree, np.array(tokens, np.int64), np.array(scores, np.float32))
        return [_bits(allowed_V) for allowed_V in known]

    def filled(
        self, parents: list[int], ranks: list[int], tokens: list[int], candidates: list[list[int]] | None
    ) -> list[int]:
        tree = _Shape(np.array(parents), np.array(ranks))
        candidates_IK = None if candidates is None else np.array(candidates, np.int64)
        filled: list[int] = self._guiding.filled(tree, np.array(tokens, np.int64), candidates_IK).tolist()
        return filled


def _bits(allowed_V: np.ndarray[Any, Any]) -> bytes:
    return np.packbits(allowed_V, bitorder="little").tobytes()


def serve(talk: socket.socket, begin: Callable[[], Grammars]) -> None:
    """Answers one text until it ends."""
    answers: _Answers | None = None
    source, saved = talk.makefile("rb"), ANSWER_SECONDS
    while (request := read(source)) is not None:
        name, *arguments = request
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS if name == "compile" else saved)
        refused, result = "", None
        try:
            answers = answers or _Answers(begin())
            result = getattr(answers, name)(*arguments)
        except RequestError as error:
            refused = str(error)
        except MemoryError:
            refused = f"grammar: takes more than {MOST_MEMORY >> 20} MB"
        except BaseException as error:  # a panic of a library in Rust is no Exception
            refused = f"grammar: cannot be worked with: {type(error).__name__}"
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        if name != "compile":
            saved = min(left + ADDED_SECONDS, ANSWER_SECONDS)
        talk.sendall(framed((refused, result)))


class _TextProcess(NamedTuple):
    """A text's process, and the socket whose end says that nobody asks any more."""

    process: int
    life: socket.socket


class Keeper:
    """Forks a process for every pair of sockets that comes over ``control``, and ends it with its text."""

    def __init__(self, control: socket.socket, begin: Callable[[], Grammars]) -> None:
        self._control, self._begin = control, begin
        self._texts: dict[int, _TextProcess] = {}

    def run(self) -> None:
        """Until the other side of ``control`` ends."""
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        while True:
            for number, _ in waiting.poll():
                if number != self._control.fileno():
                    waiting.unregister(number)
                    self._end(self._texts.pop(number))
                elif (text := self._text()) is None:
                    return
                else:
                    self._texts[text.life.fileno()] = text
                    waiting.register(text.life, select.POLLIN)

    def _text(self) -> _TextProcess | None:
        """The next text; None if there will be none."""
        message, numbers, _, _ = socket.recv_fds(self._control, 1, 2)
        if not message or len(numbers) != 2:
            return None
        talk, life = (socket.socket(fileno=number) for number in numbers)
        process = os.fork()
        if process == 0:
            with contextlib.suppress(BaseException):
                self._close(life)
                limit(resource.RLIMIT_AS, _memory() + MOST_MEMORY)
                serve(talk, self._begin)
            os._exit(0)
        talk.close()
        return _TextProcess(process, life)

    def _close(self, life: socket.socket) -> None:
        """Closes the keeper's files and sockets, in a process that it has forked."""
        for end in (self._control, life, *(text.life for text in self._texts.values())):
            end.close()

    def _end(self, text: _TextProcess) -> None:
        """Ends a process, and says by which signal it had ended before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(text.process, signal.SIGKILL)
        _, status = os.waitpid(text.process, 0)
        with contextlib.suppress(OSError):  # nobody reads it
            text.life.send(bytes([os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0]))
        text.life.close()


def _memory() -> int:
    """Bytes of this process's memory, as the limit counts it; if the system does not say, little."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """``python -m draftwood.runtime.speculation.keeper SOCKET``."""
    for nothing in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        limit(nothing, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    source, vocabulary, ends = read(sys.stdin.buffer)
    refused = ""
    try:
        grammars = Grammars(source, vocabulary, ends)
    except RequestError as error:
        refused = str(error)

    def begin() -> Grammars:
        if refused:
            raise RequestError(refused)
        return grammars

    del source
    gc.freeze()  # shared memory is not written to
    Keeper(control, begin).run()
    os._exit(0)  # texts see that their client has ended by themselves


if __name__ == "__main__":
    main()
