"""Step times of each gear: from a table, corrected by the steps of all texts of a bundle.

A gear's time is ``table * own * busy``. ``own`` corrects the table for this gear. ``busy`` is shared by all launches,
those of other numbers of texts included, and follows the machine. The first steps of a gear mend its own factor; from
then on a change is the machine's. Of a gear's last three steps the middle one is believed, so one odd step is a hiccup
and teaches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression

from draftwood.planned import StepTime

# Steps by which a gear's own factor is settled; after that a step moves the shared factor by this share of the
# difference.
SETTLED, SHARED_GAIN = 8, 0.2
# A gear with fewer than three of so many steps may have another pace. Machines have other guests, and these do not slow
# down every gear alike.
AGED = 200
# The guesses, in plain steps, if nobody has timed the gears: for a row more, and for writing one late token into the
# drafter's caches.
GUESS_ROW, GUESS_LATE = 0.06, 0.01


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Microseconds of a step of each gear, by name, after n tokens: ``base + slope * n``.

    If ``absolute`` is False, nothing was measured: a plain step is 1 by definition, the others are guesses. ``late`` is
    the time of writing one late token into the drafter's caches.
    """

    lines: Mapping[str, tuple[float, float]]
    absolute: bool
    late: float

    def us(self, gear: str, length: int) -> float:
        """The line's value; never below a tenth of the base, however far a slope is extended."""
        base, slope = self.lines[gear]
        return max(base + slope * length, 0.1 * base)


def time_table(rows: Mapping[str, int], times: Sequence[StepTime], texts: int = 1) -> TimeTable:
    """The table of gears, whose ``rows`` are given by name. It comes from timed launches of ``texts`` texts, or of the
    next larger number; from guesses unless every gear was timed."""
    timed = min((time.texts for time in times if time.texts >= texts), default=texts)
    times = [time for time in times if time.texts == timed and time.gear in rows]
    points = {name: [(time.length, time.us) for time in times if time.gear == name and not time.late] for name in rows}
    if not all(points.values()):
        guesses = {name: (1.0 if n == 1 else 1 + GUESS_ROW * n * texts, 0.0) for name, n in rows.items()}
        return TimeTable(guesses, absolute=False, late=GUESS_LATE)
    table = TimeTable({name: _line(steps) for name, steps in points.items()}, absolute=True, late=0.0)
    plain_us = min(base for base, _ in table.lines.values())
    late = [(time.us - table.us(time.gear, time.length)) / time.late for time in times if time.late]
    return replace(table, late=max(fmean(late), 0.0) if late else GUESS_LATE * plain_us)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope, by least squares; no slope from one length."""
    lengths, us = zip(*points, strict=True)
    slope, base = linear_regression(lengths, us) if len(set(lengths)) > 1 else (0.0, fmean(us))
    return (base, slope) if base > 0 else (fmean(us), 0.0)


@dataclass(slots=True)
class Pace:
    """How many times the measured time steps take at present."""

    busy: float = 1.0


class StepTimes:
    """Running estimates, shared by the texts of a bundle. ``pace`` is that of all launches; guesses have another, for
    they have another unit."""

    def __init__(self, table: TimeTable, pace: Pace | None = None) -> None:
        self.table = table
        self._pace = pace if pace and table.absolute else Pace()
        self._own, self._count, self._steps = dict.fromkeys(table.lines, 1.0), dict.fromkeys(table.lines, 0), 0
        # When each gear's last three steps were, and their times over the table's.
        self._recent = {gear: deque[tuple[int, float]](maxlen=3) for gear in table.lines}

    def us(self, gear: str, length: int) -> float:
        """Expected microseconds; in plain steps if nothing was measured yet."""
        return self.table.us(gear, length) * self._own[gear] * self._pace.busy

    def late_us(self, tokens: int) -> float:
        """Additional microseconds of a draft with that many late tokens."""
        return self.table.late * self._pace.busy * tokens

    def aged(self, gear: str) -> bool:
        """Whether the last steps have told too little of the gear."""
        recent = self._recent[gear]
        return len(recent) < 3 or self._steps - recent[0][0] >= AGED

    def observe(self, gear: str, length: int, us: float) -> None:
        """Enters a step of the gear."""
        recent = self._recent[gear]
        if len(recent) == 3 and self.aged(gear):  # a settled factor is not the present one
            recent.clear()
            self._count[gear] = 0
        self._steps += 1
        self._count[gear] += 1
        recent.append((self._steps, us / self.table.us(gear, length)))
        seen = sorted(ratio for _, ratio in recent)
        ratio = seen[(len(seen) - 1) // 2] / (self._own[gear] * self._pace.busy)
        if not self.table.absolute and self._steps == len(recent):  # guesses are in units of the only gear so far
            self._pace.busy *= ratio
        elif 1 < self._count[gear] <= SETTLED:  # a first step may have opened the graph
            self._own[gear] *= ratio ** (1 / (self._count[gear] - 1))
        elif self._count[gear] > SETTLED:
            self._pace.busy *= ratio**SHARED_GAIN
