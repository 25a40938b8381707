"""Which texts of a step share a launch, and with which gear: the most expected tokens of all texts a microsecond.

At a price of a microsecond, in tokens, a launch is worth what its texts are expected to gain less what its time costs.
All ways to launch are looked at: all texts together or two halves; where rows are padded, with every ceiling on them;
with any of the graphs that draft, each of which takes some time for however few of the texts. The price at which the
best way is worth nothing is the highest ratio of tokens to time that there is (Dinkelbach, On nonlinear fractional
programming, 1967). Plain batches are one of the ways, so nothing is chosen that promises less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from math import inf
from typing import NamedTuple

# Graphs of which every set is looked at.
FEW_GRAPHS = 3
# A ratio that is larger by less is rounding.
_LARGER = 1 + 1e-9


class Option(NamedTuple):
    """A gear, by number, that a text may take in a launch, and the tokens that it is expected to gain there.

    ``us`` is the text's part of the launch's time as it is weighed, ``most_us`` as it will be: a draft that has to
    catch up pays for it once, and is weighed as if that were spread. Both are parts of a launch in which all texts
    take the gear. ``cost`` is the gear whose time that is: the text's own, or the ceiling that its rows are padded to.
    ``graph`` drafts, and takes ``fixed_us`` for however few of the texts.
    """

    gear: int
    tokens: float
    us: float
    most_us: float
    cost: int
    graph: str | None = None
    fixed_us: float = 0.0


# Of every text, in a launch of some size: the first is what a plain batch takes.
Options = Sequence[Sequence[Option]]
# By the number of texts of a launch: those of every ceiling on rows, the lowest first; one where nothing is padded.
Sizes = Mapping[int, Sequence[Options]]


class Taken(NamedTuple):
    """What a text takes in a launch, and the plain option in its place."""

    text: int
    option: Option
    plain: Option


class Worth(NamedTuple):
    """What an option is worth to a text at a price, in tokens; of equals the first is meant."""

    tokens: float
    order: int
    option: Option


def mixed(launch: Sequence[Taken]) -> bool:
    """Whether its texts are drafted for by different graphs, or some by none."""
    return any(one.option.graph != launch[0].option.graph for one in launch)


def mixed_us(launch: Sequence[Taken]) -> float:
    """What it takes beyond its texts' parts, of which each pays for a graph as if all texts were drafted for by it."""
    if not mixed(launch):
        return 0.0
    fixed = defaultdict[str | None, list[float]](list)
    for one in launch:
        fixed[one.option.graph].append(one.option.fixed_us)
    return sum(max(own) - sum(own) / len(launch) for own in fixed.values())


class Way(NamedTuple):
    """What the texts of every launch take, with the expected tokens and the time of all launches together."""

    launches: tuple[tuple[Taken, ...], ...]
    tokens: float
    us: float
    most_us: float

    @classmethod
    def of(cls, launches: Sequence[Sequence[Taken]]) -> Way:
        options = [one.option for launch in launches for one in launch]
        tokens, us, most_us = (sum(part) for part in list(zip(*options, strict=True))[1:4])
        more_us = sum(map(mixed_us, launches))
        return cls(tuple(map(tuple, launches)), tokens, us + more_us, most_us + more_us)


def plain_batch(sizes: Sizes) -> Way:
    """One launch of all texts, none of which drafts."""
    return Way.of([[Taken(text, own[0], own[0]) for text, own in enumerate(sizes[max(sizes)][0])]])


def best(sizes: Sizes, limit_us: float) -> Way:
    """The highest rate within a time that all launches together may take; the plain batch where nothing else is.

    Exact but for the limit, where what lies above it gives up those drafts first that gain least for their time, and
    for graphs that draft for a part of a half.
    """
    found = plain_batch(sizes)
    if not _may_gain(sizes, found):
        return found
    while True:
        price = found.tokens / found.us
        ways = (_within(way, limit_us) for way in _ways(sizes, price))
        better = max(filter(None, ways), key=lambda way: way.tokens - price * way.us, default=found)
        if better.tokens <= price * better.us * _LARGER:
            return found
        found = better


def _may_gain(sizes: Sizes, plain: Way) -> bool:
    """Whether anything could be better than a plain batch if graphs cost nothing: a look that takes no time, and what
    choices of texts that are drafted badly end with."""
    price, worth = plain.tokens / plain.us, 0.0
    for text in range(max(sizes)):
        worth += max(
            one.tokens - price * (one.us - one.fixed_us / size)
            for size, ceilings in sizes.items()
            for options in ceilings
            for one in options[text]
        )
    return worth > plain.tokens * (_LARGER - 1)


def _ways(sizes: Sizes, price: float) -> Iterator[Way]:
    """The best way at a price for each ceiling of one launch of all texts, and each pair of two of halves."""
    texts = max(sizes)
    yield from (Way.of([_launch(options, price)]) for options in sizes[texts])
    picks = {
        size: [[_pick(*own, price, size) for own in enumerate(options)] for options in sizes[size]]
        for size in sizes
        if size < texts
    }
    for first in (size for size in picks if texts - size in picks and 2 * size >= texts):
        for one in picks[first]:
            for other in picks[texts - first]:
                # Those that are worth most more in the second launch go there.
                order = sorted(range(texts), key=lambda text: other[text][0] - one[text][0])
                halves = sorted(order[:first]), sorted(order[first:])
                yield Way.of([[own[text][1] for text in half] for own, half in zip((one, other), halves, strict=True)])


def _launch(options: Options, price: float) -> list[Taken]:
    """The best launch of all texts at a price, over the graphs that it may draft with."""
    found = [_worths(own, price, len(options)) for own in options]
    fixed_us = dict[str | None, float]()
    for one in (option for own in options for option in own if option.fixed_us):
        fixed_us[one.graph] = max(one.fixed_us, fixed_us.get(one.graph, 0.0))
    picks, most = list[Worth](), -inf
    for graphs in _sets(fixed_us):
        left_out = fixed_us.keys() - graphs
        # A text whose policy leaves it no choice drafts as it must.
        fits = [max([pick for graph, pick in own.items() if graph not in left_out] or own.values()) for own in found]
        worth = sum(pick.tokens for pick in fits) - price * sum(fixed_us[graph] for graph in graphs)
        if worth > most:
            picks, most = fits, worth
    return [Taken(text, pick.option, own[0]) for text, (pick, own) in enumerate(zip(picks, options, strict=True))]


def _sets(graphs: Collection[str | None]) -> Iterator[tuple[str | None, ...]]:
    """Those that a launch may draft with: any of a few; of more than `FEW_GRAPHS`, none, one or all."""
    sizes = range(len(graphs) + 1) if len(graphs) <= FEW_GRAPHS else (0, 1, len(graphs))
    for size in sizes:
        yield from combinations(graphs, size)


def _worths(own: Sequence[Option], price: float, texts: int) -> dict[str | None, Worth]:
    """By graph the option that is worth most to a text at a price, where the graph is paid for."""
    found = dict[str | None, Worth]()
    for at, option in enumerate(own):
        worth = Worth(option.tokens - price * (option.us - option.fixed_us / texts), -at, option)
        if option.graph not in found or worth > found[option.graph]:
            found[option.graph] = worth
    return found


def _pick(text: int, own: Sequence[Option], price: float, texts: int) -> tuple[float, Taken]:
    """What a text is worth in a launch at a price, whose graphs are paid for, and by which option."""
    best = max(_worths(own, price, texts).values())
    return best.tokens, Taken(text, best.option, own[0])


def _within(way: Way, limit_us: float) -> Way | None:
    """The way, as far as it takes no more time than it may."""
    if way.most_us <= limit_us:
        return way
    drafts = [one for launch in way.launches for one in launch if one.option.most_us > one.plain.most_us]
    for given_up in sorted(drafts, key=_gain):
        text = given_up.text
        way = Way.of([[one._replace(option=one.plain) if one.text == text else one for one in o] for o in way.launches])
        if way.most_us <= limit_us:
            return way
    return None


def _gain(one: Taken) -> float:
    """Tokens that a draft is expected to gain for its time, beyond a plain step."""
    return (one.option.tokens - one.plain.tokens) / (one.option.most_us - one.plain.most_us)
