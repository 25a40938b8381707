"""The report: figures that were worked out by hand, the tables, the pictures."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure as Canvas

from draftwood.tools.benchmarks import draw
from draftwood.tools.benchmarks.__main__ import main
from draftwood.tools.benchmarks.contents import _numbers, contents
from draftwood.tools.benchmarks.markdown import markdown
from draftwood.tools.benchmarks.rows import FILE
from draftwood.tools.benchmarks.sections.lengths_shown import adaptive_regret, break_even, cells_of
from draftwood.tools.benchmarks.sections.turn import base_seconds, bundle_factors, plain_of, total_speedup, turns_of
from draftwood.tools.benchmarks.sections.turns_shown import _accept_length, depth_shares
from draftwood.tools.measure.spread import ratio

STEERING = "a \\| b\n\n<script>alert(1)</script> ![c](http://d)"
BARS = re.compile(r"(?<!\\)(?:\\\\)*\|")


def figures(seconds: list[float], tokens: int = 9, steps: int = 4, **more: Any) -> dict[str, Any]:
    held = {"seconds": seconds, "first_seconds": seconds, "tokens": tokens, "steps": steps, "equal": True}
    held |= {"accepted": [2] * steps, "depths": [steps, steps], "gears": {"tree-kv128": steps}, "host_share": 0.1}
    return held | {"stages_us": dict.fromkeys(("draft", "verify", "accept and commit", "host"), 1.0)} | more


def test_speedups_are_of_medians_and_all_tokens_together() -> None:
    ways = {"plain eagle3": figures([4.0, 9.0, 5.0]), "eagle3 tree": figures([2.0, 2.5, 9.0], depths=[4, 3, 1])}
    turn = {"id": "a", "source": "s", "prompt_tokens": 3, "ways": ways}
    rows = [{"key": k, "at": {"model": "tiny", "temperature": 0.0}, "found": {"turns": [turn]}} for k in "ab"]
    own = [turn for turn in turns_of(rows) if turn.way == "eagle3 tree"]
    assert own[0].speedup == 2.0 and own[0].accept_length == 2.0 and total_speedup(own) == (2.0, 2.0, 2.0)
    assert depth_shares(own) == [75.0, 25.0]


def test_a_base_is_of_the_ways_own_bundle() -> None:
    texts = [
        {"plain a": figures([1.0 * n]), "plain b": figures([4.0 * n]), "b tree": figures([1.0 * n])} for n in (1, 2, 3)
    ]
    factors = bundle_factors(texts)
    assert factors == pytest.approx({"plain a": 0.5, "plain b": 2.0})
    assert base_seconds("b tree", texts[1], factors) == pytest.approx(8.0)
    hiccup = texts[1] | {"plain b": figures([8.0, 80.0])}  # the median of 2, 8 and 80, brought to the bundle
    assert base_seconds("b tree", hiccup, factors) == pytest.approx(8.0) and plain_of("c tree", texts[0]) == "plain"


def test_an_interval_covers_the_ratio_and_narrows_with_more() -> None:
    few, many = ratio([1, 2, 3], [1, 1, 1]), ratio([1, 2, 3] * 50, [1] * 150)
    assert few.value == many.value == 2.0 and few.low < many.low < 2.0 < many.high < few.high


def test_regret_and_break_even_are_against_the_best_in_hindsight() -> None:
    ways = {"plain": figures([1.1]), "adaptive": figures([0.5]), "plain again": figures([0.9]), "tree": figures([0.4])}
    at = {"model": "tiny", "bundle": "medusa", "temperature": 0.0, "length": 128}
    (cell,) = cells_of([{"key": "a", "at": at, "found": {"ways": ways}}])
    assert cell.speedup("adaptive").value == pytest.approx(2.0) and adaptive_regret(cell) == pytest.approx(0.25)
    assert cell.best == "tree" and cell.overhead("tree") == pytest.approx(2.0 / 2.5)
    assert break_even([128, 256, 512], [1.3, 0.9, 0.8]) == "256 tokens"
    assert break_even([128, 256, 512], [0.9, 1.1, 1.2]) == "nowhere up to 512 (but at 128)"


def test_a_length_without_trees_says_nothing() -> None:
    ways = {"plain": figures([1.1]), "adaptive": figures([1.0]), "plain again": figures([0.9])}
    at = {"model": "tiny", "bundle": "medusa", "temperature": 0.0, "length": 128}
    assert cells_of([{"key": "a", "at": at, "found": {"ways": ways}}]) == []


def test_an_accept_length_is_over_conversations() -> None:
    """Steps of one resemble each other, so many of them do not make the mean of four conversations certain."""
    turns: Any = [
        SimpleNamespace(key=f"{gained}", figures={"accepted": [gained] * 1000}) for gained in (1, 2, 3, 4) for _ in "ab"
    ]
    length = _accept_length(turns)
    assert length.value == 2.5 and length.low < 2 and length.high > 3


def test_a_report_needs_no_prompts(tiny_run: Path) -> None:
    """A run's folder may be looked at on another machine."""
    before = contents(tiny_run)
    (tiny_run.parent / "prompts.jsonl").unlink()
    after = contents(tiny_run)
    assert after.complete and [one.rows for one in after.chapters] == [one.rows for one in before.chapters]


def test_a_run_becomes_markdown_with_its_pictures(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tiny_run), "--json"]) == 0
    written, found = json.loads(capsys.readouterr().out), contents(tiny_run)
    text = Path(written["markdown"]).read_text()
    assert written["tables"] and all(f"### {one['title']}" in text for one in written["tables"])
    assert all(len(line) == len(one["columns"]) for one in written["tables"] for line in one["lines"])
    assert all(path.endswith(".png") and Path(path).stat().st_size > 5000 for path in written["figures"])
    assert re.findall(r"!\[.+\]\((.+)\)", text) == [f"figures/{Path(one).name}" for one in written["figures"]]
    assert written["figures"][0].endswith("overview.png") and len(set(written["figures"])) >= 6
    assert "# Measured" in text and "## Turns" in text and "| llama | 0 | first tree | 6 | 6 of 6 |" in text
    assert [n.question for n in found.numbers] == ["Is it exact?", "How much faster?", "Where not?"]
    assert found.numbers[0].value == "100.0 %" and found.complete and "not complete" not in text


def test_a_running_folder_is_shown_as_such_and_a_prompt_cannot_steer_the_page(tiny_run: Path) -> None:
    lines = (tiny_run / FILE).read_text().splitlines(keepends=True)
    lines[0] = lines[0].replace('"source":"c0"', json.dumps("source") + ":" + json.dumps(STEERING))
    lines[1] = lines[1].replace('"busy":false', '"busy":true')
    (tiny_run / FILE).write_text("".join(lines[:7]) + lines[7][:50])
    text = markdown(contents(tiny_run))
    assert "not complete" in text and "1 of 4 rows are there" in text
    assert "7 rows, 1 of them while others were busy" in text and "**While others were busy**" in text
    assert r"| a \\\| b &lt;script>alert(1)&lt;/script> !\[c](http://d) |" in text
    tables = [part for part in text.split("\n\n") if part.startswith("| ")]
    assert all(len({len(BARS.findall(row)) for row in table.splitlines()}) == 1 for table in tables)


def test_exact_are_those_of_the_texts_that_are_counted() -> None:
    """A difference of texts that shared launches is none of theirs, and one that is no tie is told."""
    rows: list[Any] = [{"key": "a", "found": {"ways": {"plain": figures([1.0]), "tree": figures([1.0])}}}]
    rows += [{"key": "b", "found": {"bench": {"differences": [{"tie": True}, {"tie": False}]}}}]
    (exact,) = _numbers(rows, [])
    assert (exact.value, exact.of) == (
        "100.0 %",
        "of 1 texts are plain decoding's, token for token; 1 are NOT",
    )


def test_what_cannot_be_reported_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No such file" in line


@pytest.mark.parametrize(
    ("titles", "rows", "columns"), [(1, 1, 1), (3, 1, 3), (4, 2, 2), (6, 2, 3), (7, 3, 3), (9, 3, 3)]
)
def test_many_panels_stand_in_rows(titles: int, rows: int, columns: int) -> None:
    canvas = Canvas(figsize=(7.2, 3.0))
    names = [f"panel {number}" for number in range(titles)]
    assert [axes.get_title(loc="left") for axes in draw.panels(canvas, names)] == names
    assert len(canvas.axes) == titles
    assert canvas.axes[0].get_subplotspec().get_gridspec().get_geometry() == (rows, columns)
    assert (canvas.get_size_inches()[1] > 3.0) == (rows > 1)
