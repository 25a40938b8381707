"""What the texts of a bundle have shown, and what a step of several of them is thought to take."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from draftwood.runtime.policy.bank import Bank
from draftwood.runtime.policy.estimate import Acceptance
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.times import Pace, StepTimes

# A draft that has no more tokens to catch up with, for each of its texts, tells what its gear takes.
FEW = 16


class Cost(NamedTuple):
    """Whose time a text's part of a launch is: a gear by number, behind so many tokens."""

    gear: int
    length: int


class Learned:
    """Shared by all texts, whoever asks for them; its lock is held while a policy reads or adds."""

    def __init__(self, gears: Gears) -> None:
        self.lock, self.bank, self.gears = Lock(), Bank(), gears
        self._pace = Pace()
        # By texts of a launch.
        self._times = {1: StepTimes(gears.times, self._pace)}
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

    def catch_up_us(self, tokens: int) -> float:
        """What a draft takes in addition where so many tokens are late; each text's by itself."""
        return self._times[1].catch_up_us(tokens)

    def drafts(self, gear: int) -> bool:
        """Whether a gear is not plain decoding."""
        return self.gears.shape[gear] >= 0


class Launched:
    """A launch: what it is thought to take, and once it has ended what it took. ``late`` tokens have to be caught up
    with; where a text ``grows`` to another KV length, the launch tells nothing."""

    def __init__(self, learned: Learned, costs: Sequence[Cost], late: int = 0, grows: bool = False) -> None:
        self._learned, self._costs, self._late, self._grows = learned, costs, late, grows
        self._times, self._ended = learned.times(len(costs)), False

    @property
    def us(self) -> float:
        """Expected microseconds: of every text its part of a launch in which all take the same gear."""
        return self._own_us() + (self._learned.catch_up_us(self._late) if self._late else 0.0)

    def ended(self, us: float) -> None:
        """It took so long; what the first of its texts says counts."""
        if self._ended:
            return
        self._ended = True
        if self._late > FEW * len(self._costs):
            # What a late draft takes more is no time of the gear, which would be given up for its first step.
            self._learned.times(1).caught_up(self._late, us - self._own_us())
        elif not self._grows:
            self._observed(us / self.us)

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
        self._settled: tuple[float, float] | None = None

    @property
    def settled_us(self) -> tuple[float, float]:
        """What all its launches take, and what the plain one would: as it is known when the first of them has ended."""
        if self._settled is None:
            self._settled = sum(launch.us for launch in self._launches), self._plain.us
        return self._settled
