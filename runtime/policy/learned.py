"""What the texts of a bundle have shown, and the account of one step of some of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from draftwood.runtime.policy.bank import Bank
from draftwood.runtime.policy.gains import Gains
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.times import Fading, Pace, StepTimes

# Of what a draft for one text alone takes beyond a plain step, the share that a draft graph takes for however few texts
# of a launch, before a launch has shown it; the launches that this guess counts as; the least that the share becomes;
# and what one launch says at most, in either direction.
FIXED, FIXED_LAUNCHES, LEAST_FIXED, MOST_FIXED = 0.5, 4.0, 0.05, 3.0
# The share that is left of earlier launches after each.
KEPT_LAUNCHES = 0.95
# A launch is charged with what it took, but not beyond so many times what was expected: another guest's work, or the
# opening of a graph, is no fault of drafts.
MOST_CHARGED = 1.5
# A draft that has no more tokens to catch up with, for each of its texts, tells what its gear takes.
FEW = 16


class FixedShare:
    """What launches of some number of texts show in which some draft and others do not."""

    def __init__(self) -> None:
        self.share, self._seen = FIXED, Fading(0.0, 0.0, KEPT_LAUNCHES)

    def took(self, expected_us: float, us: float) -> None:
        """A launch took ``us`` beyond its texts' parts, where ``expected_us`` was thought."""
        whole_us = expected_us / self.share
        if not self._seen.parts:  # what was thought counts as some launches of this size
            self._seen = Fading(FIXED_LAUNCHES * whole_us, FIXED_LAUNCHES * expected_us, KEPT_LAUNCHES)
        self._seen.saw(whole_us, min(max(us, -MOST_FIXED * whole_us), MOST_FIXED * whole_us))
        self.share = max(self._seen.ratio, LEAST_FIXED)


class Learned:
    """Shared by all texts, whoever asks for them; its lock is held while a policy reads or adds."""

    def __init__(self, gears: Gears) -> None:
        self.lock, self.bank, self.gears = Lock(), Bank(), gears
        self._pace = Pace()
        # By texts of a launch.
        self._times = {1: StepTimes(gears.times, self._pace)}
        self.fixed = defaultdict[int, FixedShare](FixedShare)
        both = (True, False)
        self._gains = {(greedy, held): gears.gains(greedy) for greedy in both for held in both}

    def gains(self, greedy: bool, held: bool = False) -> Gains:
        """Of greedy or sampled texts, ``held`` to a grammar, which fills drafts, or free."""
        return self._gains[greedy, held]

    def times(self, texts: int) -> StepTimes:
        """Of launches that so many texts share."""
        if texts not in self._times:
            self._times[texts] = StepTimes(self.gears.times_of(texts), self._pace)
        return self._times[texts]

    def catch_up_us(self, tokens: int) -> float:
        """What a draft takes in addition where so many tokens are late; each text's by itself."""
        return self._times[1].catch_up_us(tokens)

    def drafts(self, gear: int) -> bool:
        """Whether a gear is not plain decoding."""
        return self.gears.shape[gear] >= 0


class Cost(NamedTuple):
    """The key to a text's part of a launch's time: a gear by number, and the length of the text."""

    gear: int
    length: int


class Step:
    """A launch next to a plain one of the same texts: what both are expected to take, then what the launch took.

    ``late`` tokens have to be caught up with. ``mixed_us`` is what the launch takes beyond its texts' parts where some
    of them draft and others do not. Where a text ``grows`` to another KV length, the launch tells nothing. ``tried`` if
    it is expected to lose.
    """

    def __init__(
        self,
        learned: Learned,
        costs: Sequence[Cost],
        plain: Sequence[Cost],
        late: int = 0,
        mixed_us: float = 0.0,
        grows: bool = False,
        tried: bool = False,
    ) -> None:
        self._learned, self._costs, self._plain = learned, costs, plain
        self._late, self._mixed_us, self._grows, self.tried = late, mixed_us, grows, tried
        self._times, self._ended = learned.times(len(costs)), False
        self._took_us: float | None = None

    @property
    def texts(self) -> int:
        """That share it."""
        return len(self._costs)

    @property
    def us(self) -> float:
        """Expected microseconds: of every text its part of a launch in which all take the same gear."""
        return self._times.mean_us(self._costs) + self._mixed_us + self._learned.catch_up_us(self._late)

    @property
    def plain_us(self) -> float:
        """Expected microseconds of the plain launch."""
        return self._times.mean_us(self._plain)

    @property
    def charged_us(self) -> float:
        """What its texts answer for: what it took, once it has ended, where any of them drafts."""
        return self.us if self._took_us is None else self._took_us

    def ended(self, us: float) -> None:
        """It took so long; what the first of its texts says counts."""
        if self._ended:
            return
        self._ended, expected_us = True, self.us
        gears = {cost.gear: cost.length for cost in self._costs}
        drafting = [gear for gear in gears if self._learned.drafts(gear)]
        if drafting and not self._grows:
            self._took_us = min(us, MOST_CHARGED * expected_us)
        if self._late > FEW * self.texts:
            # What a late draft takes more is no time of the gear, which would be given up for its first step.
            more_us = us - self._times.mean_us(self._costs) - self._mixed_us
            self._learned.times(1).caught_up(self._late, more_us)
        elif self._mixed_us and not self._grows:
            self._learned.fixed[self.texts].took(self._mixed_us, us - expected_us + self._mixed_us)
        elif not self._grows:
            for gear in drafting or gears:
                self._times.observe(gear, gears[gear], us / expected_us * self._times.us(gear, gears[gear]))
