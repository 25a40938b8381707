"""Step times: the table's line, its correction, hiccups and a machine that gets busy."""

import numpy as np
import pytest

from draftwood.planned import StepTime
from draftwood.runtime.policy.times import AGED, StepTimes
from draftwood.trees import Topology

from .samples import gears_of

ROWS = {"plain": 1, "tree": 8}


def table(plain: float = 1000.0, tree: float = 1500.0) -> StepTimes:
    times = [
        StepTime(gear=n, length=at, us=us + at) for n, us in zip(ROWS, (plain, tree), strict=True) for at in (0, 400)
    ]
    return StepTimes(ROWS, times)


def test_a_table_is_a_line_through_what_was_timed() -> None:
    assert [round(table().us("tree", length)) for length in (0, 200, 1000)] == [1500, 1700, 2500]


def test_a_gear_that_was_not_timed_makes_all_of_it_guesses() -> None:
    times = StepTimes(ROWS, [StepTime(gear="plain", length=0, us=1000.0)])
    assert not times.absolute and times.us("plain", 50) == 1.0 < times.us("tree", 50)


def test_a_gear_next_to_a_plans_is_guessed_from_them_and_their_times_hold() -> None:
    """As one that is looked up, which no plan times."""
    trees = {"planned": Topology.chain(7), "short": Topology.chain(1), "long": Topology.chain(15)}
    gears = gears_of(trees, {"plain": 1000.0, "planned": 1100.0})
    times = StepTimes(gears.rows, gears.times)
    us = {name: times.us(name, 100) for name in gears.rows}
    assert us == pytest.approx({"plain": 1000, "planned": 1100, "short": 1100, "long": 1960})
    assert times.absolute and gears.timed == {"plain", "planned"} and not gears_of(trees).times


def test_without_a_table_the_first_steps_are_the_table() -> None:
    times = StepTimes(ROWS, [])
    for us in (40_000.0, 1000.0, 1010.0, 990.0):  # the first step opened a graph
        times.observe("plain", 100, us)
    for us in (70_000.0, 1500.0, 1510.0, 1490.0):
        times.observe("tree", 100, us)
    assert times.us("plain", 100) == pytest.approx(1000, rel=0.02)
    assert times.us("tree", 100) == pytest.approx(1500, rel=0.02)


def test_a_first_step_that_opened_a_graph_does_not_spoil_the_table() -> None:
    times = table()
    times.observe("tree", 0, 90_000.0)
    assert times.us("tree", 0) == 1500.0


def test_a_table_of_another_machine_is_mended_gear_by_gear() -> None:
    times, random = table(), np.random.default_rng(0)
    for _ in range(30):
        times.observe("plain", 100, 1100 * 1.3 * random.normal(1, 0.02))
        times.observe("tree", 100, 1600 * 0.8 * random.normal(1, 0.02))
    assert times.us("plain", 100) == pytest.approx(1430, rel=0.03)
    assert times.us("tree", 100) == pytest.approx(1280, rel=0.03)


def test_a_hiccup_changes_nothing_and_a_busy_machine_everything() -> None:
    times = table()
    for _ in range(20):
        times.observe("tree", 0, 1500.0)
    times.observe("tree", 0, 9000.0)
    assert times.us("tree", 0) == pytest.approx(1500.0)
    times.observe("tree", 0, 1500.0)
    for _ in range(20):
        times.observe("tree", 0, 3000.0)
    # Noticed on one gear and true of both.
    assert times.us("tree", 0) == pytest.approx(3000.0, rel=0.03)
    assert times.us("plain", 0) == pytest.approx(2000.0, rel=0.15)


def test_a_slow_drift_is_followed() -> None:
    times = table()
    for step in range(300):
        times.observe("plain", 0, 1000.0 * (1 + step / 300))
    assert times.us("plain", 0) == pytest.approx(2000.0, rel=0.05)
    assert times.us("tree", 0) == pytest.approx(3000.0, rel=0.2)


def test_a_table_tells_what_a_late_token_takes() -> None:
    times = [
        StepTime(gear=gear, length=n, us=us + n) for gear, us in (("plain", 1000.0), ("tree", 1500.0)) for n in (0, 200)
    ]
    late = StepTime(gear="tree", length=100, us=1600.0 + 640.0, late=64)
    found = StepTimes({"plain": 1, "tree": 4}, [*times, late])
    assert found.late_us(1) == pytest.approx(10.0) and found.us("tree", 100) == pytest.approx(1600.0)
    assert found.late_us(5) == pytest.approx(50.0)


def test_a_late_step_that_was_quick_does_not_make_late_tokens_a_gain() -> None:
    times = [StepTime(gear=gear, length=0, us=us) for gear, us in (("plain", 1000.0), ("tree", 1500.0))]
    found = StepTimes(ROWS, [*times, StepTime(gear="tree", length=0, us=1400.0, late=50)])
    assert found.late_us(1) == 0


def test_late_tokens_that_nobody_has_timed_have_a_price() -> None:
    times = table()
    assert 0 < times.late_us(50) < times.us("plain", 0)


def test_a_gear_ages_by_the_steps_of_others_and_is_then_believed_anew() -> None:
    times = table()
    for _ in range(3):
        assert times.aged("plain")
        times.observe("plain", 0, 1000.0)
    for _ in range(AGED - 3):
        times.observe("tree", 0, 1500.0)
    assert not times.aged("plain")
    times.observe("tree", 0, 1500.0)
    assert times.aged("plain") and not times.aged("tree")
    for _ in range(3):
        times.observe("plain", 0, 700.0)
    assert times.us("plain", 0) == pytest.approx(700.0) and times.us("tree", 0) == pytest.approx(1500.0)
