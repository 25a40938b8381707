"""The step of all texts that are ready for one, in one launch: the gear of each, for the most tokens a microsecond.

At a price of a microsecond, in tokens, each text takes the gear that gains most for what its part of the launch costs.
The price at which the best launch is worth nothing is the highest ratio of tokens to time that there is (Dinkelbach,
On nonlinear fractional programming, 1967). A plain launch is one of the ways, so nothing is chosen that promises less.
All texts pay for a launch with their time, so the one that may lose least decides (`draftwood.runtime.policy.bank`).

Plain decoding shows nothing of the drafter, so it would never be left again: where no draft is expected to gain, one
text tries one now and then, if the bank has put by what that may cost. Nor do drafts show what plain decoding takes, on
which the promises rest: where they gain little, a few plain steps check it now and then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from draftwood.manifest import Gear
from draftwood.runtime.policy.learned import Cost, Learned, Step
from draftwood.runtime.policy.outcome import Asking
from draftwood.runtime.policy.times import StepTimes

# Less than so many times plain decoding's speed may be no gain: it is checked, unless plain steps have told it of late.
DOUBTED = 1.4
# A ratio that is larger by less is rounding.
_LARGER = 1 + 1e-9


class Option(NamedTuple):
    """A gear, by number, that a text may take in a launch, and the tokens that it is expected to gain there.

    ``us`` is the text's part of the launch's time as it is weighed, ``most_us`` as it will be: a draft that has to
    catch up pays for it once, and is weighed as if that were spread. Both are parts of a launch in which all texts
    take the gear. ``cost`` is the gear whose time that is: the text's own, or the one that its rows are padded to.
    ``graph`` drafts, and takes ``fixed_us`` for however few of the texts.
    """

    gear: int
    tokens: float
    us: float
    most_us: float
    cost: int
    graph: str | None = None
    fixed_us: float = 0.0


class Way(NamedTuple):
    """An option for every text, with the expected tokens and time of the launch. ``mixed_us`` of that is taken beyond
    the texts' parts, each of which pays for a graph as if all were drafted for by it."""

    options: tuple[Option, ...]
    tokens: float
    us: float
    most_us: float
    mixed_us: float

    @classmethod
    def of(cls, options: Sequence[Option]) -> Way:
        mixed_us = _mixed_us(options)
        _, tokens, us, most_us, *_ = zip(*options, strict=True)
        return cls(tuple(options), sum(tokens), sum(us) + mixed_us, sum(most_us) + mixed_us, mixed_us)


def _mixed_us(options: Sequence[Option]) -> float:
    fixed = defaultdict[str | None, list[float]](list)
    for one in options:
        if one.graph is not None:
            fixed[one.graph].append(one.fixed_us)
    if all(len(own) == len(options) for own in fixed.values()):
        return 0.0
    return sum(max(own) - sum(own) / len(options) for own in fixed.values())


class Chooser(Protocol):
    """A text's policy as a launch asks it (`draftwood.runtime.policy.adaptive.Adaptive`)."""

    learned: Learned

    def options(self, asking: Asking, times: StepTimes, texts: int) -> list[Option]: ...
    def late(self, gear: int, asking: Asking) -> int: ...
    def grows(self, gear: int) -> bool: ...
    def loan_us(self, plain_us: float, texts: int) -> float: ...
    def takes(self, gear: int, length: int, step: Step) -> None: ...


def choose(asking: Sequence[Asking], choosers: Sequence[Chooser | None], padded: bool = False) -> list[Gear]:
    """The gear of every text in one launch; a text without a chooser takes the gear that its own policy names.

    Args:
        asking: the texts, at most as many as a launch takes.
        choosers: of every text; all of one bundle.
        padded: whether a launch of several texts pads the rows of each to those of the largest tree.
    """
    learned = next(one.learned for one in choosers if one is not None)
    fixed = [None if chooser else one.alone() for one, chooser in zip(asking, choosers, strict=True)]
    with learned.lock:
        times, texts = learned.times(len(asking)), len(asking)
        every = [
            _named(learned, one, gear, times, texts) if gear is not None else chooser.options(one, times, texts)  # type: ignore[union-attr]
            for one, chooser, gear in zip(asking, choosers, fixed, strict=True)
        ]
        plain = Way.of([own[0] for own in every])
        own_us = [one.loan_us(plain.most_us, texts) for one in choosers if one is not None]
        loan_us = min(learned.bank.loan_us(plain.most_us, texts), *own_us)
        limit_us, rows = plain.most_us + loan_us, learned.gears.rows
        # Without those that alone would take more than is lent.
        every = [[own[0], *(o for o in own[1:] if o.most_us - own[0].most_us <= loan_us)] for own in every]
        ceilings = {rows[one.gear] for own in every for one in own} if padded and texts > 1 else set[int]()
        way = best(plain, every, limit_us, ceilings, rows)
        tried = False
        if _doubted(learned, times, plain, way):
            way = plain
        elif [one.gear for one in way.options] == [one.gear for one in plain.options]:
            attempt = _attempt(learned, every, plain, limit_us)
            way, tried = attempt or plain, attempt is not None
        return _told(learned, asking, choosers, way, plain, tried)


def best(
    plain: Way, every: Sequence[Sequence[Option]], limit_us: float, ceilings: Collection[int], rows: Sequence[int]
) -> Way:
    """The way of the highest rate within a time; the plain launch where no other is.

    Exact but for the limit, above which those drafts are given up first that gain least for their time. ``ceilings``
    are numbers of rows to which all texts may be padded; none where rows are not padded. ``rows`` are the gears'.
    """
    found = plain
    padded: list[Sequence[Sequence[Option]]] = [_padded(every, ceiling, rows) for ceiling in sorted(ceilings)] or [
        every
    ]
    while True:
        price = found.tokens / found.us
        ways = (_within(way, options, limit_us) for options in padded for way in _ways(options, price))
        better = max(filter(None, ways), key=lambda way: way.tokens - price * way.us, default=found)
        if better.tokens <= price * better.us * _LARGER:
            return found
        found = better


def _ways(every: Sequence[Sequence[Option]], price: float) -> Iterator[Way]:
    """The best way at a price that drafts with any graph, and with each one alone."""
    graphs = {one.graph for own in every for one in own if one.graph is not None and one.fixed_us}
    for used in (graphs, *({graph} for graph in graphs), set[str]()) if graphs else (graphs,):
        yield Way.of([_pick(own, price, graphs - used, len(every)) for own in every])


def _pick(own: Sequence[Option], price: float, left_out: set[str], texts: int) -> Option:
    """The option that is worth most to a text at a price, where the graphs are paid for; of equals the first."""
    fits = [one for one in own if one.graph not in left_out] or own
    return max(fits, key=lambda one: one.tokens - price * (one.us - one.fixed_us / texts))


def _padded(every: Sequence[Sequence[Option]], ceiling: int, rows: Sequence[int]) -> list[list[Option]]:
    """Options of at most so many rows, in the time of the dearest of exactly as many."""
    tall = max((one for own in every for one in own if rows[one.gear] == ceiling), key=lambda one: one.us)
    return [
        [
            one._replace(us=tall.us, most_us=tall.us + one.most_us - one.us, cost=tall.gear, graph=None, fixed_us=0.0)
            for one in [fit for fit in own if rows[fit.gear] <= ceiling] or own[:1]
        ]
        for own in every
    ]


def _within(way: Way, every: Sequence[Sequence[Option]], limit_us: float) -> Way | None:
    """The way as far as it takes no more time than it may; the drafts that gain least for their time go first."""
    while way.most_us > limit_us:
        drafts = [n for n, one in enumerate(way.options) if one.gear != every[n][0].gear]
        if not drafts:
            return None
        worst = min(drafts, key=lambda n: _gain(way.options[n], every[n][0]))
        way = Way.of([every[n][0] if n == worst else one for n, one in enumerate(way.options)])
    return way


def _gain(option: Option, plain: Option) -> float:
    """Tokens that a draft is expected to gain for its time, beyond a plain step."""
    return (option.tokens - plain.tokens) / max(option.most_us - plain.most_us, 1e-9)


def _doubted(learned: Learned, times: StepTimes, plain: Way, way: Way) -> bool:
    """Whether it has to be seen first what plain decoding takes."""
    if times.table.absolute and way.tokens * plain.us >= DOUBTED * way.us * plain.tokens:
        return False
    return any(times.aged(one.gear) for one in plain.options if not learned.drafts(one.gear))


def _attempt(learned: Learned, every: Sequence[Sequence[Option]], plain: Way, limit_us: float) -> Way | None:
    """A draft of one text, that which promises most of those that lose; None where the bank has not put it by."""
    each = [
        Way.of([option if n == text else one for n, one in enumerate(plain.options)])
        for text, own in enumerate(every)
        for option in own[1:]
    ]
    way = max((one for one in each if one.most_us <= limit_us), key=lambda one: one.tokens / one.us, default=None)
    if way is None:
        return None
    gained_us = (way.tokens - plain.tokens) * plain.most_us / len(every)
    return way if learned.bank.may_try(way.most_us - plain.most_us - gained_us) else None


def _named(learned: Learned, asking: Asking, gear: Gear, times: StepTimes, texts: int) -> list[Option]:
    """The one option of a text whose policy names its gear."""
    number = learned.gears.number[gear.name]
    us = times.us(number, asking.length) / texts
    return [Option(number, 1.0, us, us, number, gear.draft if gear.neural else None)]


def _told(
    learned: Learned,
    asking: Sequence[Asking],
    choosers: Sequence[Chooser | None],
    way: Way,
    plain: Way,
    tried: bool,
) -> list[Gear]:
    """Every text's policy learns what was chosen."""
    known = [
        (one, asked, chooser) for one, asked, chooser in zip(way.options, asking, choosers, strict=True) if chooser
    ]
    step = Step(
        learned,
        [Cost(one.cost, asked.length) for one, asked in zip(way.options, asking, strict=True)],
        [Cost(one.cost, asked.length) for one, asked in zip(plain.options, asking, strict=True)],
        late=sum(chooser.late(one.gear, asked) for one, asked, chooser in known),
        mixed_us=way.mixed_us,
        grows=any(chooser.grows(one.gear) for one, _, chooser in known),
        tried=tried,
    )
    for one, asked, chooser in known:
        chooser.takes(one.gear, asked.length, step)
    return [learned.gears.gears[one.gear] for one in way.options]
