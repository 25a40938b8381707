"""Which texts of a step share a launch, and with which gear: the most expected tokens of all texts a microsecond.

At a price of a microsecond, in tokens, a launch is worth what its texts are expected to gain less what its time costs.
All ways to launch are looked at: all texts together or two halves; where rows are padded, with every ceiling on them.
The price at which the best way is worth nothing is the highest ratio of tokens to time that there is (Dinkelbach, On
nonlinear fractional programming, 1967). Plain batches are one of the ways, so nothing is chosen that promises less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# A ratio that is larger by less is rounding.
_LARGER = 1 + 1e-9


class Option(NamedTuple):
    """A gear, by number, that a text may take in a launch, and the tokens that it is expected to gain there.

    ``us`` is the text's part of the launch's time as it is weighed, ``most_us`` as it will be: a draft that has to
    catch up pays for it once, and is weighed as if that were spread. ``cost`` is the gear whose time that is: the
    text's own, or the ceiling that its rows are padded to.
    """

    gear: int
    tokens: float
    us: float
    most_us: float
    cost: int


# Of every text, in a launch of some size: the first is what a plain batch takes.
Options = Sequence[Sequence[Option]]
# By the number of texts of a launch: those of every ceiling on rows, the lowest first; one where nothing is padded.
Sizes = Mapping[int, Sequence[Options]]


class Taken(NamedTuple):
    """What a text takes in a launch, and the plain option in its place."""

    text: int
    option: Option
    plain: Option


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
        return cls(tuple(map(tuple, launches)), tokens, us, most_us)


def plain_batch(sizes: Sizes) -> Way:
    """One launch of all texts, none of which drafts."""
    return Way.of([[Taken(text, own[0], own[0]) for text, own in enumerate(sizes[max(sizes)][0])]])


def best(sizes: Sizes, limit_us: float) -> Way:
    """The highest rate within a time that all launches together may take; the plain batch where nothing else is.

    Exact but for the limit: what lies above it gives up those drafts first that gain least for their time.
    """
    found = plain_batch(sizes)
    while True:
        price = found.tokens / found.us
        ways = (_within(way, limit_us) for way in _ways(sizes, price))
        better = max(filter(None, ways), key=lambda way: way.tokens - price * way.us, default=found)
        if better.tokens <= price * better.us * _LARGER:
            return found
        found = better


def _ways(sizes: Sizes, price: float) -> Iterator[Way]:
    """The best way at a price for each ceiling of one launch of all texts, and each pair of two of halves."""
    texts = max(sizes)
    picks = {size: [[_pick(*own, price) for own in enumerate(options)] for options in sizes[size]] for size in sizes}
    yield from (Way.of([[taken for _, taken in one]]) for one in picks[texts])
    for first in (size for size in sizes if texts - size in sizes and 2 * size >= texts):
        for one in picks[first]:
            for other in picks[texts - first]:
                # Those that are worth most more in the second launch go there.
                order = sorted(range(texts), key=lambda text: other[text][0] - one[text][0])
                halves = sorted(order[:first]), sorted(order[first:])
                yield Way.of([[own[text][1] for text in half] for own, half in zip((one, other), halves, strict=True)])


def _pick(text: int, own: Sequence[Option], price: float) -> tuple[float, Taken]:
    """What a text is worth in a launch at a price, and by which option."""
    option = max(own, key=lambda option: option.tokens - price * option.us)
    return option.tokens - price * option.us, Taken(text, option, own[0])


def _within(way: Way, limit_us: float) -> Way | None:
    """The way, as far as it takes no more time than it may."""
    if way.most_us <= limit_us:
        return way
    over_us, given_up = way.most_us - limit_us, set[int]()
    drafts = [one for launch in way.launches for one in launch if one.option.most_us > one.plain.most_us]
    for one in sorted(drafts, key=_gain):
        if over_us > 0:
            over_us -= one.option.most_us - one.plain.most_us
            given_up.add(one.text)
    if over_us > 0:
        return None
    launches = [[one._replace(option=one.plain) if one.text in given_up else one for one in o] for o in way.launches]
    return Way.of(launches)


def _gain(one: Taken) -> float:
    """Tokens that a draft is expected to gain for its time, beyond a plain step."""
    return (one.option.tokens - one.plain.tokens) / (one.option.most_us - one.plain.most_us)
