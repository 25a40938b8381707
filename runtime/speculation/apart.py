"""Texts held to grammars of strangers; each grammar has its own process.

`draftwood.runtime.speculation.keeper` is the program, and describes the limits of those processes. Draws and drafts ask
them over a socket; a draft's step asks two or three times, a draw once or twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.speculation import keeper
from draftwood.runtime.text.grammar import Grammar, Thought
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.trees import TreeBuffers

# V vocabulary, M tree nodes, I levels, K candidates

# Seconds to wait for an answer: far more than its processor time may be, since the machine may be busy.
_PATIENCE_SECONDS = 60.0
_TOLD_SECONDS = 5.0


class ApartGrammars:
    """Grammars of one tokenizer, each in its own process. May be used from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        self._given = (tokenizer, vocabulary, tuple(ends))
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def warm(self) -> None:
        """Starts the program, and waits for nothing."""
        with self._lock, contextlib.suppress(OSError):  # the first call raises it
            self._started()

    def begin(self) -> ApartGrammar:
        """A process for one text, which is yet to be given its grammar.

        Raises:
            RequestError: none can be started.
        """
        (talk, theirs), (life, its) = socket.socketpair(), socket.socketpair()
        with theirs, its:
            try:
                with self._lock:
                    self._send([theirs.fileno(), its.fileno()])
            except OSError as error:
                talk.close()
                life.close()
                raise RequestError(f"grammar: no process can be started for it: {error.strerror}") from error
        return ApartGrammar(talk, life, self._vocabulary)

    def _send(self, numbers: list[int]) -> None:
        try:
            socket.send_fds(self._started(), [b"t"], numbers)
        except (BrokenPipeError, ConnectionResetError):  # something else has ended it since the last text
            self._stop()
            socket.send_fds(self._started(), [b"t"], numbers)

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                # Its own session: an interrupt at the terminal is for the asking process.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", keeper.__name__, str(theirs.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # the process to be forked has one thread
                )
            tokenizer, vocabulary, ends = self._given
            threading.Thread(
                target=_give, args=[self._process, (tokenizer.to_json(), vocabulary, ends)], daemon=True
            ).start()
            weakref.finalize(self, _end, self._process, self._control)
        return self._control

    def _stop(self) -> None:
        if self._process is not None and self._control is not None:
            _end(self._process, self._control)
        self._process = self._control = None


def _give(process: subprocess.Popen[bytes], setup: Any) -> None:
    """Hands the tokenizer over; it is read once Python is there."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as sink:
        sink.write(keeper.framed(setup))


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


class ApartGrammar:
    """One text's grammar (`draftwood.runtime.speculation.constraint.Constraint`), and the guide of its drafts.

    ``close`` ends its process, from any thread; a thread that waits for an answer gets a RequestError.
    """

    def __init__(self, talk: socket.socket, life: socket.socket, vocabulary: int) -> None:
        self._talk, self._life, self._vocabulary = talk, life, vocabulary
        self._source = talk.makefile("rb")
        # Tokens that the process has not been told of.
        self._taken: list[tuple[int, int]] = []
        talk.settimeout(_PATIENCE_SECONDS)
        life.settimeout(_TOLD_SECONDS)
        weakref.finalize(self, _close, talk, life)

    def compile(self, grammar: Grammar, position: int, thought: Thought | None = None) -> None:
        """Reads the grammar of the tokens from a position on, or of those after a thought that begins there.

        Raises:
            RequestError: it is no grammar, or takes too much.
        """
        try:  # as JSON's text, which holds whole numbers of any size
            text = grammar if isinstance(grammar, str) else json.dumps(grammar, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"grammar: the schema is not JSON: {error}") from None
        self.ask("compile", text, not isinstance(grammar, str), position, thought)

    def close(self) -> None:
        _close(self._talk, self._life)

    def allows(self, position: int, token: int) -> bool:
        return bool(self.ask("allows", self._untold(), position, token))

    def allowed(self, position: int) -> NDArray[np.bool_]:
        return self.mask(self.ask("allowed", self._untold(), position))

    def take(self, position: int, token: int) -> None:
        self._taken.append((position, token))

    def _untold(self) -> list[tuple[int, int]]:
        """The tokens that the process has not been told of; with this question it is."""
        untold, self._taken = self._taken, []
        return untold

    def mask(self, bits: bytes) -> NDArray[np.bool_]:
        """bool [V] of its bits."""
        allowed_V = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocabulary, bitorder="little")
        return allowed_V.view(np.bool_)

    def ask(self, name: str, *given: Any) -> Any:
        """The answer of the process; RequestError if it refuses, or has ended."""
        try:
            self._talk.sendall(keeper.framed((name, *given)))
            answer = keeper.read(self._source)
        except (OSError, ValueError):  # a socket that is closed has no file
            answer = None
        if answer is None:
            raise RequestError(f"grammar: {self._why(name)}")
        refused, result = answer
        if refused:
            raise RequestError(refused)
        return result

    def _why(self, name: str) -> str:
        """The reason for which the process has ended."""
        number = 0
        with contextlib.suppress(OSError, ValueError):
            self._life.shutdown(socket.SHUT_WR)
            number = (self._life.recv(1) or b"\0")[0]
        if number == signal.SIGPROF and name == "compile":
            return f"takes more than {keeper.COMPILE_SECONDS:.0f} s to be read"
        if number == signal.SIGPROF:
            return "takes too long to say which tokens may come next"
        if number == signal.SIGABRT:
            return f"takes more than {keeper.MOST_MEMORY >> 20} MB"
        return "is given up, because it ended the process that it was read in" if number else "is given up"


def _close(talk: socket.socket, life: socket.socket) -> None:
    for end in (talk, life):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
        end.close()


class ApartGuide:
    """A text's guide (`draftwood.runtime.speculation.guide.Guiding`) in the process of its grammar."""

    def __init__(self, grammar: ApartGrammar, position: int) -> None:
        self._grammar, self._known = grammar, position

    def follow(self, tokens: Sequence[int], root: int) -> bool:
        known, self._known = min(self._known, len(tokens)), len(tokens)
        return bool(self._asked(False, "follow", known, [*map(int, tokens[known:])], root))

    def first_levels(self, count: int) -> list[NDArray[np.bool_]]:
        return [self._grammar.mask(bits) for bits in self._asked([], "first_levels", count)]

    def allowed(self, path: Sequence[int], tokens: Collection[int]) -> set[int]:
        return set(self._asked([], "allowed_after", [*map(int, path)], [*map(int, tokens)]))

    def levels(
        self, tree: TreeBuffers, tokens_T: NDArray[np.int64], scores_M: NDArray[np.float32]
    ) -> list[NDArray[np.bool_]]:
        drafted = (tree.parents.tolist(), tokens_T.tolist(), scores_M.tolist())
        return [self._grammar.mask(bits) for bits in self._asked([], "levels", *drafted)]

    def filled(
        self, tree: TreeBuffers, tokens_T: NDArray[np.int64], candidates_IK: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        tokens = tokens_T.tolist()
        candidates = None if candidates_IK is None else candidates_IK.tolist()
        shaped = (tree.parents.tolist(), tree.ranks.tolist(), tokens, candidates)
        return np.array(self._asked(tokens, "filled", *shaped), np.int64)

    def _asked(self, else_: Any, name: str, *given: Any) -> Any:
        """An answer. If the process has ended, the draws say so and a draft stays as it is."""
        try:
            return self._grammar.ask(name, *given)
        except RequestError:
            return else_
