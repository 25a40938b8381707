"""A lock that is given in the order in which it was asked for.

A thread that lets go of an ordinary lock and asks again gets it before waiting threads have woken up. So a text in many
small launches would keep all others waiting to its end.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A context manager; not to be entered again by the thread that is in it."""

    def __init__(self) -> None:
        self._own = threading.Lock()
        self._taken = False
        # For each waiting thread a locked lock, which is released when it is that thread's turn.
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._own:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()
        except BaseException:  # an interrupt while it waits
            self._give_up(mine)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._own:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

    def _give_up(self, mine: threading.Lock) -> None:
        """Leaves the queue; if its turn has come meanwhile, the next thread gets it."""
        with self._own:
            waits = mine in self._waiting
            if waits:
                self._waiting.remove(mine)
        if not waits:
            self._pass_on()
