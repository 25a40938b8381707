"""A model that is served: its queue, its engine's process, and what happens when that ends.

Requests beyond the engine's places wait here, in the order in which they came. When a process dies, its texts end with
an error, those that wait stay, and another one is started: at once, then after ever longer pauses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from draftwood.errors import UserError
from draftwood.tools.serve.messages import (
    Ask,
    Begun,
    Cancel,
    Encode,
    Encoded,
    Ended,
    Failed,
    Piece,
    Ready,
    Refused,
    ToServer,
)
from draftwood.tools.serve.metrics import ModelMetrics
from draftwood.tools.serve.process import EngineArguments, EngineProcess

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# A process that has lived so long was well; the next pause is the first again.
WELL_SECONDS = 60.0
LOST = "the engine's process ended while it decoded this text; it is started again, so ask again"

log = logging.getLogger("draftwood.serve")


class Full(Exception):
    """No place is free, and no more may wait."""


class Mailbox:
    """What the texts of one request have got and nobody has read yet, bounded by the length of their answers.

    So an engine never waits for a reader: one who is slow finds more at once.
    """

    def __init__(self) -> None:
        self._letters: list[tuple[int, ToServer]] = []
        self._some = asyncio.Event()

    def put(self, index: int, letter: ToServer) -> None:
        self._letters.append((index, letter))
        self._some.set()

    async def take(self) -> list[tuple[int, ToServer]]:
        """All there is, at least one."""
        await self._some.wait()
        self._some.clear()
        letters, self._letters = self._letters, []
        return letters


class Receiver(Protocol):
    def put(self, index: int, letter: ToServer) -> None: ...


@dataclass(eq=False)
class _Text:
    """A text from its request to its end, and the times that metrics tell."""

    ask: Ask | Encode
    index: int
    receiver: Receiver
    asked: float
    engine: EngineProcess | None = None
    begun: float = 0.0
    last: float = 0.0
    tokens: int = 0
    dropped: bool = False


class ServedModel:
    """One bundle under one name."""

    def __init__(self, name: str, arguments: EngineArguments, waiting: int, metrics: ModelMetrics) -> None:
        self.name, self.arguments, self.most_waiting, self.metrics = name, arguments, waiting, metrics
        self.engine: EngineProcess | None = None
        self.facts: Ready | None = None
        self.restarts, self.closed = 0, False
        self._ids = count(1)
        self._waiting: deque[_Text] = deque()
        self._running: dict[int, _Text] = {}
        self._started = 0.0
        self._pause = FIRST_PAUSE
        self._restarting: asyncio.Task[None] | None = None
        metrics.follow(lambda: len(self._texts()), lambda: len(self._waiting), arguments.places)

    @property
    def ready(self) -> bool:
        """Whether an engine is proved, warm and alive."""
        return self.engine is not None and self.engine.alive

    @property
    def busy(self) -> int:
        """Texts that run or wait."""
        return len(self._texts()) + len(self._waiting)

    @property
    def queued(self) -> int:
        """Texts that wait for a place."""
        return len(self._waiting)

    def _texts(self) -> list[_Text]:
        return [text for text in self._running.values() if isinstance(text.ask, Ask)]

    async def start(self) -> None:
        """The first engine; BundleError where it does not start."""
        await self._take(*await EngineProcess.start(self.arguments))

    async def replace(self) -> None:
        """Opens the bundle anew and, once that is ready, lets the old engine finish its texts and end."""
        try:
            started = await EngineProcess.start(self.arguments)
        except UserError as error:
            log.error("%s: not replaced, the old bundle goes on: %s", self.name, error)
            return
        old = self.engine
        await self._take(*started)
        log.info("%s: replaced", self.name)
        while old is not None and any(text.engine is old for text in self._running.values()):
            await asyncio.sleep(0.05)
        if old is not None:
            await old.stop()

    async def _take(self, engine: EngineProcess, reader: asyncio.StreamReader) -> None:
        self.engine, self.facts, self._started = engine, engine.ready, time.monotonic()
        engine.listen(reader, self._receive, lambda: self._lost(engine))
        self.metrics.up(True)
        self._fill()

    def submit(self, asks: list[Ask], receiver: Receiver) -> None:
        """Hands texts in, all or none of them; each gets the id by which ``drop`` knows it.

        Raises:
            Full: more than may wait would wait.
        """
        free = max(self.arguments.places - len(self._texts()), 0) if self.ready else 0
        if len(self._waiting) + len(asks) > self.most_waiting + free:
            self.metrics.rejected()
            raise Full
        for index, ask in enumerate(asks):
            ask.id = next(self._ids)
            self._waiting.append(_Text(ask, index, receiver, time.monotonic()))
        self._fill()

    def drop(self, asks: list[Ask]) -> None:
        """Nobody reads these any more: those that wait are gone, those that run end within a step."""
        gone = {ask.id for ask in asks}
        self._waiting = deque(text for text in self._waiting if text.ask.id not in gone)
        for text in [self._running[one] for one in gone if one in self._running]:
            text.dropped = True
            if text.engine is not None and text.engine.alive:
                text.engine.send(Cancel(text.ask.id))

    async def encode(self, prompt: Encode) -> Encoded | Refused | Failed:
        """The tokens of a prompt; needs no place."""
        if self.engine is None or not self.engine.alive:
            return Failed(0, LOST)
        box, prompt.id = Mailbox(), next(self._ids)
        self._running[prompt.id] = _Text(prompt, 0, box, time.monotonic(), self.engine)
        self.engine.send(prompt)
        ((_, letter),) = await box.take()
        assert isinstance(letter, Encoded | Refused | Failed)
        return letter

    def _fill(self) -> None:
        """Gives free places to those that have waited longest."""
        while self._waiting and self.engine is not None and self.engine.alive:
            if sum(text.engine is self.engine for text in self._texts()) >= self.arguments.places:
                return
            text = self._waiting.popleft()
            text.engine, text.begun = self.engine, time.monotonic()
            self.metrics.queued(text.begun - text.asked)
            self._running[text.ask.id] = text
            self.engine.send(text.ask)

    def _receive(self, message: ToServer) -> None:
        text = None if isinstance(message, Ready) else self._running.get(message.id)
        if text is None:
            return
        assert not isinstance(message, Ready)
        match message:
            case Begun():
                self.metrics.began(message.prompt_tokens)
            case Piece():
                self._measure(text, message)
            case _:
                del self._running[message.id]
                if isinstance(text.ask, Ask):
                    self.metrics.ended(_reason(message, text.dropped), time.monotonic() - text.asked)
                self._fill()
        text.receiver.put(text.index, message)

    def _measure(self, text: _Text, piece: Piece) -> None:
        now = time.monotonic()
        if text.tokens == 0 and piece.tokens:
            self.metrics.first_token(now - text.asked)
        elif piece.tokens:
            self.metrics.inter_token((now - text.last) / piece.tokens, piece.tokens)
        self.metrics.drafted(piece.drafted, piece.accepted, piece.tokens)
        text.tokens, text.last = text.tokens + piece.tokens, now

    def _lost(self, engine: EngineProcess) -> None:
        """A process has ended: of a model that was replaced, or by a fault."""
        for text in [text for text in self._running.values() if text.engine is engine]:
            del self._running[text.ask.id]
            if isinstance(text.ask, Ask):
                self.metrics.ended("error", time.monotonic() - text.asked)
            text.receiver.put(text.index, Failed(text.ask.id, LOST))
        if engine is self.engine and not self.closed:
            log.error("%s: the engine's process %d ended", self.name, engine.pid)
            self.metrics.up(False)
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        if time.monotonic() - self._started > WELL_SECONDS:
            self._pause = FIRST_PAUSE
        while not self.closed:
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            try:
                started = await EngineProcess.start(self.arguments)
            except (UserError, OSError) as error:
                log.error("%s: %s; next try in %.1f s", self.name, error, self._pause)
                continue
            self.restarts += 1
            self.metrics.restarted()
            log.info("%s: the engine is back", self.name)
            await self._take(*started)
            return

    async def close(self) -> None:
        """Ends the engine and all texts."""
        self.closed = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self.engine is not None:
            await self.engine.stop()


def _reason(message: ToServer, dropped: bool) -> str:
    """As vLLM's ``finished_reason`` has it."""
    if dropped:
        return "abort"
    if isinstance(message, Ended):
        return {"context": "length", "cancelled": "abort"}.get(message.finish, message.finish)
    return "error"
