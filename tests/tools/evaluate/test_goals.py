"""The goal table: its figures from rows, worked out by hand, and the suite that measures them."""

import json
from pathlib import Path

import pytest

from draftwood.tools.evaluate import goals
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
    seconds = {"plain eagle3": 9.0, "eagle3 adaptive": eagle3, "fasteagle adaptive": fasteagle}
    ways = {way: {"seconds": [one, 7 * one, one]} for way, one in seconds.items()}
    at = {"size": "110m", "temperature": 0.8, "conversation": str(number)}
    return {"section": "turns", "key": f"t{number}", "at": at, "found": {"turns": [{"ways": ways}, {"ways": ways}]}}


ROWS = [
    *(coupled_row(number, *text) for number, text in enumerate(TEXTS)),
    steps_row("demo-eagle3", 8.0),
    steps_row("demo-fasteagle", 2.0),
    turns_row(1, 3.0, 4.0),
    turns_row(2, 6.0, 5.0),
]


def test_figures_are_those_of_all_texts() -> None:
    tokens, others, draft, speed = goals.lines_of(ROWS)
    assert (tokens.drafter, tokens.value, tokens.goal) == ("eagle3", 2.0, None)
    assert (others.drafter, others.value, others.goal, others.met) == ("fasteagle", round(14 / 9, 4), 5.0, False)
    assert (draft.value, draft.low, draft.met) == (0.25, None, True)
    assert (speed.value, speed.size, speed.temperature, speed.count) == (1.0, "110m", 0.8, 2)
    assert speed.met and speed.low == 0.75 and speed.high == 1.2


def test_sizes_are_those_of_what_is_timed() -> None:
    suite = goals.asked_suite("500m", ["mine.jsonl"])
    assert suite.sections["coupled"].sizes == ("native",) and suite.prompts == (str(Path("mine.jsonl").resolve()),)
    assert {ask.sizes for name, ask in suite.sections.items() if name != "coupled"} == {("500m",)}
    few = goals.asked_suite("native,110m", [], limit=2).sections
    assert {ask.limit_of(size) for ask in few.values() for size in ask.sizes} == {2}
    own = {task.section for task in tasks_of(goals.asked_suite(None, []))}
    assert own == {"coupled", "steps", "turns"}


def test_the_table_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Run:
        rows = ROWS

    monkeypatch.setattr(goals, "evaluate", lambda *_: Run)
    asked = ["--out", str(tmp_path), "--work", str(tmp_path)]
    assert goals.main([*asked, "--json"]) == 0
    assert [one["met"] for one in json.loads(capsys.readouterr().out)] == [None, False, True, True]
    assert goals.main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[2].endswith("5: missed") and lines[3].endswith("0.3: met")
    assert goals.main([*asked, "--sizes", "7b"]) == 2 and "'7b' is none of" in capsys.readouterr().err
    assert goals.main([*asked, "--limit", "0"]) == 2 and "--limit 0: expected 1 or more" in capsys.readouterr().err
