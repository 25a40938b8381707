"""What a step of each gear takes, from a table, corrected by what the steps of this text and of those before took.

A gear's time is ``table * own * busy``: ``own`` mends what the table says of this gear, ``busy`` is shared, and
follows the machine. The first steps of a gear mend its own factor; from then on a change is the machine's. A single
odd step is a hiccup and teaches nothing; three in a row on one side are a change, and are believed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from draftwood.planned import StepTime

# Steps by which a gear's own factor is settled.
SETTLED = 8
# After that a step moves the shared factor by this share of the difference, and the gear's own by the smaller one.
SHARED_GAIN = 0.1
OWN_GAIN = 0.02
# A step off by more than this factor is odd, and so many odd ones in a row on one side are believed.
ODD = 1.5
BELIEVED = 3
# So many steps of any gear behind those that told a gear's pace, it may have another one: machines have other guests,
# and they do not slow down every gear alike.
AGED = 200
# What is thought of a gear that nobody has timed, in plain steps: of one row, and of each row more.
GUESS = 1.25
GUESS_ROW = 0.02


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Microseconds of a step of each gear behind a text of n tokens: ``base[g] + slope[g] * n``.

    Where ``absolute`` is False, nothing was measured: a plain step is 1 by definition, the others are guesses.
    """

    base: tuple[float, ...]
    slope: tuple[float, ...]
    absolute: bool
    # Of writing one late token into the drafter's caches; 0 where that was not measured.
    late: float = 0.0

    def us(self, gear: int, length: int) -> float:
        """What the table says; never below a tenth of the base, however far a slope is extended."""
        return max(self.base[gear] + self.slope[gear] * length, 0.1 * self.base[gear])


def time_table(names: Sequence[str], rows: Sequence[int], times: Sequence[StepTime]) -> TimeTable:
    """The table of gears by name, from steps that were timed; of guesses unless every gear was."""
    points: Mapping[str, list[tuple[int, float]]] = {name: [] for name in names}
    for time in times:
        if time.gear in points and not time.late:
            points[time.gear].append((time.length, time.us))
    if not all(points.values()):
        guesses = tuple(1.0 if count == 1 else GUESS + GUESS_ROW * count for count in rows)
        return TimeTable(guesses, (0.0,) * len(names), absolute=False)
    lines = dict(zip(names, (_line(points[name]) for name in names), strict=True))
    late = [_late(time, *lines[time.gear]) for time in times if time.late and time.gear in lines]
    base, slope = zip(*lines.values(), strict=True)
    return TimeTable(base, slope, absolute=True, late=sum(late) / len(late) if late else 0.0)


def _late(time: StepTime, base: float, slope: float) -> float:
    """What a late token took, over a step without any."""
    return max(time.us - base - slope * time.length, 0.0) / time.late


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope, by least squares; no slope from one length."""
    count = len(points)
    middle, mean = sum(n for n, _ in points) / count, sum(us for _, us in points) / count
    spread = sum((n - middle) ** 2 for n, _ in points)
    slope = sum((n - middle) * (us - mean) for n, us in points) / spread if spread else 0.0
    base = mean - slope * middle
    return (base, slope) if base > 0 else (mean, 0.0)


class Paces:
    """What steps took of late over what the table says, gear by gear; shared by the texts of a machine.

    A table that was timed in other minutes may be off by a third for all gears alike. A text that found out by its
    first draft would hold it against drafting, for of plain decoding it has seen nothing yet.
    """

    def __init__(self, gears: int) -> None:
        self._found: list[float | None] = [None] * gears
        # Steps of all gears, and how many they were when a gear's pace was told.
        self._steps, self._told = 0, [-AGED] * gears

    def passed(self) -> None:
        """A step of any gear was observed."""
        self._steps += 1

    def saw(self, gear: int, pace: float) -> None:
        """A text has settled that the gear takes ``pace`` times its table."""
        self._found[gear], self._told[gear] = pace, self._steps

    def aged(self, gear: int) -> bool:
        """Whether it was long ago that the gear's pace was told, or never."""
        return self._steps - self._told[gear] >= AGED

    def start(self) -> list[float]:
        """Factors for a new text, of every gear; of one that has not run that of the others, in the geometric mean."""
        known = [log(pace) for pace in self._found if pace is not None]
        other = exp(sum(known) / len(known)) if known else 1.0
        return [other if pace is None else pace for pace in self._found]


class StepTimes:
    """Running estimates of one text; where the table is of guesses, nothing goes from one text to another."""

    def __init__(self, table: TimeTable, paces: Paces | None = None) -> None:
        gears = len(table.base)
        self.table = table
        self._paces = paces if table.absolute else None
        self._own = self._paces.start() if self._paces else [1.0] * gears
        self._busy = 1.0 if table.absolute else 0.0
        self._count = [0] * gears
        self._odd: list[list[float]] = [[] for _ in range(gears)]
        # Microseconds of writing one token more into the drafter's caches; a table's counts as one observation.
        self._catch_up = table.late
        self._caught = int(table.late > 0)

    def us(self, gear: int, length: int) -> float:
        """Expected microseconds; in plain steps where nothing was measured yet."""
        return self.table.us(gear, length) * self._own[gear] * (self._busy or 1.0)

    def seen(self, gear: int) -> int:
        """Steps of the gear that were observed."""
        return self._count[gear]

    def aged(self, gear: int) -> bool:
        """Whether steps of this text and of those before have long told nothing of the gear; of guesses never."""
        return self._paces is not None and self._paces.aged(gear)

    def catch_up_us(self, tokens: int) -> float:
        """What a draft takes in addition where so many tokens are late."""
        return self._catch_up * tokens

    def observe(self, gear: int, length: int, us: float) -> None:
        """A step of the gear took ``us``."""
        self._count[gear] += 1
        if self._paces:
            self._paces.passed()
        if not self._busy:
            self._busy = us / self.table.us(gear, length)
            return
        ratio = us / self.us(gear, length)
        if self._count[gear] <= BELIEVED and not self.table.absolute:
            # Whatever runs for the first time may be opened first, so a first step teaches nothing.
            if sum(self._count) == self._count[gear]:  # all guesses are in units of what has run alone so far
                self._busy *= min(ratio, 1.0)
            elif self._count[gear] == 2 or (self._count[gear] > 2 and ratio < 1):
                self._own[gear] *= ratio
        elif 1 / ODD < ratio < ODD:
            self._odd[gear].clear()
            self._follow(gear, ratio)
        else:
            self._doubt(gear, ratio)
        if self._paces and self._count[gear] >= BELIEVED:
            self._paces.saw(gear, self._own[gear] * self._busy)

    def caught_up(self, gear: int, tokens: int, us: float) -> None:
        """A draft of the gear took ``us`` more than one that has nothing to catch up."""
        self._count[gear] += 1
        self._caught += 1
        gain = max(1 / self._caught, 0.2)
        self._catch_up += gain * (max(us, 0.0) / tokens - self._catch_up)

    def _follow(self, gear: int, ratio: float) -> None:
        count = self._count[gear]
        if count <= SETTLED:
            self._own[gear] *= 1 + (ratio - 1) / count
        else:
            self._own[gear] *= 1 + OWN_GAIN * (ratio - 1)
            self._busy *= 1 + SHARED_GAIN * (ratio - 1)

    def _doubt(self, gear: int, ratio: float) -> None:
        odd = self._odd[gear]
        if odd and (odd[0] > 1) != (ratio > 1):
            odd.clear()
        odd.append(ratio)
        if len(odd) == BELIEVED:
            change = sorted(odd)[BELIEVED // 2]
            if self._count[gear] > SETTLED:
                self._busy *= change
            else:
                self._own[gear] *= change
            odd.clear()
