"""Texts that share an engine: which are admitted, whose prompt is read, and whose steps are one launch.

There is no thread for it. A thread that wants something for its text puts it into a queue. If nobody is at work, it
does the next launch for all texts that it serves. Threads that come meanwhile are served by a later launch.

* A launch is either one launch of one prompt or a step of as many texts as the engine takes. They take turns. In both
  queues the longest wait goes first. So a text that asks for a step waits for the running launch, one launch of a
  prompt, and the steps of those who asked before it. A launch takes as many of those as there are places.
* A text is admitted when the budget has room for its caches at its end (`draftwood.runtime.caches`). Those who wait for
  room are admitted in the order of asking. If as many wait as may, a further text is refused at once.
* A text that nobody iterates over does not wait for a launch: a slow reader delays nobody. Its caches count until it
  ends.
* A text that ends, fails or is cancelled frees its room when its launch has ended, or at once if it is in none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, RLock
from typing import Protocol

from draftwood.errors import BusyError, RequestError
from draftwood.manifest import Gear
from draftwood.runtime.caches import Caches, Wanted
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.policy import Asking, gears_for
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Outcome

# Seconds that a launch of steps waits at most for the texts of the last one, whose threads are on their way back.
# Without it one thread would always be first, and alone. A text that comes later is not waited for until it is there
# again.
LINGER = 0.004


class Stepping(Protocol):
    """A text that takes steps, as a launch sees it."""

    # Its caches and tokens.
    state: SequenceState

    @property
    def finished(self) -> bool:
        """Whether it wants no further step."""

    def asking(self) -> Asking:
        """Facts that the gear of its next step is chosen by."""

    def take(self, gear: Gear) -> None:
        """That gear, before the step."""

    def receive(self, outcome: Outcome) -> object:
        """Takes the result of its step."""


class Text(Stepping, Protocol):
    """A text from its prompt to its end."""

    def wanted(self) -> Wanted:
        """The caches that it asks for."""

    def read(self) -> Generator[None, None, None]:
        """Reads its prompt, a launch every ``next``."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The state of an engine's texts, and since opening: prompts admitted, those that began with a kept text, and the
    tokens that were not read for it. Bytes are those of caches. Running texts may come to need ``running_bytes``; ended
    ones hold ``kept_bytes``. Both together are never above ``budget_bytes``."""

    running: int
    waiting: int
    running_bytes: int
    kept_bytes: int
    budget_bytes: int
    prompts: int
    prefix_hits: int
    prefix_tokens: int


@dataclass(eq=False, slots=True)
class _Ticket:
    """A text that waits for a launch (of its prompt if ``reading`` is given), and the launch's result."""

    text: Text
    wake: Condition
    reading: Generator[None, None, None] | None = None
    done: bool = False
    # Whether the prompt has been read.
    read: bool = False
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Place:
    """The facts about one admitted text."""

    wake: Condition
    wanted: Wanted
    state: SequenceState | None = None
    # Why it could not be admitted.
    error: Exception | None = None
    ticket: _Ticket | None = None
    cancelled: bool = False


@dataclass(slots=True)
class _Queues:
    """The waiting texts, the longest wait first."""

    admission: deque[Text] = field(default_factory=deque)
    prompts: deque[_Ticket] = field(default_factory=deque)
    steps: deque[_Ticket] = field(default_factory=deque)


def advance(engine: Engine, texts: Sequence[Stepping]) -> list[Outcome]:
    """One step for every text, in as few launches as the engine can take them in."""
    outcomes = list[Outcome]()
    for at in range(0, len(texts), engine.max_batch):
        group = texts[at : at + engine.max_batch]
        launched = _launched(engine, group)
        for text, outcome in zip(group, launched, strict=True):
            text.receive(outcome)
        outcomes += launched
    return outcomes


def _launched(engine: Engine, texts: Sequence[Stepping]) -> list[Outcome]:
    """A launch of all texts, which are yet to receive their outcomes."""
    gears = gears_for([text.asking() for text in texts], engine.padded)
    for text, gear in zip(texts, gears, strict=True):
        text.take(gear)
    return engine.step([text.state for text in texts], gears)


class Sharing:
    """The texts of one engine. Any thread may call it for its own text; ``cancel`` also for another's."""

    def __init__(self, engine: Engine, caches: Caches, most_waiting: int | None = None) -> None:
        self.engine, self._caches, self._most_waiting = engine, caches, most_waiting
        self._lock = RLock()
        self._arrived = Condition(self._lock)
        # Texts that were given up while their own thread held the lock: the garbage collector may close a stream there.
        self._dropped: deque[Text] = deque()
        self._queues = _Queues()
        self._places: dict[Text, _Place] = {}
        self._at_work = self._stepped = False
        # Texts of the last launch that have not ended.
        self._expected: set[Text] = set()

    def figures(self) -> Figures:
        """The figures of this moment."""
        with self._held():
            caches, waiting = self._caches, len(self._queues.admission)
            return Figures(
                running=len(self._places) - waiting,
                waiting=waiting,
                running_bytes=caches.running_bytes,
                kept_bytes=caches.kept_bytes,
                budget_bytes=caches.budget,
                prompts=caches.prompts,
                prefix_hits=caches.hits,
                prefix_tokens=caches.shared_tokens,
            )

    def admit(self, text: Text) -> bool:
        """Waits until there is room for the text; False if it was cancelled.

        Raises:
            BusyError: there is none, and as many as may wait do.
            RequestError: its caches would never fit, or the engine is closed.
        """
        wishes = text.wanted()
        self._caches.check(wishes)
        with self._held():
            self.engine.refuse_closed()  # nobody would admit it later
            if text.finished:  # cancelled before it had a place here
                return False
            self._places[text] = place = _Place(Condition(self._lock), wishes)
            self._queues.admission.append(text)
            self._admit()
            most = self._most_waiting
            if most is not None and text in self._queues.admission and len(self._queues.admission) > most:
                self._leave(text)
                raise BusyError(f"{most} texts wait already, as many as may; try again soon")
            try:
                while place.state is None and text in self._places:
                    place.wake.wait()
            except BaseException:  # an interrupt
                self._dropped.append(text)
                raise
            if place.error is not None:
                raise place.error
            if place.state is None:
                self.engine.refuse_closed()
                return False
            text.state = place.state
        return True

    def read(self, text: Text) -> bool:
        """Reads the prompt of an admitted text, between the launches of others; False if it was cancelled.

        Raises:
            NumericError: the teacher's logits are no numbers.
        """
        reading, read = text.read(), False
        while not read:
            ticket = self._served(text, reading)
            if ticket is None:
                return False
            read = ticket.read
        return True

    def step(self, text: Text) -> bool:
        """One step of the text, in a launch with others if others wait; False if it was cancelled.

        Raises:
            NumericError: the teacher's logits are no numbers; other texts go on.
        """
        return self._served(text) is not None

    def cancel(self, text: Text) -> None:
        """Ends a text: its room is free at once, or when the launch that it is in has ended. May be called twice."""
        self._dropped.append(text)
        if not self._mine():
            with self._held():
                pass

    def close(self) -> None:
        """Refuses the texts that wait for room, and forgets the kept ones; the engine is closed."""
        with self._held():
            waiting = list(self._queues.admission)
            self._caches.clear()
        for text in waiting:
            self.cancel(text)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The lock; a text that was given up meanwhile leaves."""
        with self._lock:
            try:
                yield
            finally:
                self._drop()

    def _mine(self) -> bool:
        """Whether this thread holds the lock."""
        try:
            self._arrived.notify(0)
        except RuntimeError:
            return False
        return True

    def _drop(self) -> None:
        while self._dropped:
            text = self._dropped.popleft()
            if (place := self._places.get(text)) is not None:
                place.cancelled = True
                self._withdraw(place.ticket)
                if place.ticket is None or place.ticket.done:
                    self._leave(text)

    def _withdraw(self, ticket: _Ticket | None) -> None:
        """Takes a ticket out of its queue, unless a launch has it already."""
        for queue in (self._queues.prompts, self._queues.steps):
            if ticket is not None and ticket in queue:
                queue.remove(ticket)
                ticket.done = True
                ticket.wake.notify()
                self._pass_on()

    def _served(self, text: Text, reading: Generator[None, None, None] | None = None) -> _Ticket | None:
        """Waits for a launch with the text, and does the launches that are due until then."""
        with self._held():
            place = self._places.get(text)
            if place is None or place.cancelled:
                return None
            ticket = place.ticket = _Ticket(text, Condition(self._lock), reading)
            (self._queues.steps if reading is None else self._queues.prompts).append(ticket)
            self._arrived.notify()
            try:
                self._wait(ticket)
            except BaseException:  # an interrupt; a launch that has the text ends first
                self._dropped.append(text)
                self._drop()
                while not ticket.done:
                    ticket.wake.wait()
                self._pass_on()
                raise
            if ticket.error is not None:
                raise ticket.error
            return None if place.cancelled else ticket

    def _wait(self, ticket: _Ticket) -> None:
        while not ticket.done:
            if self._at_work:
                ticket.wake.wait()
            else:
                self._launch()

    def _launch(self) -> None:
        """The next launch; the lock is held, and let go while the engine runs."""
        self._at_work, group = True, list[_Ticket]()
        try:
            self._gather(group)
            if group:
                self._lock.release()
                try:
                    self._run(group)
                finally:
                    self._lock.acquire()
        finally:
            self._at_work = False
            for ticket in group:
                self._ended(ticket)
            self._drop()
            self._pass_on()

    def _gather(self, group: list[_Ticket]) -> None:
        """The texts that the next launch serves: prompts and steps take turns.

        A ticket is in the group before it leaves its queue: an interrupt in between must not lose it.
        """
        prompts, steps = self._queues.prompts, self._queues.steps
        if prompts and (self._stepped or not steps):
            self._stepped = False
            group.append(prompts[0])
            prompts.popleft()
            return
        until = time.monotonic() + LINGER
        while (
            len(steps) < self.engine.max_batch
            and not self._expected <= {ticket.text for ticket in steps}
            and (left := until - time.monotonic()) > 0
        ):
            self._arrived.wait(left)
        self._stepped = True
        while steps and len(group) < self.engine.max_batch:
            group.append(steps[0])
            steps.popleft()
        self._expected = {ticket.text for ticket in group}

    def _run(self, group: Sequence[_Ticket]) -> None:
        """The launch; the lock is not held. An interrupt of this thread may leave any of its texts halfway."""
        try:
            if (reading := group[0].reading) is None:
                self._advance(group)
            else:
                group[0].read = next(reading, self) is self
        except BaseException as error:
            interrupted = RequestError("the thread that did this text's launch was interrupted; ask for it again")
            failed = error if isinstance(error, Exception) else interrupted
            for ticket in group:
                ticket.error = failed
            if failed is interrupted:
                raise

    def _advance(self, group: Sequence[_Ticket]) -> None:
        """A step of all. A text fails alone: if the launch fails each takes its step by itself, and after it each
        receives its outcome whatever another makes of its own."""
        try:
            outcomes = _launched(self.engine, [ticket.text for ticket in group])
        except Exception as error:
            if len(group) == 1:
                group[0].error = error
                return
            for ticket in group:
                if not ticket.text.finished:
                    ticket.text.state.rollback(ticket.text.state.length)
                    self._advance([ticket])
            return
        for ticket, outcome in zip(group, outcomes, strict=True):
            try:
                ticket.text.receive(outcome)
            except Exception as error:
                ticket.error = error

    def _ended(self, ticket: _Ticket) -> None:
        """A launch with the text has ended."""
        text, place = ticket.text, self._places[ticket.text]
        for queue in (self._queues.prompts, self._queues.steps):
            if ticket in queue:  # an interrupt came before it had left
                queue.remove(ticket)
        ticket.done, place.ticket = True, None
        ticket.wake.notify()
        if place.cancelled or text.finished or ticket.error is not None:
            self._leave(text, forget=ticket.error is not None)
        elif ticket.read:
            self._expected.add(text)

    def _leave(self, text: Text, forget: bool = False) -> None:
        """The text is gone; a text that waits for its room may have it."""
        place = self._places.pop(text)
        place.wake.notify()
        self._expected.discard(text)
        self._arrived.notify()
        if text in self._queues.admission:
            self._queues.admission.remove(text)
        if place.state is not None:
            self._caches.leave(place.state, keep=not forget)
        self._admit()

    def _admit(self) -> None:
        """Admits waiting texts in their order, as long as there is room. One that fails at it, for want of memory say,
        fails in its own thread, which may be another than this.

        No policy is asked here: the garbage collector may close a stream while a policy's lock is held.
        """
        while waiting := self._queues.admission:
            place = self._places[waiting[0]]
            try:
                place.state = self._caches.admit(place.wanted)
            except Exception as error:
                place.error = error
                del self._places[waiting[0]]
            if place.state is None and place.error is None:
                return
            waiting.popleft()
            place.wake.notify()

    def _pass_on(self) -> None:
        """Wakes a waiting thread, to do the next launch."""
        if not self._at_work and (waiting := self._queues.steps or self._queues.prompts):
            waiting[0].wake.notify()
