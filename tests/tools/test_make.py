"""One command from a checkpoint to a bundle, and how it goes on where it stood."""

import argparse
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, get_args

import pytest

from draftwood.compiler.teachers.kept import Precision
from draftwood.runtime.bundle import Bundle
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools import stages
from draftwood.tools.cli import main
from draftwood.tools.commands import make, tune
from draftwood.tools.commands.build import PRECISIONS
from draftwood.tools.stages import Stage


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
    monkeypatch.setattr(stages.subprocess, "call", in_this_process)
    monkeypatch.setattr(tune, "SECONDS", 0.1)
    out = tmp_path / "bundle"
    line = (tiny_teacher, "--prompts", prompts, "--kv", 256, "--out", out)
    report, said = report_of(capsys, *line)
    assert report["ok"] and report["bench"]["turns"] == 1 and report["bench"]["identical"] == 1
    assert "[1/4] build" in said and "[4/4] bench" in said
    assert {gear.draft for gear in Bundle.open(out).manifest.gears} == {None, "lookup"}
    monkeypatch.setattr(stages.subprocess, "call", None)
    assert report_of(capsys, *line)[0] == report  # all is there
    assert main(["make", *map(str, line), "--precision", "nbits"]) == 2  # another bundle is there
    assert "exists already" in capsys.readouterr().err


def stages_for(folder: Path, *words: object) -> list[Stage]:
    parser = argparse.ArgumentParser()
    make.add_arguments(parser)
    return list(make.stages_of(parser.parse_args([*map(str, words), "--out", str(folder / "b")]), folder))


@pytest.fixture
def four_bits(tiny_teacher: Path, tmp_path: Path) -> Path:
    save_packed(tiny_teacher, tmp_path / "four", "awq", group=32)
    return tmp_path / "four"


@pytest.mark.parametrize("drafted", [False, True])
def test_a_four_bit_teacher_is_timed_and_built_in_one_precision(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, drafted: bool
) -> None:
    """So the plan sees how the times of that precision grow with rows."""
    found = stages_for(tmp_path, tiny_teacher, "--precision", "nbits", *(["--drafter", tiny_heads] if drafted else []))
    named = [stage.words[0] for stage in found if "nbits" in stage.words]
    assert named == ["build"] * (1 + drafted) == [stage.words[0] for stage in found if stage.words[0] == "build"]


def test_four_bits_for_a_device_are_modelled_so_and_judged_on_this_machine(
    save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """One bundle for each kernel's layout, of the same trees, none larger than the NPU's kernel gives equal bits to."""
    (tmp_path / "wide").mkdir()
    save_tiny(tmp_path / "wide", hidden_size=128, intermediate_size=256, num_key_value_heads=2)
    save_packed(tmp_path / "wide", tmp_path / "four", "awq", group=64)
    words = (tmp_path / "four", "--precision", "nbits-head", "--device", "ascend-910b3")
    found = {stage.name: stage.words for stage in stages_for(tmp_path, *words)}
    assert list(found) == ["build", "build for this machine", "check", "tune", "bench"]
    one, other = found["build"], found["build for this machine"]
    assert one[(at := one.index("--target")) : at + 2] == ("--target", "ge") and "--target" not in other
    assert {"nbits-head", "lookup:chain:3,lookup:chain:7"} <= set(one) & set(other)
    assert found["check"][1] == str(tmp_path / "b") and found["bench"][1] == found["tune"][1] == str(tmp_path / "here")


# What stand-ins of a make measure, by precision: tokens a second with speculation; nothing where it fails.
SPEEDS = {"nbits": 210.0, "w8a8": 100.0, "exact": 200.0, "exact-int8-drafter": 260.0, "nbits-int8-drafter": 260.0}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that a stand-in has made, in order."""
    found: list[str] = []

    def stand_in(command: Sequence[str], stdout: IO[bytes]) -> int:
        words = list(command[command.index("draftwood.tools.cli") + 1 :])
        if words[0] == "quantize":
            stdout.write(json.dumps({n: {"worse": 0.01, "agreement": a} for n, a in AGREEMENT.items()}).encode())
            return 0
        out = Path(words[words.index("--out") + 1])
        name = words[words.index("--precision") + 1] + ("-int8-drafter" if "--int8-drafter" in words else "")
        found.append(name)
        if name not in SPEEDS:
            return 2
        out.mkdir()
        (out / "made").write_text(name)
        out.with_name("bundle.make").mkdir(exist_ok=True)
        speeds = {"speculative_tokens_per_s": SPEEDS[name], "plain_tokens_per_s": 80.0}
        bench = {"turns": 1, "identical": 1, "ties": 0, "ok": True, "speedup": {"mean": 2.0}, **speeds}
        bench["accept_length"] = {"mean": 2.5}
        report = {"ok": True, "bundle": "", "gears": [], "bench": bench, "pictures": [], "commands": []}
        report["check"] = {"ok": True, "mutations": 1, "mutations_caught": 1}
        out.with_name("bundle.make").joinpath("report.json").write_text(json.dumps(report))
        return 0

    monkeypatch.setattr(stages.subprocess, "call", stand_in)
    return found


AGREEMENT = {"nbits": 0.97, "w8a8": 0.99}


@pytest.mark.parametrize(
    ("speeds", "drafted", "chosen"),
    [
        ({}, False, "exact"),  # 210 is within 5 % of 200
        ({"nbits": 211.0}, False, "nbits"),
        ({"nbits": 300.0, "w8a8": 290.0}, False, "w8a8"),  # which rounds less
        ({"nbits": 300.0, "exact": None}, False, "nbits"),
        ({}, True, "exact-int8-drafter"),
        ({"exact-int8-drafter": 205.0}, True, "exact"),
        ({"nbits": 220.0}, True, "nbits-int8-drafter"),
    ],
)
def test_the_best_precision_is_the_fastest_that_rounds_least(
    four_bits: Path,
    tiny_heads: Path,
    prompts: Path,
    tmp_path: Path,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    speeds: dict[str, float | None],
    drafted: bool,
    chosen: str,
) -> None:
    for name, speed in speeds.items():
        monkeypatch.delitem(SPEEDS, name) if speed is None else monkeypatch.setitem(SPEEDS, name, speed)
    drafter = ("--drafter", tiny_heads) if drafted else ()
    line = (four_bits, *drafter, "--prompts", prompts, "--precision", "best", "--out", tmp_path / "b")
    report, said = report_of(capsys, *line)
    assert report["chosen"] == chosen == (tmp_path / "b/made").read_text()
    assert ran[:3] == ["nbits", "w8a8", "exact"] and ran[3:] == (
        [f"{chosen.split('-')[0]}-int8-drafter"] if drafted else []
    )
    assert {one["form"]: one["tokens_per_s"] for one in report["forms"]} == {name: SPEEDS.get(name) for name in ran}
    assert ("left out: exact failed (2)" in said) == ("exact" not in SPEEDS)
    assert main(["make", *map(str, line)]) == 2 and "exists already" in capsys.readouterr().err


def test_a_stopped_choice_goes_on_and_is_shown(
    four_bits: Path, prompts: Path, tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["make", str(four_bits), "--prompts", str(prompts), "--precision", "best", "--out", str(tmp_path / "b")]
    assert main(line) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:6] == ["nbits", "210.00", "80.00", "2.50", "+1.00", "%"] and "97.00 %" in shown[1]
    assert shown[3].startswith("exact") and shown[3].endswith("nothing")
    assert shown[4] == "chosen     exact: within 5 % of the fastest, and of those it rounds least"
    assert shown[-1].endswith(f"--precision exact --out {tmp_path / 'b'}")
    (tmp_path / "b").rename(tmp_path / "b.make/exact/bundle")
    assert main(line) == 0 and ran == ["nbits", "w8a8", "exact"]
    (tmp_path / "b").rename(tmp_path / "b.make/elsewhere")
    assert main(line) == 0 and ran[3:] == ["exact"]


def test_a_teacher_of_plain_numbers_stays_as_it_is(
    tiny_teacher: Path,
    tiny_heads: Path,
    prompts: Path,
    tmp_path: Path,
    ran: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = (tiny_teacher, "--drafter", tiny_heads, "--prompts", prompts, "--precision", "best", "--out", tmp_path / "b")
    report, _ = report_of(capsys, *line)
    assert ran == ["exact", "exact-int8-drafter"] and report["chosen"] == ran[1]
    assert [one["rounds"] for one in report["forms"]] == ["nothing"] * 2
    assert main(["make", *map(str, line), "--device", "ascend-910b3"]) == 2
    assert "chooses by what this machine measures" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_precision_of_a_teacher_of_four_bits(
    four_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = report_of(capsys, four_bits, "--kv", 512, "--precision", "best", "--out", tmp_path / "b")
    assert report["ok"] and {one["form"] for one in report["forms"] if one["ok"]} == {"nbits", "w8a8", "exact"}
    assert all((one["difference"] is None) == (one["form"] == "exact") for one in report["forms"])
    assert Bundle.open(tmp_path / "b").manifest.quantised == (report["chosen"] != "exact")


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
    found = [Stage(str(n), ("plan", str(n)), tmp_path / f"made-{n}", "") for n in range(3)]
    assert stages.kept(found, tmp_path, ["x"]) == 0
    for stage in found[:2]:
        stage.makes.write_text("x")
    stages.keep(found[:2], tmp_path, ["x"])
    assert stages.kept(found, tmp_path, ["x"]) == 2 and stages.kept(found, tmp_path, ["y"]) == 0
    changed = [found[0], Stage("1", ("other",), found[1].makes, ""), found[2]]
    assert stages.kept(changed, tmp_path, ["x"]) == 1
    found[0].makes.unlink()
    assert stages.kept(found, tmp_path, ["x"]) == 0


def test_the_precisions_to_ask_for_are_those_there_are() -> None:
    assert get_args(Precision) == PRECISIONS


def test_a_wrong_model_is_told_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make", str(tmp_path / "none"), "--out", str(tmp_path / "b")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "none" in said and not any(tmp_path.iterdir())


def test_a_stage_that_fails_is_named_with_its_command(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["make", str(tiny_teacher), "--prompts", str(prompts), "--kv", "100", "--out", str(tmp_path / "b")]
    assert main(line) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("draftwood: error: build failed (2): draftwood build --model")
    assert not (tmp_path / "b").exists()


def test_too_few_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "one"}\n')
    assert main(["make", "demo", "--prompts", str(path), "--out", str(tmp_path / "b")]) == 2
    assert "1 conversations; expected at least 4" in capsys.readouterr().err
