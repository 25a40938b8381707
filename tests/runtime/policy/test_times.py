"""Step times: the table's line, its correction, hiccups and a machine that gets busy."""

import numpy as np
import pytest

from draftwood.planned import StepTime
from draftwood.runtime.policy.times import AGED, StepTimes, time_table

NAMES, ROWS = ["plain", "tree"], [1, 8]


def table(plain: float = 1000.0, tree: float = 1500.0) -> StepTimes:
    times = [
        StepTime(gear=n, length=at, us=us + at) for n, us in zip(NAMES, (plain, tree), strict=True) for at in (0, 400)
    ]
    return StepTimes(time_table(NAMES, ROWS, times))


def test_a_table_is_a_line_through_what_was_timed() -> None:
    assert [round(table().us(1, length)) for length in (0, 200, 1000)] == [1500, 1700, 2500]


def test_a_gear_that_was_not_timed_makes_all_of_it_guesses() -> None:
    times = StepTimes(time_table(NAMES, ROWS, [StepTime(gear="plain", length=0, us=1000.0)]))
    assert not times.table.absolute and times.us(0, 50) == 1.0 < times.us(1, 50)


def test_without_a_table_the_first_steps_are_the_table() -> None:
    times = StepTimes(time_table(NAMES, ROWS, []))
    for us in (40_000.0, 1000.0, 1010.0, 990.0):  # the first step opened a graph
        times.observe(0, 100, us)
    for us in (70_000.0, 1500.0, 1510.0, 1490.0):
        times.observe(1, 100, us)
    assert times.us(0, 100) == pytest.approx(1000, rel=0.02) and times.us(1, 100) == pytest.approx(1500, rel=0.02)


def test_a_first_step_that_opened_a_graph_does_not_spoil_the_table() -> None:
    times = table()
    times.observe(1, 0, 90_000.0)
    assert times.us(1, 0) == 1500.0


def test_a_table_of_another_machine_is_mended_gear_by_gear() -> None:
    times, random = table(), np.random.default_rng(0)
    for _ in range(30):
        times.observe(0, 100, 1100 * 1.3 * random.normal(1, 0.02))
        times.observe(1, 100, 1600 * 0.8 * random.normal(1, 0.02))
    assert times.us(0, 100) == pytest.approx(1430, rel=0.03) and times.us(1, 100) == pytest.approx(1280, rel=0.03)


def test_a_hiccup_changes_nothing_and_a_busy_machine_everything() -> None:
    times = table()
    for _ in range(20):
        times.observe(1, 0, 1500.0)
    times.observe(1, 0, 9000.0)
    assert times.us(1, 0) == pytest.approx(1500.0)
    times.observe(1, 0, 1500.0)
    for _ in range(20):
        times.observe(1, 0, 3000.0)
    # Noticed on one gear and true of both.
    assert times.us(1, 0) == pytest.approx(3000.0, rel=0.03) and times.us(0, 0) == pytest.approx(2000.0, rel=0.15)


def test_a_slow_drift_is_followed() -> None:
    times = table()
    for step in range(300):
        times.observe(0, 0, 1000.0 * (1 + step / 300))
    assert times.us(0, 0) == pytest.approx(2000.0, rel=0.05)
    assert times.us(1, 0) == pytest.approx(3000.0, rel=0.2)


def test_catching_up_is_learned_by_the_token() -> None:
    times = table()
    for _ in range(10):
        times.caught_up(50, 500.0)
    assert times.catch_up_us(20) == pytest.approx(200.0, rel=0.05)


def test_a_slow_launch_with_a_few_late_tokens_does_not_make_all_of_them_dear() -> None:
    timed = [StepTime(gear=gear, length=100, us=us) for gear, us in (("plain", 1000.0), ("tree", 1500.0))]
    late = StepTime(gear="tree", length=100, us=1500.0 + 640.0, late=64)
    for found in (time_table(["plain", "tree"], [1, 4], [*timed, late]), time_table(["plain", "tree"], [1, 4], timed)):
        times = StepTimes(found)
        times.caught_up(2, 1000.0)
        assert times.catch_up_us(100) <= 4000.0, "half of it would be 25 000"


def test_a_launch_that_was_quick_does_not_make_late_tokens_a_gain() -> None:
    times = table()
    for _ in range(10):
        times.caught_up(50, -500.0)
    assert times.catch_up_us(50) == 0


def test_a_table_tells_what_a_late_token_takes() -> None:
    times = [
        StepTime(gear=gear, length=n, us=us + n) for gear, us in (("plain", 1000.0), ("tree", 1500.0)) for n in (0, 200)
    ]
    late = StepTime(gear="tree", length=100, us=1600.0 + 640.0, late=64)
    found = time_table(["plain", "tree"], [1, 4], [*times, late])
    assert found.late == pytest.approx(10.0) and found.us(1, 100) == pytest.approx(1600.0)
    assert StepTimes(found).catch_up_us(5) == pytest.approx(50.0)


def test_a_gear_ages_by_the_steps_of_others_and_is_then_believed_anew() -> None:
    times = table()
    for _ in range(3):
        assert times.aged(0)
        times.observe(0, 0, 1000.0)
    for _ in range(AGED - 3):
        times.observe(1, 0, 1500.0)
    assert not times.aged(0)
    times.observe(1, 0, 1500.0)
    assert times.aged(0) and not times.aged(1)
    for _ in range(3):
        times.observe(0, 0, 700.0)
    assert times.us(0, 0) == pytest.approx(700.0) and times.us(1, 0) == pytest.approx(1500.0)
