"""One command from a checkpoint to a bundle, and how it goes on where it stood."""

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.tools.cli import main
from draftwood.tools.commands import make, tune


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    words = ("the cat sat on the mat", "one two three one two", "a b c a b c a", "the hat the hat", "and so on and so")
    path.write_text("".join(json.dumps({"id": str(n), "prompt": text}) + "\n" for n, text in enumerate(words)))
    return path


def report_of(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict, str]:
    """What `make` found, as it keeps it beside the bundle, and what it said on the way."""
    code = main(["make", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads((Path(f"{words[-1]}.make") / "report.json").read_text())
    assert json.loads(out) == report
    return report, err


def in_this_process(command: Sequence[str], stdout: IO[bytes]) -> int:
    """A stage's command, whose output becomes that file's."""
    with open(stdout.fileno(), "w", closefd=False) as text, contextlib.redirect_stdout(text):
        return main(command[command.index("draftwood.tools.cli") + 1 :])


def test_without_a_drafter_trees_are_looked_up(
    prompts: Path,
    tmp_path: Path,
    tiny_teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(make.subprocess, "call", in_this_process)
    monkeypatch.setattr(tune, "SECONDS", 0.1)
    out = tmp_path / "bundle"
    line = (tiny_teacher, "--prompts", prompts, "--kv", 256, "--out", out)
    report, said = report_of(capsys, *line)
    assert report["ok"] and report["bench"]["turns"] == 1 and report["bench"]["identical"] == 1
    assert "[1/4] build" in said and "[4/4] bench" in said
    assert {gear.draft for gear in Bundle.open(out).manifest.gears} == {None, "lookup"}
    assert main(["make", *map(str, line)]) == 2  # the bundle is there
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("drafted", [False, True])
def test_a_four_bit_teacher_is_timed_and_built_in_one_precision(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, drafted: bool
) -> None:
    """So the plan sees how the times of that precision grow with rows."""
    parser = argparse.ArgumentParser()
    make.add_arguments(parser)
    words = [str(tiny_teacher), "--precision", "nbits", "--out", str(tmp_path / "b")]
    words += ["--drafter", str(tiny_heads)] if drafted else []
    stages = list(make.stages_of(parser.parse_args(words), tmp_path))
    named = [stage.words[0] for stage in stages if "nbits" in stage.words]
    assert named == ["build"] * (1 + drafted) == [stage.words[0] for stage in stages if stage.words[0] == "build"]


@pytest.mark.slow
def test_with_a_drafter_it_counts_times_and_plans(
    prompts: Path, tmp_path: Path, tiny_teacher: Path, tiny_heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, said = report_of(
        capsys, tiny_teacher, "--drafter", tiny_heads, "--prompts", prompts, "--kv", 512, "--out", tmp_path / "bundle"
    )
    assert report["ok"] and "[9/9] bench" in said
    assert any(name.startswith("lookup-chain-7") for name in report["gears"])
    assert Bundle.open(tmp_path / "bundle").manifest.planning is not None


def test_what_is_there_is_kept_and_what_has_changed_is_made_again(tmp_path: Path) -> None:
    for name in (make.COUNTED, make.JUDGING):
        (tmp_path / name).write_text("")
    stages = [make.Stage(str(n), ("plan", str(n)), tmp_path / f"made-{n}", "") for n in range(3)]
    assert make._kept(stages, tmp_path) == 0
    for stage in stages[:2]:
        stage.makes.write_text("x")
    make._keep(stages[:2], tmp_path)
    assert make._kept(stages, tmp_path) == 2
    assert make._kept([stages[0], make.Stage("1", ("other",), stages[1].makes, ""), stages[2]], tmp_path) == 1
    stages[0].makes.unlink()
    assert make._kept(stages, tmp_path) == 0


def test_a_stage_that_fails_is_named_with_its_command(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make", str(tmp_path / "none"), "--prompts", str(prompts), "--out", str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("draftwood: error: build failed (2): draftwood build --model")
    assert not (tmp_path / "b").exists()


def test_too_few_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "one"}\n')
    assert main(["make", "demo", "--prompts", str(path), "--out", str(tmp_path / "b")]) == 2
    assert "1 conversations; expected at least 4" in capsys.readouterr().err
