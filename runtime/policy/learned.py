"""What the texts of a bundle have shown, and what a step of several of them is thought to take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from draftwood.runtime.policy.bank import Bank
from draftwood.runtime.policy.estimate import Acceptance
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.times import Fading, Pace, StepTimes

# Of what a draft for one text alone takes beyond a plain step, the share that each draft graph is thought to take for
# however few of a step's texts, before a launch has shown it; the launches that this guess counts as.
FIXED, FIXED_LAUNCHES = 0.5, 4.0
# The least that the share becomes; and what one launch says at most, in either direction, over a draft for one text.
LEAST_FIXED, MOST_FIXED = 0.05, 3.0
# The share that is left of earlier mixed launches behind each.
KEPT_MIXED = 0.95
# A launch is charged with what it took, but not beyond so many times what was expected: another guest's work, or the
# opening of a graph, is no fault of drafts.
MOST_CHARGED = 1.5
# A draft that has no more tokens to catch up with, for each of its texts, tells what its gear takes.
FEW = 16


class Cost(NamedTuple):
    """Whose time a text's part of a launch is: a gear by number, behind so many tokens."""

    gear: int
    length: int


class Mixed:
    """What launches show in which texts are drafted for by different graphs, or some by none: ``share`` of what a draft
    for one text alone takes beyond a plain step is taken by each graph, for however few of the texts."""

    def __init__(self) -> None:
        self.share, self._seen = FIXED, Fading(0.0, 0.0, KEPT_MIXED)

    def took(self, expected_us: float, us: float) -> None:
        """A launch took ``us`` beyond its texts' parts, where ``expected_us`` was thought."""
        whole_us = expected_us / self.share
        if not self._seen.parts:  # what was thought counts as some launches of this size
            self._seen = Fading(FIXED_LAUNCHES * whole_us, FIXED_LAUNCHES * expected_us, KEPT_MIXED)
        most_us = MOST_FIXED * whole_us
        self._seen.saw(whole_us, min(max(us, -most_us), most_us))
        self.share = max(self._seen.ratio, LEAST_FIXED)


class Learned:
    """Shared by all texts, whoever asks for them; its lock is held while a policy reads or adds."""

    def __init__(self, gears: Gears) -> None:
        self.lock, self.bank, self.gears = Lock(), Bank(), gears
        self._pace = Pace()
        # By texts of a launch.
        self._times = {1: StepTimes(gears.times, self._pace)}
        self._mixed = defaultdict[int, Mixed](Mixed)
        # By whether texts are greedy, and whether they are held to a grammar, which drafts are filled by.
        self._acceptances = {
            (greedy, held): Acceptance(gears.greedy if greedy else gears.sampled)
            for greedy in (True, False)
            for held in (True, False)
        }

    def acceptance(self, greedy: bool, held: bool = False) -> Acceptance:
        """How often drafts hit in texts that are greedy or sampled, and ``held`` to a grammar or free."""
        return self._acceptances[greedy, held]

    def times(self, texts: int) -> StepTimes:
        """Of launches that so many texts share."""
        if texts not in self._times:
            self._times[texts] = StepTimes(self.gears.times_of(texts), self._pace)
        return self._times[texts]

    def mixed(self, texts: int) -> Mixed:
        """Of launches that so many texts share, the mixed ones."""
        return self._mixed[texts]

    def fixed_us(self, gears: Sequence[int], plain: int, length: int, texts: int) -> list[float]:
        """What each gear's draft takes for however few of so many texts; nothing that counts where nothing is timed."""
        alone = self._times[1]
        if texts == 1 or not alone.table.absolute or not self.times(texts).table.absolute:
            return [0.0] * len(gears)
        share, plain_us = self._mixed[texts].share, alone.us(plain, length)
        return [share * max(alone.us(gear, length) - plain_us, 0.0) for gear in gears]

    def catch_up_us(self, tokens: int) -> float:
        """What a draft takes in addition where so many tokens are late; each text's by itself."""
        return self._times[1].catch_up_us(tokens)

    def drafts(self, gear: int) -> bool:
        """Whether a gear is not plain decoding."""
        return self.gears.shape[gear] >= 0


class Launched:
    """A launch: what it is thought to take, and once it has ended what it took. ``late`` tokens have to be caught up
    with; where a text ``grows`` to another KV length, the launch tells nothing. ``mixed_us`` are what it is thought to
    take beyond its texts' parts, where it is mixed."""

    def __init__(
        self, learned: Learned, costs: Sequence[Cost], late: int = 0, grows: bool = False, mixed_us: float = 0.0
    ) -> None:
        self._learned, self._costs, self._late, self._grows, self._mixed_us = learned, costs, late, grows, mixed_us
        self._times, self._ended = learned.times(len(costs)), False
        self._took_us: float | None = None

    @property
    def us(self) -> float:
        """Expected microseconds: of every text its part of a launch in which all take the same gear."""
        late_us = self._learned.catch_up_us(self._late) if self._late else 0.0
        return self._own_us() + self._mixed_us + late_us

    @property
    def charged_us(self) -> float:
        """What its texts answer for: what it took, once it has ended, where any of them drafts."""
        return self.us if self._took_us is None else self._took_us

    def ended(self, us: float) -> None:
        """It took so long; what the first of its texts says counts."""
        if self._ended:
            return
        self._ended = True
        expected_us = self.us
        if not self._grows and any(self._learned.drafts(cost.gear) for cost in self._costs):
            self._took_us = min(us, MOST_CHARGED * expected_us)
        if self._late > FEW * len(self._costs):
            # What a late draft takes more is no time of the gear, which would be given up for its first step.
            self._learned.times(1).caught_up(self._late, us - self._own_us() - self._mixed_us)
        elif self._mixed_us and not self._grows:
            self._learned.mixed(len(self._costs)).took(self._mixed_us, us - (expected_us - self._mixed_us))
        elif not self._grows:
            self._observed(us / expected_us)

    def _observed(self, ratio: float) -> None:
        """It took so many times what was expected: of the gears that draft, if any does."""
        gears = {cost.gear: cost.length for cost in self._costs}
        for gear in [gear for gear in gears if self._learned.drafts(gear)] or gears:
            self._times.observe(gear, gears[gear], ratio * self._times.us(gear, gears[gear]))

    def _own_us(self) -> float:
        if len(self._costs) == 1:
            return self._times.us(*self._costs[0])
        return sum(self._times.us(*cost) for cost in self._costs) / len(self._costs)


class Step:
    """A step of some texts: its launches, beside one plain launch of the same texts. ``tried`` if it is expected to
    lose."""

    def __init__(self, plain: Launched, launches: Sequence[Launched], texts: int, tried: bool = False) -> None:
        self._plain, self._launches, self.texts, self.tried = plain, launches, texts, tried

    @property
    def charged_us(self) -> tuple[float, float]:
        """What all its launches took, as far as they have ended, and what the plain one would."""
        return sum(launch.charged_us for launch in self._launches), self._plain.us
