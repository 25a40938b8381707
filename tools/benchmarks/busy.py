"""How busy the machine was besides us: processor time of others, and time that a hypervisor kept back (steal).

Effects of other guests of the host on caches and memory cannot be seen from here.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """A block's load in cores: busy with others' work, and stolen; None if the system does not say.

    ``peak_mb`` is this process's.
    """

    seconds: float
    foreign_cores: float | None
    steal_cores: float | None
    peak_mb: float

    def above(self, cores: float) -> bool:
        """Whether others took more than ``cores`` in the block."""
        return (self.foreign_cores or 0.0) + (self.steal_cores or 0.0) > cores


class Meter:
    """Measures from its making to ``stop``."""

    def __init__(self) -> None:
        self._began, self._stat, self._own = time.perf_counter(), _stat(), _own_seconds()

    def stop(self) -> Load:
        """The load since the beginning."""
        seconds, own_seconds = time.perf_counter() - self._began, _own_seconds() - self._own
        foreign = steal = None
        if self._stat is not None and (now := _stat()) is not None:
            busy, stolen = (after - before for after, before in zip(now, self._stat, strict=True))
            # Ticks are coarser than our own clock, so a short block may come out below zero.
            foreign, steal = max(0.0, busy - own_seconds) / seconds, stolen / seconds
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        return Load(seconds, foreign, steal, peak_mb)


def _stat() -> tuple[float, float] | None:
    """Seconds that all processors were busy, steal left out, and seconds of steal, since the system began."""
    try:
        fields = STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:  # not Linux
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(field) / _TICKS for field in fields[:8])
    return user + nice + system + irq + softirq, steal


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
