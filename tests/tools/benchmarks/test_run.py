"""A run: rows of every task, a run that was stopped and goes on, a busy machine, runs merged."""

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from draftwood.errors import RequestError
from draftwood.tools.benchmarks import busy, evaluate, run
from draftwood.tools.benchmarks.__main__ import main
from draftwood.tools.benchmarks.named_bundles import read_bundles
from draftwood.tools.benchmarks.record import read_record
from draftwood.tools.benchmarks.registry import SECTIONS
from draftwood.tools.benchmarks.rows import FILE, RunRows, decoded, read_rows
from draftwood.tools.benchmarks.suite import Suite, read_suite


def exact(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The part of a row that does not depend on the clock: plain text and equality, since trees depend on it."""
    texts: dict[str, list[Any]] = {row["key"]: [] for row in rows}
    for text in decoded(rows):
        texts[text.key].append((text.way, text.figures["tokens"], text.figures["equal"]))
    return texts


def test_every_task_has_a_row_with_equal_texts(tiny_run: Path) -> None:
    rows = read_rows(tiny_run)
    suite = msgspec.convert(read_record(tiny_run)["suite"], Suite)
    assert [row["key"] for row in rows] == [task.key for task in run.tasks_of(suite)]
    assert all(text.figures["equal"] for text in decoded(rows)) and len(list(decoded(rows))) == 6 * 2 * 4 + 4 * 3
    turn = rows[0]["found"]["turns"][1]
    assert turn["turn"] == 2 and turn["prompt_tokens"] > rows[0]["found"]["turns"][0]["prompt_tokens"]
    tree, plain = turn["ways"]["first tree"], [turn["ways"][f"plain {name}"] for name in ("first", "second")]
    assert [len(one["seconds"]) for one in plain] == [1, 1] and all(one["equal"] for one in plain)
    assert (
        len(tree["seconds"]) == 2 and sum(tree["accepted"]) >= tree["tokens"] - 1 and tree["depths"][0] == tree["steps"]
    )
    assert set(rows[0]["found"]["bundles"]) == {"first", "second"}
    assert read_record(tiny_run)["machines"][0]["versions"]["onnxruntime"]


def test_a_stopped_run_goes_on_to_the_same_rows(
    suite_file: Path, tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, measure, calls = read_rows(tiny_run), run.measure, []

    def stopped(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(run, "measure", stopped)
    line = ["evaluate", "--suite", str(suite_file), "--out", str(tmp_path / "cut")]
    assert main(line) == 130
    kept = (tmp_path / "cut" / FILE).read_bytes()
    (tmp_path / "cut" / FILE).write_bytes(kept + whole[3]["key"].encode())  # half a line
    assert len(read_rows(tmp_path / "cut")) == 3
    assert main(line) == 0
    assert (tmp_path / "cut" / FILE).read_bytes().startswith(kept)
    assert exact(read_rows(tmp_path / "cut")) == exact(whole)
    assert len(read_record(tmp_path / "cut")["commands"]) == 2
    measured = len(calls)
    assert main(line) == 0 and len(calls) == measured


def test_a_busy_row_is_measured_again_and_marked(
    suite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite_file.write_text(suite_file.read_text().replace("tries = 1", "tries = 2").replace("100.0", "0.5"))
    suite = read_suite(str(suite_file), SECTIONS).only(("turns",), ())
    suite = suite.over(
        read_bundles([f"{name}={path}" for name, path in suite.bundles.items()]), lambda *_: True, None, None
    )
    above = iter([True, False, *[True] * 20])
    monkeypatch.setattr(busy.Load, "above", lambda load, cores: cores == 0.5 and next(above))
    rows = run.evaluate(suite, tmp_path / "run", tmp_path / "work").rows
    assert [(row["load"]["tries"], row["load"]["busy"]) for row in rows[:3]] == [(2, False), (2, True), (2, True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("[sections.turns]", "[sections.nope]"), "no section 'nope'"),
        (lambda text: text.replace("rounds = 2", "rounds = 0"), "Expected `int` >= 1"),
        (lambda text: text.replace("tries = 1", "tries = 0"), "Expected `int` >= 1 - at `$.tries`"),
        (lambda text: text + "temperatures = [nan]\n", "Expected `float` >= 0.0"),
        (lambda text: f"deep = {'[' * 5000}\n{text}", "recursion"),
        (lambda text: text.replace('["second"]', '["mine"]'), "lengths asks for bundle 'mine'"),
        (lambda text: re.sub("bundles = {.*}", "", text), "--bundle: is needed"),
        (lambda text: text.replace("tries", "tires"), "tires"),
        (lambda text: "not TOML", "--suite"),
    ],
)
def test_a_suite_that_makes_no_sense_is_one_line(
    change: Callable[[str], str], message: str, suite_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite_file.write_text(change(suite_file.read_text()))
    assert main(["evaluate", "--suite", str(suite_file), "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "run").exists()


def test_what_a_suite_does_not_measure_is_said(suite_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths that no bundle holds, and a section that makes no task of its settings."""
    longer = suite_file.read_text().replace("[40, 60]", "[40, 60, 90000]")
    suite_file.write_text(longer + "\n[sections.problems]\n")
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    given = parser.parse_args(["--suite", str(suite_file), "--out", "unused"])
    assert evaluate._over(read_suite(str(suite_file), SECTIONS), given).sections["lengths"].lengths == (40, 60)
    assert capsys.readouterr().err.splitlines() == [
        "lengths: left out, for they pass a bundle's context: lengths 90000",
        "problems: nothing to measure, by the suite's settings and the prompts",
    ]


def test_a_folder_of_another_run_is_refused(
    tiny_run: Path, suite_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite_file.write_text(suite_file.read_text().replace("rounds = 2", "rounds = 3"))
    assert main(["evaluate", "--suite", str(suite_file), "--out", str(tiny_run)]) == 2
    assert "asked otherwise of 'turns'" in capsys.readouterr().err


@pytest.mark.parametrize("replaced", ["--prompts", "--bundle second"])
def test_a_run_does_not_go_on_with_files_that_have_changed(
    replaced: str, suite_file: Path, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal names, other content."""
    prompts, second = tmp_path / "prompts.jsonl", tmp_path / "second"
    prompts.write_text("".join(json.dumps({"prompt": f"the cat {n}"}) + "\n" for n in range(3)))
    shutil.copytree(tiny_bundle, second)
    suite_file.write_text(re.sub('second = "[^"]*"', f'second = "{second}"', suite_file.read_text()))
    line = ["evaluate", "--suite", str(suite_file), "--out", str(tmp_path / "run"), "--sections", "lengths"]
    assert main(line := [*line, "--prompts", str(prompts)]) == 0
    if replaced == "--prompts":
        prompts.write_text(prompts.read_text().replace("cat", "hat"))
    else:
        fields = json.loads((second / "manifest.json").read_text())
        (second / "manifest.json").write_text(
            json.dumps(fields | {"provenance": fields["provenance"] | {"draftwood": "another"}})
        )
    rows = (tmp_path / "run" / FILE).read_bytes()
    capsys.readouterr()
    assert main(line) == 2
    assert re.search(
        f"holds rows of other files: {replaced}.* has changed; take another --out", capsys.readouterr().err
    )
    assert (tmp_path / "run" / FILE).read_bytes() == rows


def test_bundles_of_the_command_take_the_place_of_the_suites(
    suite_file: Path, tiny_bundle: Path, tiny_draft_bundles: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """On any engine; peers are left out without a checkpoint, and a run does not go on with other bundles."""
    suite_file.write_text(suite_file.read_text().replace('bundles = ["second"]', "") + "[sections.peers]\n")
    given = {"heads": tiny_bundle, "layer": tiny_draft_bundles["eagle3"]}
    line = ["evaluate", "--suite", str(suite_file), "--out", str(tmp_path / "own"), "--engine", "static"]
    line += [word for name, folder in given.items() for word in ("--bundle", f"{name}={folder}")]
    assert main(line) == 0
    assert "not measured so: peers" in capsys.readouterr().err
    rows = read_rows(tmp_path / "own")
    assert {row["at"]["model"] for row in rows} == {"llama"}
    assert [row["section"] for row in rows] == ["turns"] * 6 + ["lengths"] * 8
    ways = {"plain heads", "plain layer", *(f"{name} {policy}" for name in given for policy in ("adaptive", "tree"))}
    assert set(rows[0]["found"]["turns"][0]["ways"]) == ways and rows[0]["found"]["bundles"].keys() == given.keys()
    assert all(text.figures["equal"] for text in decoded(rows))
    assert main(["report", str(tmp_path / "own")]) == 0
    assert main([*line[:-2], "--bundle", f"layer={tiny_draft_bundles['fasteagle']}"]) == 2
    assert "holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bundle", "a b={}"], "its name is 'a b'; expected NAME=DIR"),
        (["--bundle", "one={}", "--bundle", "one={}"], "its name is 'one'"),
        (["--bundle", "{}/none"], "none"),
        (["--model", "nowhere"], "--model nowhere: no such file or folder"),
    ],
)
def test_bundles_that_make_no_sense_are_one_line(
    words: list[str], message: str, suite_file: Path, tiny_bundle: Path, tmp_path: Path, capsys: Any
) -> None:
    words = [word.format(tiny_bundle) for word in words]
    assert main(["evaluate", "--suite", str(suite_file), "--out", str(tmp_path / "run"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (tmp_path / "run").exists()


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"key": "a", "section": "turns", "at": {}, "found": {}}) + "\n{}\n")
    with pytest.raises(RequestError, match=r"line 2: not a row \(has no 'key'\)"):
        RunRows(tmp_path)


def test_the_load_of_a_block_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stats = iter([(100.0, 1.0), (103.0, 2.0)])
    monkeypatch.setattr(busy, "_stat", lambda: next(stats))
    monkeypatch.setattr(busy, "_own_seconds", lambda: 0.0)
    monkeypatch.setattr(busy.time, "perf_counter", iter([0.0, 10.0]).__next__)
    load = busy.Meter().stop()
    assert (load.seconds, load.foreign_cores, load.steal_cores) == (10.0, 0.3, 0.1)
    assert load.above(0.39) and not load.above(0.41) and load.peak_mb > 10
