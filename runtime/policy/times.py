"""Step times of each gear: from a table, corrected by the steps of all texts of a bundle.

A gear's time is ``table * own * busy``. ``own`` corrects the table for this gear. ``busy`` is shared by all launches,
those of other numbers of texts included, and follows the machine. The first steps of a gear mend its own factor; from
then on a change is the machine's. Of a gear's last three steps the middle one is believed, so one odd step is a hiccup
and teaches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from draftwood.planned import StepTime

# Steps by which a gear's own factor is settled.
SETTLED = 8
# After that a step moves the shared factor by this share of the difference, and the gear's own by the smaller one.
SHARED_GAIN, OWN_GAIN = 0.2, 0.02
# A gear with fewer than three of so many steps may have another pace. Machines have other guests, and these do not slow
# down every gear alike.
AGED = 200
# The guess for a row more if nobody has timed the gears, in plain steps.
GUESS_ROW = 0.06
# First, the late tokens that a measured time of them counts as, and that none at all counts as. Then the share that is
# left of earlier launches' tokens after each launch. Last, how many times the expected time one launch may say.
TIMED_LATE, GUESSED_LATE = 128, 32
KEPT_LATE, MOST_LATE = 0.9, 4.0


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Microseconds of a step of each gear after n tokens: ``base[g] + slope[g] * n``.

    If ``absolute`` is False, nothing was measured: a plain step is 1 by definition, the others are guesses.
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]
    absolute: bool
    # Of writing one late token into the drafter's caches; 0 if that was not measured.
    late: float = 0.0

    def us(self, gear: int, length: int) -> float:
        """The line's value; never below a tenth of the base, however far a slope is extended."""
        return max(self.base[gear] + self.slope[gear] * length, 0.1 * self.base[gear])


def time_table(names: Sequence[str], rows: Sequence[int], times: Sequence[StepTime], texts: int = 1) -> TimeTable:
    """The table of gears by name. It comes from timed launches of ``texts`` texts, or of the next larger number; from
    guesses unless every gear was timed."""
    points: Mapping[str, list[tuple[int, float]]] = {name: [] for name in names}
    timed = min((time.texts for time in times if time.texts >= texts), default=texts)
    times = [time for time in times if time.texts == timed]
    for time in times:
        if time.gear in points and not time.late:
            points[time.gear].append((time.length, time.us))
    if not all(points.values()):
        guesses = tuple(1.0 if count == 1 else 1 + GUESS_ROW * count * texts for count in rows)
        return TimeTable(guesses, (0.0,) * len(names), absolute=False)
    lines = {name: _line(points[name]) for name in names}
    base, slope = zip(*lines.values(), strict=True)
    late = [
        max(time.us - lines[time.gear][0] - lines[time.gear][1] * time.length, 0.0) / time.late
        for time in times
        if time.late and time.gear in lines
    ]
    return TimeTable(base, slope, absolute=True, late=sum(late) / len(late) if late else 0.0)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope, by least squares; no slope from one length."""
    count = len(points)
    middle, mean = sum(n for n, _ in points) / count, sum(us for _, us in points) / count
    spread = sum((n - middle) ** 2 for n, _ in points)
    slope = sum((n - middle) * (us - mean) for n, us in points) / spread if spread else 0.0
    base = mean - slope * middle
    return (base, slope) if base > 0 else (mean, 0.0)


@dataclass(slots=True)
class Pace:
    """How many times the measured time steps take at present."""

    busy: float = 1.0


class StepTimes:
    """Running estimates, shared by the texts of a bundle. ``pace`` is that of all launches; guesses have another, for
    they have another unit."""

    def __init__(self, table: TimeTable, pace: Pace | None = None) -> None:
        gears = range(len(table.base))
        self.table = table
        self._own = [1.0 for _ in gears]
        self._pace = pace if pace and table.absolute else Pace()
        self._steps, self._count = 0, [0 for _ in gears]
        # When each gear's last three steps were, and their times over the table's.
        self._recent = [deque[tuple[int, float]](maxlen=3) for _ in gears]
        # Tokens that were written late into the drafter's caches, and the microseconds which that took.
        self._late_tokens: float = TIMED_LATE if table.late else GUESSED_LATE
        self._late_us = self._late_tokens * table.late

    def us(self, gear: int, length: int) -> float:
        """Expected microseconds; in plain steps if nothing was measured yet."""
        return self.table.us(gear, length) * self._own[gear] * self._pace.busy

    def mean_us(self, costs: Sequence[tuple[int, int]]) -> float:
        """The time of a launch, in which each text pays for a gear after its number of tokens: the mean."""
        return sum(self.us(gear, length) for gear, length in costs) / len(costs)

    def aged(self, gear: int) -> bool:
        """Whether the last steps have told too little of the gear."""
        recent = self._recent[gear]
        return len(recent) < 3 or self._steps - recent[0][0] >= AGED

    def catch_up_us(self, tokens: int) -> float:
        """Additional microseconds of a draft with that many late tokens."""
        return self._late_us / self._late_tokens * tokens

    def observe(self, gear: int, length: int, us: float) -> None:
        """Enters a step of the gear."""
        recent = self._recent[gear]
        if len(recent) == 3 and self.aged(gear):  # a settled factor is not the present one
            recent.clear()
            self._count[gear] = 0
        self._steps += 1
        recent.append((self._steps, us / self.table.us(gear, length)))
        self._count[gear] += 1
        seen = sorted(ratio for _, ratio in recent)
        ratio = seen[(len(seen) - 1) // 2] / (self._own[gear] * self._pace.busy)
        if not self.table.absolute and self._steps == len(recent):  # guesses are in units of the only gear so far
            self._pace.busy *= ratio
        elif 1 < self._count[gear] <= SETTLED:  # a first step may have opened the graph
            self._own[gear] *= ratio ** (1 / (self._count[gear] - 1))
        elif self._count[gear] > SETTLED:
            self._own[gear] *= ratio**OWN_GAIN
            self._pace.busy *= ratio**SHARED_GAIN

    def caught_up(self, tokens: int, us: float) -> None:
        """Enters a draft that took ``us`` more than one that has nothing to catch up."""
        most_us = MOST_LATE * self.catch_up_us(tokens) if self.table.late else inf
        self._late_tokens = KEPT_LATE * self._late_tokens + tokens
        self._late_us = KEPT_LATE * self._late_us + min(max(us, 0.0), most_us)
