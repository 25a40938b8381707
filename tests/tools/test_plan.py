"""Files and reports of `draftwood plan` for statistics."""

import argparse
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from draftwood.errors import RequestError, TreeError
from draftwood.tools.commands import plan
from draftwood.tools.show.plan_pictures import _draw_optimum, _draw_stairs
from draftwood.trees import parse_specs
from draftwood.trees.calibration import Calibration
from draftwood.trees.calibration_file import read_calibration, write_calibration
from draftwood.trees.latency import LatencyEntry, LatencyTable
from draftwood.trees.plan_file import Stair, parse_plan

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    plan.add_arguments(parser)
    return plan.main(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    """Three thousand contexts of a drafter whose best candidate is right in three of five."""
    source, counted, file = random.Random(7), Calibration(), tmp_path / "stats"
    for number in range(1, 3001):
        path: list[int] = []
        while len(path) < 4 and source.random() < 0.8:
            path.append(min(int(source.expovariate(1.4)), 7))
        counted.add(tuple(path), group=number, context=source.randint(0, 400))
    write_calibration(counted, file)
    return file


@pytest.fixture
def latency(tmp_path: Path) -> Path:
    entries = [
        LatencyEntry(kind="verify", rows=rows, slots=512, seconds=s / 1000, parts={"all": s / 1000})
        for rows, s in ((1, 10.0), (8, 11.0), (16, 11.5), (64, 40.0))
    ]
    file = tmp_path / "latency.json"
    file.write_text(LatencyTable(source="modelled", entries=tuple(entries)).to_json())
    return file


def test_a_plan_is_what_the_counts_say(stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert run(stats, "--max-nodes", 12, "--max-gears", 2, "--out", out) == 0
    found = json.loads(out.read_text())
    tree = found["trees"][1]
    assert tree["name"] == "planned-13" and len(tree["paths"]) == 12
    assert len(found["curve"]) == 13 and found["curve"] == sorted(found["curve"]) and found["curve"][0] == 1
    calibration = read_calibration(stats)
    for part in ("counted", "heldout"):
        paths = [[r for r in row if r < 255] for row in calibration.part(part).ranks_ND.tolist()]
        weights, inside = calibration.part(part).counts_N.tolist(), {tuple(path) for path in tree["paths"]}
        tokens = 0
        for path, weight in zip(paths, weights, strict=True):
            tokens += weight * (1 + sum(tuple(path[:depth]) in inside for depth in range(1, len(path) + 1)))
        assert tree["promise"][part]["tokens"] == pytest.approx(tokens / sum(weights), abs=1e-12)
    low, high = tree["promise"]["heldout"]["interval"]
    assert low < tree["promise"]["heldout"]["tokens"] < high
    assert [name for name, _ in parse_specs(f"plan:{out}")] == ["plain", "planned-13"]


def test_the_report_says_why_and_draws(
    stats: Path, latency: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = tmp_path / "plan.json"
    assert run(stats, "--latency", latency, "--out", out) == 0
    said, remarks = capsys.readouterr()
    assert "has no times of drafts, which are taken to cost nothing; profile a BUNDLE with its drafter" in remarks
    for word in ("medusa-greedy", "sequoia", "cost staircase at KV length 512", "<- least time per token",
                 "no other set", "what each node gains", "times plain decoding, on held-out ones"):  # fmt: skip
        assert word in said
    pictures = [Path(line.removeprefix("picture: ")) for line in said.splitlines() if line.startswith("picture: ")]
    assert len(pictures) == 2 and all(file.read_bytes().startswith(PNG) for file in pictures)


def test_gears_are_of_the_trees_that_are_worth_their_time(stats: Path, latency: Path, tmp_path: Path) -> None:
    assert run(stats, "--latency", latency, "--out", tmp_path / "plan.json") == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    rows = {tree["name"]: len(tree["paths"]) + 1 for tree in found["trees"]}
    assert {rows[gear["tree"]] for gear in found["gears"]} == {1, 16}, "16 rows cost hardly more than 8, 64 far more"


def test_greedy_and_sampled_text_are_planned_for_together_and_believed_apart(tmp_path: Path) -> None:
    sampled, greedy = Calibration(), Calibration()
    for i in range(400):
        greedy.add((0, 0), group=f"text {i}")
        sampled.add((0,)[: i % 2], group=f"text {i}", sampled=True)
    for name, found in (("greedy", greedy), ("sampled", sampled)):
        write_calibration(found, tmp_path / name)
    assert run(tmp_path / "sampled", tmp_path / "greedy", "--out", tmp_path / "plan") == 0
    found = parse_plan((tmp_path / "plan").read_text(), "plan")
    assert sum(found.contexts.values()) == 800 and found.planning.sampled is not None
    assert found.planning.greedy.first > found.planning.sampled.first
    greedy.merge(sampled)
    write_calibration(greedy, tmp_path / "greedy")
    with pytest.raises(RequestError, match="400 of 800 contexts are of sampled text; expected greedy text alone"):
        run(tmp_path / "greedy", tmp_path / "sampled", "--out", tmp_path / "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-nodes", 0), "1 or more nodes"),
        (("--max-nodes", 256), "at most 255 nodes"),
        (("--max-nodes", 10**30), "at most 255 nodes"),
        (("--max-gears", 0), "1 or more gears"),
        (("--latency", "nowhere.json"), "cannot be read"),
        (("nowhere",), "cannot read the calibration statistics"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_writes_nothing(
    stats: Path, tmp_path: Path, arguments: tuple[object, ...], message: str
) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises((TreeError, RequestError), match=message) as caught:
        run(stats, *arguments, "--out", out)
    assert "\n" not in str(caught.value) and not out.exists()


@pytest.mark.parametrize(
    "words", ["stats stats --out plan", "stats --out stats", "stats --latency latency --out latency"]
)
def test_a_file_that_is_named_twice_is_refused_and_kept(
    words: str, stats: Path, latency: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    link, before = tmp_path / "latency", (stats.read_bytes(), latency.read_bytes())
    link.symlink_to(latency.name)
    with pytest.raises(RequestError, match="is named twice; expected STATS, --latency and --out to be files of their"):
        run(*words.split())
    assert (stats.read_bytes(), latency.read_bytes()) == before and not (tmp_path / "plan").exists()


def test_a_text_that_two_files_hold_is_not_counted_twice(stats: Path, tmp_path: Path) -> None:
    """As after `calibrate` has added to a copy of the other file."""
    counted, files = read_calibration(stats), [tmp_path / "one", tmp_path / "more"]
    for number, file in enumerate(files):
        counted.sources[f"answers-{number}"] = 1
        write_calibration(counted, file)
    with pytest.raises(RequestError, match=r"more: holds texts that .*one holds as well, and they would count twice"):
        run(*files, "--out", tmp_path / "plan")


def test_pictures_have_a_staircase_for_each_number_of_texts() -> None:
    stairs = [Stair(texts=t, slots=128, rows=r, us=r, expected=1.0, us_per_token=r / t) for t in (1, 2) for r in (1, 4)]
    cost: Any = SimpleNamespace(stairs=stairs, source="measured")
    for draw in (_draw_stairs, _draw_optimum):
        axes = Figure().subplots()
        draw(axes, cost)
        assert axes.get_legend_handles_labels()[1] == ["KV length 128", "KV length 128, 2 texts"]
        assert all(patch.get_data().edges.tolist() == [0, 1, 4] for patch in axes.patches)
