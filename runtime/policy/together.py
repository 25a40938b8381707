"""The step of all texts that are ready for one: which of them share a launch, and the gear of each.

`best` finds the most tokens a microsecond, by every text's own estimate, within what the promises leave: all texts pay
for the launches of a step with their time, so the one that may lose least decides (`draftwood.runtime.policy.bank`).
Plain decoding shows nothing of the drafter, so it would never be left again: where no draft is expected to gain, one
text tries one now and then, if the bank has put by what that may cost. Nor do drafts show what plain decoding takes, on
which the promises rest: where they gain little, a few plain steps check it now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import Account
from draftwood.runtime.policy.launches import Option, Options, Sizes, Taken, Way, best, mixed_us, plain_batch
from draftwood.runtime.policy.learned import Cost, Launched, Learned, Step
from draftwood.runtime.policy.outcome import Asking
from draftwood.runtime.policy.times import StepTimes

# Less than so many times plain decoding's speed may be no gain: it is checked, unless plain steps have told it of late.
DOUBTED = 1.4


class Launch(NamedTuple):
    """Texts of a step, by number, and the gear of each."""

    texts: tuple[int, ...]
    gears: tuple[Gear, ...]


class Chooser(Protocol):
    """What a text's policy says of it (`draftwood.runtime.policy.adaptive.Adaptive`)."""

    learned: Learned

    def options(self, asking: Asking, times: StepTimes, texts: int) -> list[Option]: ...
    def late(self, gear: int, asking: Asking) -> int: ...
    def grows(self, gear: int) -> bool: ...
    def loan_us(self, plain_us: float, texts: int) -> float: ...
    def takes(self, gear: int, length: int, launch: Launched, step: Step) -> None: ...


def choose(asking: Sequence[Asking], choosers: Sequence[Chooser | None], padded: bool = False) -> list[Launch]:
    """The launches of a step of all texts; a text without a chooser takes what its own policy says.

    Args:
        asking: the texts, at most as many as a launch takes.
        choosers: of every text; all of one bundle.
        padded: whether a launch of several texts pads the rows of each to those of the largest tree.
    """
    learned = next(one.learned for one in choosers if one is not None)
    fixed = [None if chooser else one.alone() for one, chooser in zip(asking, choosers, strict=True)]
    with learned.lock:
        return _Together(learned, asking, choosers, fixed, padded).launches()


def alone(learned: Learned, options: Sequence[Option], account: Account) -> int:
    """The gear of a text that shares nothing: what `choose` comes to, where every option is a launch. The lock is held.

    It is asked for at every step of every text, and must take no time.
    """
    plain, times, rate, best = options[0], learned.times(1), 0.0, None
    limit_us = plain.most_us + min(learned.bank.loan_us(plain.most_us), account.loan_us(plain.most_us))
    for one in options[1:]:
        if one.tokens > rate * one.us and one.most_us <= limit_us:
            best, rate = one, one.tokens / one.us
    if best is None or (times.aged(plain.gear) and (rate * plain.us < DOUBTED or not times.table.absolute)):
        return plain.gear
    lost_us = best.most_us - best.tokens * plain.most_us
    return best.gear if rate * plain.us >= 1 or learned.bank.may_try(lost_us) else plain.gear


class _Together:
    """One choice; the lock is held."""

    def __init__(
        self,
        learned: Learned,
        asking: Sequence[Asking],
        choosers: Sequence[Chooser | None],
        fixed: Sequence[Gear | None],
        padded: bool,
    ) -> None:
        self._learned, self._asking, self._choosers, self._fixed = learned, asking, choosers, fixed
        self._texts, self._padded = len(asking), padded and len(asking) > 1
        self._bank, self._times = learned.bank, learned.times(self._texts)

    def launches(self) -> list[Launch]:
        sizes = self._sizes()
        plain = plain_batch(sizes)
        loan_us = self._loan_us(plain.most_us)
        sizes, limit_us = _lent(sizes, loan_us), plain.most_us + loan_us
        way, tried = best(sizes, limit_us), False
        gain = way.tokens * plain.us / (way.us * plain.tokens)
        if self._doubted(plain, gain):
            way = plain
        elif way.launches == plain.launches and (attempt := self._attempt(sizes, plain, limit_us)):
            way, tried = attempt, True
        return self._told(way, plain, tried)

    def _sizes(self) -> Sizes:
        """Options in a launch of all texts, and in launches of halves where it is known what those take."""
        sizes = {self._texts: self._ceilings(self._texts)}
        half = self._texts // 2
        if half and all(self._known(size) for size in {half, self._texts - half}):
            sizes |= {size: self._ceilings(size) for size in {half, self._texts - half}}
        return sizes

    def _known(self, size: int) -> bool:
        return self._learned.times(size).table.absolute and self._times.table.absolute

    def _ceilings(self, size: int) -> list[Options]:
        """Every text's options in a launch of ``size`` texts, where rows are padded for every ceiling on them."""
        times, gears = self._learned.times(size), self._learned.gears
        own = [self._options(text, times, size) for text in range(self._texts)]
        if not self._padded:
            return [own]
        found = list[Options]()
        for rows in sorted({gears.rows[option.gear] for options in own for option in options}):
            tall = {one.gear for options in own for one in options if gears.rows[one.gear] == rows}
            ceiling = max(tall, key=lambda gear: times.us(gear, 0))
            found.append([self._under(ceiling, text, options, times, size) for text, options in enumerate(own)])
        return found

    def _options(self, text: int, times: StepTimes, size: int) -> list[Option]:
        """A text's, each with its own time."""
        asking, chooser, fixed = self._asking[text], self._choosers[text], self._fixed[text]
        if chooser is not None:
            return chooser.options(asking, times, size)
        assert fixed is not None
        gear = self._learned.gears.number[fixed.name]
        us = times.us(gear, asking.length) / size
        return [Option(gear, 1.0, us, us, gear, None if fixed.looks_up else fixed.draft)]

    def _under(self, ceiling: int, text: int, own: list[Option], times: StepTimes, size: int) -> list[Option]:
        """A text's options with at most the ceiling's rows, in its time; an engine that pads drafts text by text."""
        gears = self._learned.gears
        padded_us = times.us(ceiling, self._asking[text].length) / size
        fits = [one for one in own if gears.rows[one.gear] <= gears.rows[ceiling]] or own[:1]
        return [
            one._replace(
                us=padded_us + one.us - base,
                most_us=padded_us + one.most_us - base,
                cost=ceiling,
                graph=None,
                fixed_us=0.0,
            )
            for one in fits
            for base in [times.us(one.gear, self._asking[text].length) / size]
        ]

    def _loan_us(self, plain_us: float) -> float:
        """How much longer than a plain batch the step may take."""
        own = (one.loan_us(plain_us, self._texts) for one in self._choosers if one is not None)
        return min(self._bank.loan_us(plain_us, self._texts), *own)

    def _doubted(self, plain: Way, gain: float) -> bool:
        """Whether it has to be seen first what plain decoding takes."""
        if gain >= DOUBTED and self._times.table.absolute:
            return False
        gears = {one.option.gear for launch in plain.launches for one in launch}
        return any(self._times.aged(gear) for gear in gears if not self._learned.drafts(gear))

    def _attempt(self, sizes: Sizes, plain: Way, limit_us: float) -> Way | None:
        """A draft of one text, that which promises most of those that lose; None where the bank has not put it by."""
        found, best_rate = None, 0.0
        for options in sizes[self._texts]:
            base = Way.of([[Taken(text, own[0], own[0]) for text, own in enumerate(options)]])
            for text, own in enumerate(options):
                for option in own[1:]:
                    fixed_us = option.fixed_us * (1 - 1 / self._texts)
                    more = option.us + fixed_us - own[0].us
                    rate = (base.tokens + option.tokens - own[0].tokens) / (base.us + more)
                    if rate > best_rate and base.most_us + option.most_us + fixed_us - own[0].most_us <= limit_us:
                        found, best_rate = (base.launches[0], text, option), rate
        if found is None:
            return None
        launch, text, option = found
        way = Way.of([[one._replace(option=option) if one.text == text else one for one in launch]])
        gained_us = (way.tokens - plain.tokens) * plain.most_us / self._texts
        return way if self._bank.may_try(way.most_us - plain.most_us - gained_us) else None

    def _told(self, way: Way, plain: Way, tried: bool) -> list[Launch]:
        """Every text's policy learns what was chosen."""
        base = self._launched(plain.launches[0])
        launched = [self._launched(launch) for launch in way.launches]
        step = Step(base, launched, self._texts, tried)
        for launch, times in zip(way.launches, launched, strict=True):
            for text, option, _ in launch:
                if (chooser := self._choosers[text]) is not None:
                    chooser.takes(option.gear, self._asking[text].length, times, step)
        gears = self._learned.gears.gears
        return [
            Launch(tuple(one.text for one in launch), tuple(gears[one.option.gear] for one in launch))
            for launch in way.launches
        ]

    def _launched(self, launch: Sequence[Taken]) -> Launched:
        costs = [Cost(one.option.cost, self._asking[one.text].length) for one in launch]
        late, grows = 0, False
        for text, option, _ in launch:
            if (chooser := self._choosers[text]) is not None:
                late += chooser.late(option.gear, self._asking[text])
                grows |= chooser.grows(option.gear)
        return Launched(self._learned, costs, late, grows, mixed_us(launch))


def _lent(sizes: Sizes, loan_us: float) -> Sizes:
    """Without those options that alone would take more than is lent."""
    return {
        size: [
            [[own[0], *(one for one in own[1:] if one.most_us - own[0].most_us <= loan_us)] for own in options]
            for options in ceilings
        ]
        for size, ceilings in sizes.items()
    }
