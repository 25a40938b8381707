"""Times the parts of a step."""

from __future__ import annotations

import time
from typing import Literal, Self

Part = Literal["draft", "verify", "accept", "host"]


class StepClock:
    """Microseconds spent in each part of the current step; ``mark`` closes a part.

    ``graph_us`` adds up draft and verify over all steps since ``graph_us`` was last set to zero.
    """

    def __init__(self) -> None:
        self.origin_us = _now_us()
        self.graph_us = 0.0
        self.restart()

    def restart(self) -> Self:
        """Begins a step."""
        self.us: dict[Part, float] = {"draft": 0.0, "verify": 0.0, "accept": 0.0, "host": 0.0}
        self._at = _now_us()
        self.start_us = self._at - self.origin_us
        return self

    def mark(self, part: Part) -> None:
        """Everything since the last mark was ``part``."""
        now = _now_us()
        self.us[part] += now - self._at
        if part in ("draft", "verify"):
            self.graph_us += now - self._at
        self._at = now


def _now_us() -> float:
    return time.perf_counter_ns() / 1000
