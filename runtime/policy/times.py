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


@dataclass(slots=True)
class Pace:
    """How many times the measured time steps take at present."""

    busy: float = 1.0


class StepTimes:
    """Times of launches of ``texts`` texts: running estimates, shared by the texts of a bundle.

    The table comes from ``steps`` of so many texts, or of the next larger number. If a gear was not timed, it is not
    ``absolute``: a plain step is 1 by definition, the others are guesses.

    Args:
        rows: of each gear, by name.
        pace: that of all launches; guesses have their own, since their unit is another.
    """

    def __init__(
        self, rows: Mapping[str, int], steps: Sequence[StepTime], texts: int = 1, pace: Pace | None = None
    ) -> None:
        timed = min((step.texts for step in steps if step.texts >= texts), default=texts)
        steps = [step for step in steps if step.texts == timed and step.gear in rows]
        points = {
            name: [(step.length, step.us) for step in steps if step.gear == name and not step.late] for name in rows
        }
        self.absolute = all(points.values())
        # The base and slope of each gear's table, and the time of writing one late token into the drafter's caches.
        if self.absolute:
            self._lines = {name: _line(pairs) for name, pairs in points.items()}
            late = [(step.us - self._table_us(step.gear, step.length)) / step.late for step in steps if step.late]
            plain_us = min(base for base, _ in self._lines.values())
            self._late = max(fmean(late), 0.0) if late else GUESS_LATE * plain_us
        else:
            self._lines = {name: (1.0 if n == 1 else 1 + GUESS_ROW * n * texts, 0.0) for name, n in rows.items()}
            self._late = GUESS_LATE
        self._pace = pace if pace and self.absolute else Pace()
        self._own, self._count, self._steps = dict.fromkeys(rows, 1.0), dict.fromkeys(rows, 0), 0
        # When each gear's last three steps were, and their times over the table's.
        self._recent = {gear: deque[tuple[int, float]](maxlen=3) for gear in rows}

    def us(self, gear: str, length: int) -> float:
        """Expected microseconds of a step after ``length`` tokens; in plain steps if nothing was measured yet."""
        return self._table_us(gear, length) * self._own[gear] * self._pace.busy

    def mean_us(self, costs: Sequence[tuple[str, int]]) -> float:
        """Expected microseconds of a launch: the mean of those in which all texts take one's gear and length."""
        return sum(self.us(gear, length) for gear, length in costs) / len(costs)

    def late_us(self, tokens: int) -> float:
        """Additional microseconds of a draft with that many late tokens."""
        return self._late * self._pace.busy * tokens

    def aged(self, gear: str) -> bool:
        """Whether the last steps have told too little of the gear."""
        recent = self._recent[gear]
        return len(recent) < 3 or self._steps - recent[0][0] >= AGED

    def observe_launch(self, lengths: Mapping[str, int], share: float) -> None:
        """Enters a launch that took ``share`` times the expected time; ``lengths`` are those of the gears it tells
        of."""
        for gear, length in lengths.items():
            self.observe(gear, length, share * self.us(gear, length))

    def observe(self, gear: str, length: int, us: float) -> None:
        """Enters a step of the gear."""
        recent = self._recent[gear]
        if len(recent) == 3 and self.aged(gear):  # a settled factor is not the present one
            recent.clear()
            self._count[gear] = 0
        self._steps += 1
        self._count[gear] += 1
        recent.append((self._steps, us / self._table_us(gear, length)))
        seen = sorted(ratio for _, ratio in recent)
        ratio = seen[(len(seen) - 1) // 2] / (self._own[gear] * self._pace.busy)
        if not self.absolute and self._steps == len(recent):  # guesses are in units of the only gear so far
            self._pace.busy *= ratio
        elif 1 < self._count[gear] <= SETTLED:  # a first step may have opened the graph
            self._own[gear] *= ratio ** (1 / (self._count[gear] - 1))
        elif self._count[gear] > SETTLED:
            self._pace.busy *= ratio**SHARED_GAIN

    def _table_us(self, gear: str, length: int) -> float:
        """The line's value; never below a tenth of the base, however far a slope is extended."""
        base, slope = self._lines[gear]
        return max(base + slope * length, 0.1 * base)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope, by least squares; no slope from one length."""
    lengths, us = zip(*points, strict=True)
    slope, base = linear_regression(lengths, us) if len(set(lengths)) > 1 else (0.0, fmean(us))
    return (base, slope) if base > 0 else (fmean(us), 0.0)
