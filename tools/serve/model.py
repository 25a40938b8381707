"""A served model: its texts, its engine's process, and the process's end.

The engine decides which texts are admitted and which wait (`draftwood.runtime.sharing`). When its process dies, the
texts that it had begun end with an error, and those that waited stay. Another process is started: at once, then after
ever longer pauses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from itertools import count

from draftwood.errors import UserError
from draftwood.tools.serve.messages import (
    Ask,
    Begun,
    Busy,
    CacheUse,
    Cancel,
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
    ToServer,
)
from draftwood.tools.serve.metrics import ModelMetrics
from draftwood.tools.serve.process import EngineProcess

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
# A process that has lived this long counts as healthy: the next pause is the shortest again.
WELL_SECONDS = 60.0
# Texts that an engine has not answered yet, besides those that wait: answers take milliseconds, so if there are more it
# stands still.
MOST_UNHEARD = 256
# Prompts that wait for their tokens alone: one is encoded at a time.
MOST_ENCODED = 64
UNSENT = "the server failed at this text; its log says how"
LOST = "the engine's process ended while it decoded this text; it is started again, so ask again"

log = logging.getLogger("draftwood.serve")


class Full(Exception):
    """No more may wait."""


class Mailbox:
    """Pieces of the texts of one request that nobody has read yet, bounded by the length of their answers.

    So an engine never waits for a reader: a slow one finds more at once.
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


@dataclass(eq=False)
class _RunningText:
    """A text from its request to its end, and the times that metrics tell."""

    ask: Ask | Encode
    index: int
    receiver: Mailbox
    asked_at: float
    engine: EngineProcess | None = None
    # Whether an engine has ended while the text waited there: the text may have caused it.
    again: bool = False
    # Whether an engine reads its prompt and its grammar, which may end an engine: it is not begun again then.
    reading: bool = False
    begun: float = 0.0
    last: float = 0.0
    tokens: int = 0
    dropped: bool = False


class ServedModel:
    """One bundle under one name."""

    def __init__(self, name: str, arguments: EngineArguments, metrics: ModelMetrics) -> None:
        self.name, self.arguments, self.metrics = name, arguments, metrics
        self.engine: EngineProcess | None = None
        self.facts: Ready | None = None
        self.restarts, self.closed = 0, False
        self._ids = count(1)
        # In the order in which they came.
        self._texts: dict[int, _RunningText] = {}
        self._caches = CacheUse(0, 0)
        self._started = 0.0
        self._pause = FIRST_PAUSE
        self._restarting: asyncio.Task[None] | None = None
        # Held while an engine is started, so that there are never two besides the one that is given up.
        self._starting = asyncio.Lock()
        metrics.follow(lambda: self.running, lambda: self.waiting, lambda: self.cache_usage)

    @property
    def ready(self) -> bool:
        """Whether an engine is proved, warm and alive."""
        return self.engine is not None and self.engine.alive

    @property
    def busy(self) -> int:
        """Texts that run or wait."""
        return sum(isinstance(text.ask, Ask) for text in self._texts.values())

    @property
    def running(self) -> int:
        """Texts that were admitted."""
        return sum(bool(text.begun) for text in self._texts.values())

    @property
    def waiting(self) -> int:
        """Texts that wait for room."""
        return self.busy - self.running

    @property
    def most_waiting(self) -> float:
        """Texts that may wait for room."""
        most = self.arguments.opening.waiting
        return math.inf if most is None else most

    @property
    def cache_usage(self) -> float:
        """Share of the caches' budget that running texts may come to need."""
        return self._caches.running_bytes / self._caches.budget_bytes if self._caches.budget_bytes else 0.0

    async def start(self) -> None:
        """The first engine; BundleError if it does not start."""
        async with self._starting:
            self._take(await EngineProcess.start(self.arguments))

    async def replace(self) -> None:
        """Opens the bundle anew and, once that is ready, lets the old engine finish its texts and end."""
        async with self._starting:
            try:
                started = await EngineProcess.start(self.arguments)
            except (UserError, OSError) as error:
                log.error("%s: not replaced, the old bundle goes on: %s", self.name, error)
                return
            old = self.engine
            self._take(started)
        log.info("%s: replaced", self.name)
        while old is not None and any(text.engine is old for text in self._texts.values()):
            await asyncio.sleep(0.05)
        if old is not None:
            await old.stop()

    def _take(self, engine: EngineProcess) -> None:
        self.engine, self.facts, self._started = engine, engine.ready, time.monotonic()
        self._caches = CacheUse(0, 0)
        engine.listen(lambda message: self._receive(engine, message), lambda: self._lost(engine))
        self.metrics.up(True)
        for text in [*self._texts.values()]:
            self._hand(text)

    def submit(self, asks: list[Ask], receiver: Mailbox) -> None:
        """Hands texts in, all or none of them; each gets the id by which ``drop`` knows it.

        Raises:
            Full: there is no engine and more than may wait would wait, or an engine that stands still.
        """
        if self.waiting + len(asks) > self.most_waiting + (MOST_UNHEARD if self.ready else 0):
            raise Full
        for index, ask in enumerate(asks):
            ask.id = next(self._ids)
            self._texts[ask.id] = _RunningText(ask, index, receiver, time.monotonic())
        for ask in asks:
            self._hand(self._texts[ask.id])

    def _hand(self, text: _RunningText) -> None:
        """Gives a text that no engine has to the one that is there; one that cannot be sent fails, and alone."""
        if text.engine is None and self.engine is not None and self.engine.alive:
            try:
                self.engine.send(text.ask)
            except Exception:
                log.exception("%s: a text cannot be sent", self.name)
                self._end(text, "error")
                text.receiver.put(text.index, Failed(text.ask.id, UNSENT))
            else:
                text.engine = self.engine

    def drop(self, asks: list[Ask]) -> None:
        """Drops texts that have no reader: those that no engine has are gone, the others end within a step."""
        for text in [self._texts[ask.id] for ask in asks if ask.id in self._texts]:
            text.dropped = True
            if text.engine is None:
                del self._texts[text.ask.id]
            elif text.engine.alive:
                text.engine.send(Cancel(text.ask.id))

    async def encode(self, prompt: Encode) -> Encoded | Refused | Failed:
        """The tokens of a prompt; needs no room.

        Raises:
            Full: as many are asked for already.
        """
        if self.engine is None or not self.engine.alive:
            return Failed(0, LOST)
        if len(self._texts) - self.busy >= MOST_ENCODED:
            raise Full
        box, prompt.id = Mailbox(), next(self._ids)
        text = self._texts[prompt.id] = _RunningText(prompt, 0, box, time.monotonic())
        self._hand(text)
        ((_, letter),) = await box.take()
        assert isinstance(letter, Encoded | Refused | Failed)
        return letter

    def _receive(self, engine: EngineProcess, message: ToServer) -> None:
        if isinstance(message, CacheUse):
            if engine is self.engine:
                self._caches = message
            return
        assert not isinstance(message, Ready), "said once, before the others"
        text = self._texts.get(message.id)
        if text is None:
            return
        try:
            self._note(text, message)
        except Exception:  # it ends this text alone, not the reading of messages about others
            log.exception("%s: a text's message cannot be taken", self.name)
            message = Failed(text.ask.id, UNSENT)
        if not isinstance(message, Reading):
            text.receiver.put(text.index, message)

    def _note(self, text: _RunningText, message: ToServer) -> None:
        """Notes a message about its text."""
        match message:
            case Reading():
                text.reading = not message.done
            case Begun():
                text.begun = time.monotonic()
                self.metrics.began(text.begun - text.asked_at, message.prompt_tokens, message.cached_tokens)
            case Piece():
                self._measure(text, message)
            case Encoded():
                del self._texts[message.id]
            case Ended() | Busy() | Refused() | Failed():
                self._end(text, _reason(message, text.dropped))

    def _end(self, text: _RunningText, reason: str | None) -> None:
        del self._texts[text.ask.id]
        if isinstance(text.ask, Ask) and reason is not None:
            self.metrics.ended(reason, time.monotonic() - text.asked_at)

    def _measure(self, text: _RunningText, piece: Piece) -> None:
        now = time.monotonic()
        if text.tokens == 0 and piece.tokens:
            self.metrics.first_token(now - text.asked_at)
        elif piece.tokens:
            self.metrics.inter_token((now - text.last) / piece.tokens, piece.tokens)
        self.metrics.drafted(piece.drafted, piece.accepted, piece.tokens)
        text.tokens, text.last = text.tokens + piece.tokens, now

    def _lost(self, engine: EngineProcess) -> None:
        """A process has ended: of a model that was replaced, or by a fault."""
        for text in [text for text in self._texts.values() if text.engine is engine]:
            if text.begun or text.reading or text.again or text.dropped or isinstance(text.ask, Encode):
                self._end(text, "error")
                text.receiver.put(text.index, Failed(text.ask.id, LOST))
            else:
                text.engine, text.again = None, True
                self._hand(text)  # if the model was replaced, the next engine is there
        if engine is self.engine and not self.closed:
            log.error("%s: the engine's process %d ended", self.name, engine.pid)
            self._caches = CacheUse(0, 0)
            self.metrics.up(False)
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        if time.monotonic() - self._started > WELL_SECONDS:
            self._pause = FIRST_PAUSE
        while not self.closed:
            await asyncio.sleep(self._pause)
            async with self._starting:
                if self.ready:  # it was replaced meanwhile
                    return
                self._pause = min(self._pause * 2, LONGEST_PAUSE)
                try:
                    started = await EngineProcess.start(self.arguments)
                except (UserError, OSError) as error:
                    log.error("%s: %s; next try in %.1f s", self.name, error, self._pause)
                    continue
                self.restarts += 1
                self.metrics.restarted()
                log.info("%s: the engine is back", self.name)
                self._take(started)
                return

    async def close(self) -> None:
        """Ends the engine and all texts."""
        self.closed = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self.engine is not None:
            await self.engine.stop()


def _reason(message: Last, dropped: bool) -> str | None:
    """The reason in the words of vLLM's ``finished_reason``; None for a text that was never begun."""
    if isinstance(message, Busy):
        return None
    if dropped:
        return "abort"
    if isinstance(message, Ended):
        return {"context": "length", "cancelled": "abort"}.get(message.finish, message.finish)
    return "error"
