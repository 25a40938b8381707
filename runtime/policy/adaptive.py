"""The gears of all texts that are ready for a step, in one launch: those of the most expected tokens a microsecond.

All texts of a launch draft with one tree, or none does. A text that cannot have the tree decodes plainly next to those
that have it. Either its KV length has no room, or it has nothing to look up. All pay for a launch with their time, so
the one that may lose least decides (`draftwood.runtime.policy.bank`).

Plain decoding shows nothing of the drafter, so by itself it would never be left again. If no draft is expected to gain,
one is tried now and then, provided that the bank has saved its cost. Nor do drafts show how long plain steps take, on
which the promise rests. If drafts gain little, a few plain steps check it now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from draftwood.manifest import Gear
from draftwood.runtime.policy.bank import EXTRA, Account
from draftwood.runtime.policy.gains import Ease, Gains
from draftwood.runtime.policy.gears import Gears
from draftwood.runtime.policy.policy import Asking, Expected
from draftwood.runtime.policy.times import Pace, StepTimes
from draftwood.runtime.speculation.step import Outcome

# Catching up is paid for once, and weighed as if it were spread over this many steps.
STAY = 8
# A draft that has no more tokens to catch up with, for each of its texts, tells the time of its gear.
FEW = 16
# A launch is charged with its time, up to this many times the expected one. Another guest's work, or the opening of a
# graph, is no fault of drafts.
MOST_CHARGED = 1.5
# Less than this many times plain decoding's speed may be no gain. It is checked, unless plain steps have told it of
# late.
DOUBTED = 1.4
# A ratio that is larger by less is rounding.
LARGER = 1 + 1e-9
# The shape of plain decoding.
_PLAIN = -1


class Learned:
    """Knowledge that all texts of a bundle share; its lock is held while a policy reads or adds."""

    def __init__(self, gears: Gears) -> None:
        self.lock, self.bank, self.gears = Lock(), Account.of_all(), gears
        # Microseconds that tries have lost.
        self.tried_us = 0.0
        self._pace = Pace()
        # By texts of a launch.
        self._times = {1: StepTimes(gears.times, self._pace)}
        self._gains = {(greedy, guided): gears.gains(greedy) for greedy in (True, False) for guided in (True, False)}

    def gains(self, greedy: bool, held: bool = False) -> Gains:
        """Counts of greedy or sampled texts, ``held`` to a grammar, which fills drafts, or free."""
        return self._gains[greedy, held]

    def times(self, texts: int) -> StepTimes:
        """Times of launches that ``texts`` texts share."""
        if texts not in self._times:
            self._times[texts] = StepTimes(self.gears.times_of(texts), self._pace)
        return self._times[texts]

    def may_try(self, lost_us: float) -> bool:
        """Whether a step that is expected to lose so much may be taken, to learn its worth."""
        return lost_us + self.tried_us <= EXTRA * self.bank.plain_us


class GearOption(NamedTuple):
    """A gear, by number, that a text may take. ``us`` is the text's part of a launch in which all take it. It leaves
    out the ``late`` tokens that the text catches up with in ``late_us``."""

    gear: int
    length: int
    tokens: float
    us: float
    late: int = 0
    late_us: float = 0.0


class WeighedLaunch:
    """A launch with an option for every text. ``us`` is its time as weighed, ``most_us`` as it will be.

    If rows are padded, every text takes as long as the one of the most rows.
    """

    def __init__(self, options: Sequence[GearOption], rows: Sequence[int], padded: bool) -> None:
        tallest = max(options, key=lambda own: (rows[own.gear], own.us))
        self.options = tuple(options)
        # The gear and length by which each text's part of the time is known.
        self.costs = [(tallest.gear if padded else option.gear, option.length) for option in options]
        parts_us = len(options) * tallest.us if padded else sum(option.us for option in options)
        late_us = sum(option.late_us for option in options)
        self.tokens = sum(option.tokens for option in options)
        self.us, self.most_us = parts_us + late_us / STAY, parts_us + late_us

    @property
    def rate(self) -> float:
        """Tokens a microsecond."""
        return self.tokens / self.us


class PricedLaunch:
    """A chosen launch next to a plain one of the same texts: expected times, then the time that it took.

    If a text ``grows`` to another KV length, the launch tells nothing. ``tried`` if it is expected to lose.
    """

    def __init__(
        self, learned: Learned, way: WeighedLaunch, plain: WeighedLaunch, grows: bool = False, tried: bool = False
    ) -> None:
        self._learned, self._way, self._plain, self._grows, self.tried = learned, way, plain, grows, tried
        self.texts, self._late = len(way.options), sum(option.late for option in way.options)
        self._times, self._ended = learned.times(self.texts), False
        self._took_us: float | None = None

    @property
    def us(self) -> float:
        """Expected microseconds."""
        return self._times.mean_us(self._way.costs) + self._learned.times(1).catch_up_us(self._late)

    @property
    def plain_us(self) -> float:
        """Expected microseconds of the plain launch."""
        return self._times.mean_us(self._plain.costs)

    @property
    def charged_us(self) -> float:
        """Microseconds that its texts answer for: those it took, once it has ended, if any of them drafts."""
        return self.us if self._took_us is None else self._took_us

    def ended(self, us: float) -> None:
        """Enters its time; the first of its texts to tell counts."""
        if self._ended:
            return
        self._ended, expected_us, gears = True, self.us, self._learned.gears
        lengths = dict(self._way.costs)
        drafting = [gear for gear in lengths if gears.drafts(gear)]
        if drafting and not self._grows:
            self._took_us = min(us, MOST_CHARGED * expected_us)
        if self._late > FEW * self.texts:
            # The extra time of a late draft is no time of the gear, which would be given up for its first step.
            self._learned.times(1).caught_up(self._late, us - self._times.mean_us(self._way.costs))
        # A drafter's launch hardly becomes shorter if some texts decode plainly: it tells nothing of their parts.
        elif not self._grows and (len(drafting) in (0, len(lengths)) or all(map(gears.looks_up, drafting))):
            for gear in drafting or lengths:
                self._times.observe(gear, lengths[gear], us / expected_us * self._times.us(gear, lengths[gear]))


class Adaptive:
    """The policy of one text of at most ``max_new_tokens``, greedy or sampled, free or ``held`` to a grammar."""

    def __init__(self, gears: Gears, learned: Learned, greedy: bool, max_new_tokens: int, held: bool = False) -> None:
        self._gears, self.learned = gears, learned
        self.ease, self.account = Ease(learned.gains(greedy, held)), Account.of_text(max_new_tokens)
        self._slots, self._steps, self._match = 0, 0, 0
        # The last choice: the gear, the text's length, and the launch.
        self._chosen: tuple[int, int, PricedLaunch] | None = None

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        fit = self._gears.fitting(length, self._slots)
        if fit.plain is None and not fit.drafting:
            return None
        return choose([Asking(self, length, late, match)])[0]

    def options(self, asking: Asking, times: StepTimes, texts: int) -> dict[int, GearOption]:
        """The gears that it may take in a launch of ``texts`` texts, by shape, plain decoding first."""
        if not self._steps:
            self.ease.begin(asking.length)
        self._match, length = asking.match, asking.length
        plain, drafting = self._gears.fitting(length, self._slots)
        late_us, options = self.learned.times(1).catch_up_us(asking.late), dict[int, GearOption]()
        if plain is not None:
            options[_PLAIN] = GearOption(plain, length, 1.0, times.us(plain, length) / texts)
        for gear in drafting:
            shape, looked_up = self._gears.shape[gear], self._gears.looks_up(gear)
            if looked_up and not asking.match and options:
                continue  # there is nothing to propose
            tokens, us = self.ease.tokens(shape, asking.match), times.us(gear, length) / texts
            late = (0, 0.0) if looked_up else (asking.late, late_us)
            options[shape] = GearOption(gear, length, tokens, us, *late)
        return options

    def grows(self, gear: int) -> bool:
        """Whether the text moves to a larger KV length for the gear."""
        return 0 < self._slots < self._gears.gears[gear].slots

    def takes(self, option: GearOption, launch: PricedLaunch) -> None:
        """Takes note of the choice for it."""
        self._chosen = option.gear, option.length, launch

    def observe(self, outcome: Outcome) -> None:
        gear = self._gears.number[outcome.gear.name]
        with self.learned.lock:
            if self._chosen is not None and self._chosen[:2] == (gear, outcome.length):
                self._pay(outcome, self._chosen[2])
            if self._gears.drafts(gear):
                self.ease.saw(self._gears.shape[gear], outcome.match, outcome.path)
            else:
                self.ease.idle()
        self._chosen, self._steps = None, self._steps + 1
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> Expected:
        number = self._gears.number[gear.name]
        with self.learned.lock:
            drafts = self._gears.drafts(number)
            tokens = self.ease.tokens(self._gears.shape[number], self._match) if drafts else 1.0
            if self._chosen is not None and self._chosen[:2] == (number, length):
                return Expected(tokens, self._chosen[2].us)
            return Expected(tokens, self.learned.times(1).us(number, length))

    def _pay(self, outcome: Outcome, launch: PricedLaunch) -> None:
        """Enters the text's part of a launch in the accounts."""
        launch.ended(outcome.total_us)
        learned, gained, texts = self.learned, outcome.gained, launch.texts
        us, plain_us = launch.charged_us, launch.plain_us
        learned.bank.stepped(gained, us / texts, plain_us / texts)
        self.account.stepped(gained, us, plain_us)
        if launch.tried:
            learned.tried_us += max(us - gained * plain_us, 0.0) / texts


def choose(asking: Sequence[Asking], padded: bool = False) -> list[Gear]:
    """The gear of every text in one launch.

    Texts whose policies share their knowledge are chosen for together; another text follows its own policy.

    Args:
        asking: the texts, at most as many as a launch takes; the policy of one at least is `Adaptive`.
        padded: whether a launch of several texts pads the rows of each to those of the largest tree.
    """
    learned = next(text.policy.learned for text in asking if isinstance(text.policy, Adaptive))
    policies = [
        text.policy if isinstance(text.policy, Adaptive) and text.policy.learned is learned else None for text in asking
    ]
    named = [None if policy else text.alone() for text, policy in zip(asking, policies, strict=True)]
    with learned.lock:
        gears, times, texts = learned.gears, learned.times(len(asking)), len(asking)
        every = [
            policy.options(text, times, texts) if policy else _named(learned, text, gear, times, texts)
            for text, policy, gear in zip(asking, policies, named, strict=True)
        ]
        plain, *ways = (
            WeighedLaunch(
                [ways.get(shape, next(iter(ways.values()))) for ways in every], gears.rows, padded and texts > 1
            )
            for shape in dict.fromkeys((_PLAIN, *(shape for ways in every for shape in ways)))
        )
        way, tried = _best(learned, times, plain, ways, [policy.account for policy in policies if policy])
        chosen = list(zip(way.options, policies, strict=True))
        grows = any(policy.grows(option.gear) for option, policy in chosen if policy)
        launch = PricedLaunch(learned, way, plain, grows, tried)
        for option, policy in chosen:
            if policy:
                policy.takes(option, launch)
        return [gears.gears[option.gear] for option in way.options]


def _best(
    learned: Learned, times: StepTimes, plain: WeighedLaunch, ways: Sequence[WeighedLaunch], accounts: Sequence[Account]
) -> tuple[WeighedLaunch, bool]:
    """The way of the highest rate that all accounts allow, and whether it is tried though it is expected to lose."""
    texts = len(plain.options)
    loan_us = min(learned.bank.loan_us(plain.most_us, texts), *(account.loan_us(plain.most_us) for account in accounts))
    allowed = [way for way in ways if way.most_us <= plain.most_us + loan_us]
    way = max(allowed, key=lambda way: way.rate, default=plain)
    if way.rate <= plain.rate * LARGER:
        gained_us = (way.tokens - plain.tokens) * plain.most_us / texts
        tried = way is not plain and learned.may_try(way.most_us - plain.most_us - gained_us)
        way = way if tried else plain
    else:
        tried = False
    # It has to be seen first how long plain steps take.
    doubted = not times.table.absolute or way.rate < DOUBTED * plain.rate
    if doubted and any(times.aged(option.gear) for option in plain.options if not learned.gears.drafts(option.gear)):
        return plain, False
    return way, tried


def _named(learned: Learned, asking: Asking, gear: Gear | None, times: StepTimes, texts: int) -> dict[int, GearOption]:
    """The one option of a text whose policy names its gear."""
    assert gear is not None, "a policy that is not asked here has named its gear"
    number = learned.gears.number[gear.name]
    return {_PLAIN: GearOption(number, asking.length, 1.0, times.us(number, asking.length) / texts)}
