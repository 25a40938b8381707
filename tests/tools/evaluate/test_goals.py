"""The goal table: its figures from rows, worked out by hand, and the suite that measures them."""

import json
from pathlib import Path

import pytest

from draftwood.tools.evaluate import goal_figures, goals
from draftwood.tools.evaluate.run import tasks_of

TEXTS = [(10, 3), (6, 4)]


def coupled_row(number: int, tokens: int, steps: int) -> dict:
    one = {"tokens": tokens, "steps": steps, "equal": True}
    at = {"size": "native", "temperature": 0.0, "prompt": number}
    ways = {"plain": one, "eagle3 coupled": one, "fasteagle coupled": {**one, "steps": steps + 1}}
    return {"section": "coupled", "key": f"c{number}", "at": at, "found": {"ways": ways}}


def steps_row(drafter: str, ms: float) -> dict:
    gears = [{"tree": "chain-5", "draft_ms": ms}, {"tree": "star-15", "draft_ms": 9.0}]
    return {"section": "steps", "key": drafter, "at": {"size": "500m", "drafter": drafter}, "found": {"gears": gears}}


def turns_row(number: int, eagle3: float, fasteagle: float) -> dict:
    seconds = {"plain eagle3": 9.0, "plain fasteagle": 9.0, "eagle3 adaptive": eagle3, "fasteagle adaptive": fasteagle}
    ways = {way: {"seconds": [one, 7 * one, one], "equal": number == 1} for way, one in seconds.items()}
    at = {"size": "110m", "temperature": 0.8, "conversation": str(number)}
    return {"section": "turns", "key": f"t{number}", "at": at, "found": {"turns": [{"ways": ways}, {"ways": ways}]}}


def bits_row(number: int, equal: int) -> dict:
    count = {"rows": 10, "equal_one": equal, "equal_two": 0, "apart": 0.0}
    bits = {"bitwise": dict.fromkeys(("root", "principal", "other", "prompt"), count)}
    at = {"size": "110m", "drafter": "demo-medusa", "temperature": 0.8, "prompt": number}
    return {"section": "bitwise", "key": f"b{number}", "at": at, "found": {"bits": bits}}


LAUNCHES_ROW = {
    "section": "launches",
    "key": "l",
    "at": {"size": "native", "drafter": "demo-eagle3"},
    "found": {"steps": [{"launches": 1, "read_bytes": 400}, {"launches": 1, "read_bytes": 5000}]},
}
ROWS = [
    *(coupled_row(number, *text) for number, text in enumerate(TEXTS)),
    steps_row("demo-eagle3", 8.0),
    steps_row("demo-fasteagle", 2.0),
    turns_row(1, 3.0, 4.0),
    turns_row(2, 6.0, 5.0),
    bits_row(1, 10),
    bits_row(2, 5),
    LAUNCHES_ROW,
]


def test_figures_are_those_of_all_texts() -> None:
    lines = list(goal_figures.lines_of(ROWS))
    by = {(line.what, line.drafter): line for line in lines if line.size != "native" or "texts" not in line.what}
    tokens, others = by[goal_figures.TOKENS, "eagle3"], by[goal_figures.TOKENS, "fasteagle"]
    assert (tokens.value, tokens.goal, others.value, others.goal, others.met) == (
        2.0,
        None,
        round(14 / 9, 4),
        5.0,
        False,
    )
    draft, speed = by[goal_figures.DRAFT, "fasteagle"], by[goal_figures.SPEED, "fasteagle"]
    assert (draft.value, draft.low, draft.met) == (0.25, None, True)
    assert (speed.value, speed.size, speed.temperature, speed.count) == (1.0, "110m", 0.8, 2)
    assert speed.met and speed.low == 0.75 and speed.high == 1.2


def test_speed_over_plain_is_with_the_same_bundle_and_the_best_is_named() -> None:
    """Both turns of both conversations took 9 s plainly."""
    by = {(line.what, line.drafter): line for line in goal_figures.lines_of(ROWS)}
    for drafter in ("eagle3", "fasteagle"):
        assert by[goal_figures.OVER_PLAIN, drafter].value == 2.0 and by[goal_figures.OVER_PLAIN, drafter].goal is None
    best = by[goal_figures.BEST, "eagle3"]
    assert (best.value, best.goal, best.met) == (2.0, 1.5, True)


def test_a_drafter_in_int8_is_held_against_others_in_int8_and_its_own_in_fp32() -> None:
    seconds = {"plain eagle3": 9.0, "eagle3": 4.0, "eagle3-w8a8": 3.0, "fasteagle-w8a8": 2.0}
    ways = {
        name if " " in name else f"{name} adaptive": {"seconds": [one], "equal": True} for name, one in seconds.items()
    }
    ways |= {f"plain {name}": ways["plain eagle3"] for name in ("eagle3-w8a8", "fasteagle-w8a8")}
    at = {"size": "110m", "temperature": 0.0, "conversation": "1"}
    lines = list(
        goal_figures.lines_of([{"section": "turns", "key": "t", "at": at, "found": {"turns": [{"ways": ways}]}}])
    )
    by = {(line.what, line.drafter): line for line in lines}
    assert {place for place in by if place[0] == goal_figures.SPEED} == {(goal_figures.SPEED, "fasteagle-w8a8")}
    speed, fp32 = by[goal_figures.SPEED, "fasteagle-w8a8"], by[goal_figures.OVER_FP32, "eagle3-w8a8"]
    assert (speed.value, speed.goal, fp32.value, fp32.goal) == (1.5, 1.1, 1.3333, None)


def test_exactness_and_traffic_have_goals_for_every_drafter() -> None:
    lines = list(goal_figures.lines_of(ROWS))
    texts = {(line.size, line.drafter): line for line in lines if line.what == goal_figures.TEXTS}
    assert texts["native", "eagle3"].met and texts["110m", "eagle3"].value == 0.5 and not texts["110m", "eagle3"].met
    (bits,) = (line for line in lines if line.what == goal_figures.BITS)
    assert (bits.value, bits.count, bits.met) == (0.75, 80, False)
    launches, read = (line for line in lines if line.what in (goal_figures.LAUNCHES, goal_figures.READ))
    assert (launches.value, launches.met, read.value, read.met) == (1.0, True, 5000.0, False)


def test_sizes_are_those_of_what_is_timed() -> None:
    suite = goals.asked_suite("500m", ["mine.jsonl"])
    assert suite.sections["coupled"].sizes == suite.sections["launches"].sizes == ("native",)
    assert suite.prompts == (str(Path("mine.jsonl").resolve()),)
    assert {suite.sections[name].sizes for name in goals.TIMED} == {("500m",)}
    few = goals.asked_suite("native,110m", [], limit=2).sections
    assert {ask.limit_of(size) for ask in few.values() for size in ask.sizes} == {2}
    own = {task.section for task in tasks_of(goals.asked_suite(None, []))}
    assert own >= {"coupled", "steps", "turns", "bitwise"}


def test_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Run:
        rows = ROWS

    monkeypatch.setattr(goals, "evaluate", lambda *_: Run)
    asked = ["--out", str(tmp_path), "--work", str(tmp_path)]
    assert goals.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["met"] for one in found if one["goal"] is not None].count(False) == 5
    assert goals.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(found)
    assert lines[2].endswith("5: missed") and lines[3].endswith("0.3: met")
    assert goals.main([*asked, "--sizes", "7b"]) == 2 and "'7b' is none of" in capsys.readouterr().err
    assert goals.main([*asked, "--limit", "0"]) == 2 and "--limit 0: expected 1 or more" in capsys.readouterr().err
