"""The search against all ways to launch, one by one."""

from collections.abc import Iterator
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.policy.launches import Option, Options, Sizes, Way, best, plain_batch

GEARS = 3
number = st.floats(0.1, 10.0)


@st.composite
def sizes(draw: st.DrawFn, padded: bool) -> Sizes:
    """One to four texts, of two gears and plain decoding; a launch of a half takes any time of its own. Where no rows
    are padded, a launch of all pays for the graph of each gear, for however few of its texts."""
    texts = draw(st.integers(1, 4))
    tokens = [[1.0, *(draw(st.floats(1.0, 5.0)) for _ in range(GEARS - 1))] for _ in range(texts)]
    late = [draw(st.sampled_from([0.0, 2.0])) for _ in range(texts)]
    found = {}
    for size in {texts, *([texts // 2, texts - texts // 2] if texts > 1 and draw(st.booleans()) else [])}:
        us = [draw(number) for _ in range(GEARS)]
        fixed = [0.0, *(draw(st.sampled_from([0.0, 0.5, 3.0])) for _ in range(GEARS - 1))]
        if padded or size < texts:
            fixed = [0.0] * GEARS

        def option(text: int, gear: int, cost: int, own: tuple = (size, us, fixed)) -> Option:  # type: ignore[type-arg]
            size, us, fixed = own
            part, own_late = us[cost] / size, late[text] if gear else 0.0
            graph = f"draft-{gear}" if gear else None
            return Option(gear, tokens[text][gear], part + own_late / 8, part + own_late, cost, graph, fixed[gear])

        if padded:
            found[size] = [[[option(t, g, c) for g in range(c + 1)] for t in range(texts)] for c in range(GEARS)]
        else:
            found[size] = [[[option(t, g, g) for g in range(GEARS)] for t in range(texts)]]
    return found


def every_way(sizes: Sizes) -> Iterator[list[Option]]:
    """The options of all texts, of every partition, ceiling and choice; the first of a launch pays for its graphs."""
    texts = max(sizes)
    for options in sizes[texts]:
        yield from (whole(list(chosen)) for chosen in product(*options))
    for first in (size for size in sizes if texts - size in sizes):
        for chosen in combinations(range(texts), first):
            for one, other in product(sizes[first], sizes[texts - first]):
                yield from map(list, product(*((one if text in chosen else other)[text] for text in range(texts))))


def whole(chosen: list[Option]) -> list[Option]:
    """A launch of all texts: of every graph, what the texts that it does not draft for leave unpaid."""
    graphs = [one.graph for one in chosen]
    fixed = {one.graph: one.fixed_us for one in chosen}
    unpaid = sum(us * (1 - graphs.count(graph) / len(graphs)) for graph, us in fixed.items())
    return [chosen[0]._replace(us=chosen[0].us + unpaid), *chosen[1:]]


def rate(options: list[Option]) -> float:
    return sum(one.tokens for one in options) / sum(one.us for one in options)


@pytest.mark.parametrize("padded", [False, True])
@given(data=st.data())
def test_the_rate_is_the_best_there_is(data: st.DataObject, padded: bool) -> None:
    given_sizes = data.draw(sizes(padded))
    found = best(given_sizes, float("inf"))
    assert sorted(one.text for launch in found.launches for one in launch) == list(range(max(given_sizes)))
    assert found.tokens / found.us == pytest.approx(max(map(rate, every_way(given_sizes))))


@pytest.mark.parametrize("padded", [False, True])
@given(data=st.data(), more=st.floats(0.0, 5.0))
def test_no_way_takes_more_than_it_may_nor_promises_less_than_a_plain_batch(
    data: st.DataObject, padded: bool, more: float
) -> None:
    given_sizes = data.draw(sizes(padded))
    plain = plain_batch(given_sizes)
    found = best(given_sizes, plain.most_us + more)
    assert found.most_us <= plain.most_us + more and found.tokens / found.us >= plain.tokens / plain.us * (1 - 1e-9)
    assert Way.of(found.launches) == found


def options_of(*tokens: float, us: tuple[float, ...] = (4.0, 6.0)) -> Options:
    """Of texts that gain so many tokens by the one tree, in a launch of all of them."""
    parts = [t / len(tokens) for t in us]
    return [[Option(g, gained if g else 1.0, t, t, g) for g, t in enumerate(parts)] for gained in tokens]


def gears(way: Way) -> list[int]:
    return [one.option.gear for one in sorted(one for launch in way.launches for one in launch)]


def test_texts_that_draft_well_share_a_launch_with_those_that_do_not() -> None:
    assert gears(best({4: [options_of(3.0, 1.1, 2.5, 1.0)]}, 99.0)) == [1, 0, 1, 0]


def test_the_limit_leaves_the_drafts_that_gain_most() -> None:
    """A tree of one text takes half a microsecond more than its plain step."""
    way = best({4: [options_of(3.0, 2.0, 2.5, 1.9)]}, 5.1)
    assert gears(way) == [1, 0, 1, 0] and way.most_us == 5.0
    assert gears(best({4: [options_of(3.0, 2.0, 2.5, 1.9)]}, 4.4)) == [0, 0, 0, 0]


def test_where_rows_are_padded_those_that_draft_go_apart() -> None:
    """All rows of four texts are dear, those of two are not."""
    own = [4.0, 1.0, 1.0, 4.0]

    def under(us: tuple[float, float], size: int) -> list[Options]:
        padded = [(us[0], us[0]), (us[1], us[1])]
        return [
            [[Option(g, gained if g else 1.0, t[g] / size, t[g] / size, c) for g in range(c + 1)] for gained in own]
            for c, t in enumerate(padded)
        ]

    way = best({4: under((4.0, 9.0), 4), 2: under((2.4, 3.0), 2)}, 99.0)
    assert sorted(tuple(one.text for one in launch) for launch in way.launches) == [(0, 3), (1, 2)]
    assert gears(way) == [1, 0, 0, 1]
