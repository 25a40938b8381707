"""Serving several texts: coverings, choices and whole plans against every other one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees.choice import choose
from draftwood.trees.latency import LatencyEntry, LatencyTable
from draftwood.trees.occupancy import Occupancy, OccupancyCost
from draftwood.trees.plan import make_plan, spread
from draftwood.trees.plan_file import Limits

from .samples import FIXED, calibrated

SIZES = (1, 2, 4)


def coverings(texts):
    """Every multiset of launches without a superfluous one."""
    for count in range(1, texts + 1):
        for launches in itertools.combinations_with_replacement(range(len(SIZES)), count):
            if sum(SIZES[b] for b in launches) >= texts:
                yield launches


def brute_force(occupancy, shares_L, us_LB):
    return sum(
        share * own * min(sum(us_B[b] for b in launches) for launches in coverings(texts)) / texts
        for texts, share in occupancy.shares.items()
        for own, us_B in zip(shares_L, us_LB, strict=True)
    )


CELL = st.integers(1, 30).map(float)


@st.composite
def services(draw):
    found = draw(st.dictionaries(st.integers(1, 6), st.integers(1, 5), min_size=1, max_size=4))
    shares = np.array(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), float)
    occupancy = Occupancy({n: count / sum(found.values()) for n, count in found.items()})
    return OccupancyCost(occupancy, shares / shares.sum(), SIZES)


@FIXED
@given(services(), st.data())
def test_the_cheapest_covering_is_found(service, data):
    count = len(service.shares_L) * len(SIZES)
    us_C = np.array(data.draw(st.lists(CELL, min_size=count, max_size=count)))
    us_LB = us_C.reshape(-1, len(SIZES))
    assert service.cost(us_C) == pytest.approx(brute_force(service.occupancy, service.shares_L, us_LB), rel=1e-12)
    for texts in service.occupancy.shares:
        taken = service.launches(texts, us_LB[0])
        assert sum(SIZES[b] for b in taken) >= texts
        assert sum(us_LB[0][b] for b in taken) == pytest.approx(float(service.of(texts, us_C)[0]) * texts, rel=1e-12)


@FIXED
@given(services(), st.data())
def test_the_set_of_gears_is_the_best_of_all_sets_and_a_stopped_search_proves_its_bound(service, data):
    length, others = len(service.shares_L), data.draw(st.integers(0, 6))
    texts = [*SIZES, *(data.draw(st.sampled_from(SIZES)) for _ in range(others))]
    us_GL = np.array([data.draw(st.lists(CELL, min_size=length, max_size=length)) for _ in texts])
    times_GC, most = spread(us_GL, texts, SIZES), data.draw(st.integers(1, 4))
    best = min(
        service.cost(times_GC[[*range(len(SIZES)), *added]].min(0))
        for count in range(min(most, others + 1))
        for added in itertools.combinations(range(len(SIZES), len(texts)), count)
    )
    rule = {"always": len(SIZES), "cost": service.cost}
    found = choose(times_GC, service.weights_C(), most, **rule)
    assert found.exact and found.time == pytest.approx(best, rel=1e-12)
    assert set(range(len(SIZES))) <= set(found.gears) and len(found.gears) <= len(SIZES) + most - 1
    stopped = choose(times_GC, service.weights_C(), most, most_sets=data.draw(st.integers(0, 3)), **rule)
    assert stopped.bound <= best * (1 + 1e-12) and best <= stopped.time * (1 + 1e-12)


def costs(rate):
    """A device on which a launch takes 10 s and ``rate`` for every row beyond the eighth of all texts together."""
    entries = [
        LatencyEntry(kind="verify", rows=rows, slots=256, seconds=s, parts={"all": s}, texts=texts)
        for texts in SIZES
        for rows in (1, 2, 3, 4, 8)
        for s in [10.0 + rate * max(texts * rows - 8, 0)]
    ]
    return LatencyTable(source="modelled", entries=tuple(entries))


COUNTS = calibrated({(0, 0, 0): 5, (0, 1): 3, (1, 0): 3, (1,): 2, (2,): 2, (): 2})


@pytest.mark.parametrize("rate", [0.0, 0.5, 2.0, 20.0])
def test_more_texts_take_smaller_trees_and_no_rival_does_better(rate):
    plan = make_plan(COUNTS, Limits(nodes=7, gears=9), costs(rate), occupancy=Occupancy.even(4))
    rows = {gear.name: next(t.topology.rows for t in plan.trees if t.name == gear.tree) for gear in plan.gears}
    by_texts = {one.texts: max(rows[name] for name in one.gears) for one in plan.cost.served}
    assert by_texts[1] >= by_texts[2] >= by_texts[4] and plan.cost.exact
    assert rate or by_texts[4] == by_texts[1]
    for one in plan.cost.rivals:
        others = (one.plain_us_per_token, one.chains_us_per_token, one.single_us_per_token)
        assert one.us_per_token <= min(others) * (1 + 1e-12)
    assert plan.cost.us_per_token == pytest.approx(sum(r.share * r.us_per_token for r in plan.cost.rivals), rel=1e-12)


def test_two_launches_of_half_the_texts_are_taken_where_they_are_faster():
    entries = tuple(
        LatencyEntry(kind="verify", rows=1, slots=256, seconds=s, parts={"all": s}, texts=texts)
        for texts, s in ((1, 10.0), (2, 11.0), (4, 25.0))
    )
    plan = make_plan(
        COUNTS, Limits(nodes=3), LatencyTable(source="modelled", entries=entries), occupancy=Occupancy({4: 1})
    )
    (served,) = plan.cost.served
    assert served.gears == ("plain-kv256", "plain-kv256") and served.us_per_token == pytest.approx(22e6 / 4)


def test_a_table_of_one_number_of_texts_is_planned_for() -> None:
    entries = tuple(entry for entry in costs(2.0).entries if entry.texts == 4)
    plan = make_plan(COUNTS, Limits(nodes=7), LatencyTable(source="modelled", entries=entries))
    assert all(gear.texts == (4,) for gear in plan.gears) and plan.cost.exact
    assert all(one.us_per_token <= one.single_us_per_token for one in plan.cost.rivals)


def test_gears_say_their_texts_and_what_every_number_of_texts_takes():
    plan = make_plan(COUNTS, Limits(nodes=7, gears=9), costs(2.0), occupancy=Occupancy.even(4))
    plain, *drafting = plan.gears
    assert plain.texts == SIZES and all(set(gear.texts) <= set(SIZES) for gear in drafting)
    assert {time.texts for time in plan.planning.times if time.gear == plain.name} == set(SIZES)


def test_occupancies_are_read():
    assert Occupancy.parse("2,1", 4).shares == {1: 0.5, 2: 0.5}
    assert Occupancy.parse("1=3,4=1", 4).shares == {1: 0.75, 4: 0.25}
    for text in ("", "0", "5", "1,1", "1=0", "1=-1", "1=nan", "1=inf", "x", "1=", "2;3"):
        with pytest.raises(TreeError, match=r"^--occupancy .*from 1 to 4"):
            Occupancy.parse(text, 4)
