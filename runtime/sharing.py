"""Launches that texts share: threads that each want a step of their own text get one launch for all who wait.

There is no thread for it. Who finds nobody at work takes all texts that wait, as many as the engine takes, and those
who wait meanwhile are the next launch; the longest wait comes first. Who is not iterated over does not wait, and costs
nothing: a slow reader delays nobody, and a text that is dropped is gone at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

from draftwood.manifest import Gear
from draftwood.runtime.engines import Engine
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Outcome

# Seconds that a launch waits at most for the texts of the last one, whose threads are on their way back: without it one
# thread would always be first, and alone. Who comes later is waited for no more until he is there again.
LINGER = 0.004


class Text(Protocol):
    """A text that takes steps: what a launch asks of it."""

    # Its caches and what it has.
    state: SequenceState

    @property
    def finished(self) -> bool:
        """Whether it wants no further step."""

    def choose(self) -> Gear:
        """The gear of its next step."""

    def receive(self, outcome: Outcome) -> object:
        """What its step gave."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """A text that waits for a step, and how that ended."""

    text: Text
    done: bool = False
    error: Exception | None = None


def advance(engine: Engine, texts: Sequence[Text]) -> list[Outcome]:
    """One step for every text, as many a launch as the engine takes; each goes on with its own gear."""
    outcomes = list[Outcome]()
    for at in range(0, len(texts), engine.max_batch):
        group = texts[at : at + engine.max_batch]
        gears = [text.choose() for text in group]
        for text, outcome in zip(group, engine.step([text.state for text in group], gears), strict=True):
            text.receive(outcome)
            outcomes.append(outcome)
    return outcomes


class Sharing:
    """Of one engine. Any number of threads may call it, each for a text of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._changed = Condition()
        self._waiting: deque[_Ticket] = deque()
        self._at_work = False
        # Texts of the last launch that have not ended.
        self._expected: set[Text] = set()

    def step(self, text: Text) -> None:
        """One step of the text, in a launch with others where others wait.

        Raises:
            NumericError: the teacher's logits are no numbers; other texts go on.
        """
        ticket = _Ticket(text)
        with self._changed:
            self._waiting.append(ticket)
            self._changed.notify_all()
            while not ticket.done:
                if self._at_work:
                    self._changed.wait()
                    continue
                self._at_work = True
                self._launch()
        if ticket.error is not None:
            raise ticket.error

    def _launch(self) -> None:
        """One launch of those who wait; the lock is held, and let go while the engine runs."""
        until = time.monotonic() + LINGER
        while not self._expected <= {one.text for one in self._waiting} and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)
        group = [self._waiting.popleft() for _ in range(min(len(self._waiting), self.engine.max_batch))]
        self._changed.release()
        try:
            self._advance(group)
        finally:
            self._changed.acquire()
            for one in group:
                one.done = True
            self._expected = {one.text for one in group if not one.text.finished and one.error is None}
            self._at_work = False
            self._changed.notify_all()

    def _advance(self, group: Sequence[_Ticket]) -> None:
        """A step of all; where that fails, of each by itself, so that a text fails alone."""
        try:
            advance(self.engine, [one.text for one in group])
        except Exception as error:
            if len(group) == 1:
                group[0].error = error
                return
            for one in group:
                one.text.state.rollback(one.text.state.length)
                self._advance([one])
