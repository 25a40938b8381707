"""One command from a checkpoint to a bundle, and how it goes on where it stood."""

import argparse
import contextlib
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, get_args

import pytest

from draftwood.compiler.ge import torchair_bridge
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.teachers.conversion import Precision, in_precision
from draftwood.compiler.teachers.precisions import precisions
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.tests.packed_checkpoints import save_packed
from draftwood.tools.calibration_texts import BUILT_IN
from draftwood.tools.cli import main
from draftwood.tools.commands import make, tune
from draftwood.tools.commands.build import PRECISIONS
from draftwood.tools.made_from import made_from
from draftwood.tools.making import needs, stages
from draftwood.tools.making.needs import fitting
from draftwood.tools.making.precision import STEPS
from draftwood.tools.making.stages import Kept, Stage, StageError
from draftwood.tools.making.steps import stages_of
from draftwood.trees.latency import LatencyEntry, LatencyTable


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    words = ("the cat sat on the mat", "one two three one two", "a b c a b c a", "the hat the hat", "and so on and so")
    path.write_text("".join(json.dumps({"id": str(n), "prompt": text}) + "\n" for n, text in enumerate(words)))
    return path


def report_of(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict, str]:
    """The report of `make`, as it is kept next to the bundle, and its messages on the way."""
    code = main(["make", *map(str, words)])
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads((Path(f"{words[-1]}.make") / "report.json").read_text())
    assert all(line in out for line in (report["bundle"], *report["gears"], *report["commands"]))
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
    line = (tiny_teacher, "--prompts", prompts, "--kv", 256, "--precision", "exact", "--batch-size", 1, "--out", out)
    report, said = report_of(capsys, *line)
    assert report["ok"] and report["bench"]["turns"] == 1 and report["bench"]["identical"] == 1
    assert "[1/4] build" in said and "[4/4] bench" in said
    assert {gear.draft for gear in Bundle.open(out).manifest.gears} == {None, "lookup"}
    monkeypatch.setattr(stages.subprocess, "call", None)
    assert report_of(capsys, *line)[0] == report  # all is there
    other = ["nbits" if word == "exact" else str(word) for word in line]
    assert main(["make", *other]) == 2  # another bundle is there
    assert "exists already, and --precision: asked otherwise" in capsys.readouterr().err


def stages_for(folder: Path, *words: object) -> list[Stage]:
    parser = argparse.ArgumentParser()
    make.add_arguments(parser)
    args = parser.parse_args([*map(str, words), "--out", str(folder / "b")])
    make._complete(args)
    return list(stages_of(args, folder))


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


@pytest.mark.parametrize(("more", "candidates"), [((), 1), (("--batch-size", 1), 4), (("--precision", "exact"), 4)])
def test_only_chains_are_counted_where_no_other_tree_can_be_built(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, more: tuple[object, ...], candidates: int
) -> None:
    words = (tiny_teacher, "--drafter", tiny_heads, "--precision", "nbits", *more)
    named = {stage.name: stage.words for stage in stages_for(tmp_path, *words)}
    assert named["first bundle"][named["first bundle"].index("--tree") + 1].endswith(f":{candidates}")
    rows = named["times"][named["times"].index("--rows") + 1]
    assert rows.endswith(",6") if candidates == 1 else rows.endswith(",16")


@pytest.mark.parametrize(("most", "sizes"), [(1, "1"), (2, "1,2"), (6, "1,2,4,6"), (8, "1,2,4,8")])
def test_launches_of_every_size_that_is_built_are_timed(
    tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, most: int, sizes: str
) -> None:
    words = (tiny_teacher, "--drafter", tiny_heads, "--precision", "exact", "--batch-size", most)
    times = next(stage.words for stage in stages_for(tmp_path, *words) if stage.name == "times")
    assert times[times.index("--batch-size") + 1] == sizes


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


@pytest.mark.parametrize(
    ("texts", "trees"), [(1, "lookup:chain:3,lookup:chain:7"), (2, "lookup:chain:3"), (4, "plain")]
)
def test_trees_of_four_bits_are_as_small_as_several_sequences_ask_for(
    save_tiny: Callable[..., Path], tmp_path: Path, texts: int, trees: str
) -> None:
    """The NPU's kernel gives equal bits up to eight rows a launch here, all its sequences together."""
    (tmp_path / "wide").mkdir()
    save_tiny(tmp_path / "wide", hidden_size=128, intermediate_size=256, num_key_value_heads=2)
    save_packed(tmp_path / "wide", tmp_path / "four", "awq", group=64)
    words = (tmp_path / "four", "--precision", "nbits-head", "--device", "ascend-910b3", "--batch-size")
    build = stages_for(tmp_path, *words, texts)[0].words
    assert build[build.index("--tree") + 1] == trees
    with pytest.raises(RequestError, match=r"--batch-size 16: .* beyond 8 rows a launch; expected 1 to 8"):
        stages_for(tmp_path, *words, 16)


# The stand-ins' measurements, by precision: ms of a step; tokens a second with speculation, nothing if it fails.
MS = {"nbits": 10.0, "w8a8": 12.0, "nbits8": 11.0, "exact": 20.0}
SPEEDS = dict.fromkeys((*MS, *(f"{name}-int8-drafter" for name in MS)), 200.0)
COSTS = {"nbits": (0.02, 0.97), "w8a8": (0.01, 0.98), "nbits8": (0.001, 0.99)}


UNTIMED = set[str]()  # precisions whose timing fails, alone and among others


def stand_in_times(name: str, slots: int) -> str:
    seconds = MS[name] / 1e3
    spread = {"seconds": seconds, "quartiles": (seconds, seconds), "samples": 1}
    entries = [
        LatencyEntry(kind="verify" if rows > 1 else "decode", rows=rows, slots=slots, filled=slots // 2, texts=texts,
                     **spread)
        for texts, rows in STEPS
    ]  # fmt: skip
    entries += [LatencyEntry(kind="host", texts=texts, **spread) for texts in (1, 8)]
    return LatencyTable(source="measured", kv_read="filled", entries=tuple(entries)).to_json()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions that a stand-in has made, in order."""
    found: list[str] = []

    def stand_in(command: Sequence[str], stdout: IO[bytes]) -> int:
        words = list(command[command.index("draftwood.tools.cli") + 1 :])
        if words[0] == "quantize":
            costs = {name: {"worse": worse, "agreement": same} for name, (worse, same) in COSTS.items()}
            stdout.write(json.dumps(costs).encode())
            return 0
        out = Path(words[words.index("--out") + 1])
        name = words[words.index("--precision") + 1] + ("-int8-drafter" if "--int8-drafter" in words else "")
        if words[0] == "profile":
            names = name.split(",")
            if set(names) & UNTIMED:
                return 2
            for one in names:
                path = out.with_stem(f"{out.stem}-{one}") if len(names) > 1 else out
                path.write_text(stand_in_times(one, int(words[words.index("--kv") + 1])))
            return 0
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


@pytest.mark.parametrize(
    ("ms", "worse", "fails", "chosen"),
    [
        ({}, {}, (), "nbits"),  # the others are more than 5 % slower
        ({"w8a8": 10.4}, {}, (), "w8a8"),  # within 5 %, and rounds less
        ({"exact": 10.4, "w8a8": 10.4}, {}, (), "exact"),
        ({}, {"nbits": 0.031}, (), "nbits8"),  # costs too much; of the others the fastest
        ({}, {"nbits": 0.2, "nbits8": 0.1, "w8a8": 0.07}, (), "exact"),
        ({}, {}, ("nbits",), "nbits8"),  # what fails is left for the next
    ],
)
def test_the_best_precision_is_the_fastest_that_costs_little(
    tiny_teacher: Path,
    prompts: Path,
    tmp_path: Path,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ms: dict[str, float],
    worse: dict[str, float],
    fails: tuple[str, ...],
    chosen: str,
) -> None:
    for name, value in ms.items():
        monkeypatch.setitem(MS, name, value)
    for name, value in worse.items():
        monkeypatch.setitem(COSTS, name, (value, COSTS[name][1]))
    for name in fails:
        monkeypatch.delitem(SPEEDS, name)
    line = (tiny_teacher, "--prompts", prompts, "--kv", 256, "--out", tmp_path / "b")
    report, said = report_of(capsys, *line)
    assert report["chosen"] == chosen == (tmp_path / "b/made").read_text() and ran == [*fails, chosen]
    assert "--precision best, whose largest candidate is exact: " in said and "[1/1]" not in said
    assert f"{chosen}: builds, checks and judges the teacher so" in said
    assert "times of nbits, w8a8, nbits8, exact: times steps here, in turns" in said
    assert {one["precision"]: one["ms"][0] for one in report["precisions"]} == pytest.approx(MS)
    assert all((f"left out: {name} failed (2)" in said) for name in fails)
    # It is shown again as it is, and refused once something else is asked for.
    again, _ = report_of(capsys, *line)
    assert again == report and ran == [*fails, chosen]
    assert main(["make", *("512" if word == 256 else str(word) for word in line)]) == 2
    assert "exists already, and --kv: asked otherwise" in capsys.readouterr().err


def test_precisions_that_fit_and_cost_too_much_are_named(
    tiny_teacher: Path,
    prompts: Path,
    tmp_path: Path,
    ran: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(needs, "fitting", lambda teacher: {"nbits": 1, "w8a8": 2})
    for name in ("nbits", "w8a8"):
        monkeypatch.setitem(COSTS, name, (0.05, 0.9))
    line = ("make", tiny_teacher, "--prompts", prompts, "--kv", 256, "--out", tmp_path / "b")
    assert main([*map(str, line)]) == 2 and ran == []
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(
        "--precision best: perplexity rises by more than 3% with each of nbits, w8a8, which fit here; name one of them"
        " with --precision to take it all the same"
    )


@pytest.mark.parametrize(("row", "own"), [({"question": "the cat sat " * 4}, True), ({"prompt": "a"}, False)])
def test_precisions_are_judged_by_prompts_of_any_kind_if_they_are_long_enough(
    tiny_teacher: Path, tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str], row: dict, own: bool
) -> None:
    (tmp_path / "asked.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    line = (tiny_teacher, "--prompts", tmp_path / "asked.jsonl", "--kv", 256, "--out", tmp_path / "b")
    _, said = report_of(capsys, *line)
    name = tmp_path / "asked.jsonl" if own else BUILT_IN
    assert f"draftwood quantize {tiny_teacher} {name} --json" in said and ran == ["nbits"]


def test_a_precision_that_cannot_be_timed_leaves_the_others_theirs(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, ran: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.modules[__name__], "UNTIMED", {"nbits"})
    report, said = report_of(capsys, tiny_teacher, "--prompts", prompts, "--kv", 256, "--out", tmp_path / "b")
    assert report["chosen"] == "nbits8" and "times of w8a8: times steps here\n" in said
    assert {one["precision"]: len(one["ms"]) for one in report["precisions"]} == {
        name: 4 * (name != "nbits") for name in MS
    }


def test_precisions_that_do_not_fit_together_are_timed_one_by_one(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, ran: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sizes = fitting(Checkpoint.open(tiny_teacher))
    monkeypatch.setattr(needs, "memory", lambda: {"total_bytes": int(1.5 * max(sizes.values()))})
    report, said = report_of(capsys, tiny_teacher, "--prompts", prompts, "--kv", 256, "--out", tmp_path / "b")
    assert report["chosen"] == "nbits" and "in turns" not in said
    assert all(f"times of {name}: times steps here" in said for name in MS)


def test_the_drafter_in_eight_bits_is_tried_beside_what_was_chosen(
    tiny_teacher: Path, tiny_heads: Path, prompts: Path, tmp_path: Path, ran: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line = (tiny_teacher, "--drafter", tiny_heads, "--prompts", prompts, "--kv", 256, "--out")
    assert report_of(capsys, *line, tmp_path / "a")[0]["chosen"] == "nbits"
    monkeypatch.setitem(SPEEDS, "nbits-int8-drafter", 220.0)
    assert report_of(capsys, *line, tmp_path / "b")[0]["chosen"] == "nbits-int8-drafter"
    assert ran == ["nbits", "nbits-int8-drafter"] * 2
    assert main(["make", *map(str, line), str(tmp_path / "c"), "--precision", "best", "--device", "ascend-910b3"]) == 2
    assert "chooses by what this machine measures" in capsys.readouterr().err


def test_a_device_that_nothing_here_lowers_for_is_refused_before_anything_is_counted(
    tiny_teacher: Path, prompts: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torchair_bridge, "torch_npu_folder", lambda: None)
    built = ["build", str(tiny_teacher), "--tree", "plain", "--kv", "256", "--target", "onnx,ge"]
    made = ["make", str(tiny_teacher), "--prompts", str(prompts), "--kv", "256", "--device", "ascend-910b3"]
    for line in (built, made):
        assert main([*line, "--out", str(tmp_path / "b")]) == 2
        said = f"{line[0]} needs torch_npu, which is not installed: pip install 'draftwood[npu]'"
        assert capsys.readouterr().err == f"draftwood: error: {said}\n"
    assert not list(tmp_path.glob("b*"))


def test_a_stopped_choice_goes_on_and_is_shown(
    four_bits: Path, prompts: Path, tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["make", str(four_bits), "--prompts", str(prompts), "--kv", "256", "--out", str(tmp_path / "b")]
    assert main(line) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:9] == ["precision", "ms", "1x1", "ms", "1x8", "ms", "8x1", "ms", "8x8"]
    assert shown[1].split()[:6] == ["nbits", *["10.00"] * 4, "+2.00"] and "97.00 %" in shown[1]
    assert shown[3].startswith("exact") and shown[3].endswith("nothing")
    assert shown[4] == "ms 8x8: a step of 8 sequences with 8 rows each"
    assert shown[5].startswith("chosen     nbits: of those with a perplexity within 3 % and within 5 % of the fastest")
    assert shown[-1].endswith(f"--precision nbits --out {tmp_path / 'b'}")
    (tmp_path / "b").rename(tmp_path / "b.make/nbits/bundle")
    assert main(line) == 0 and ran == ["nbits"]
    (tmp_path / "b").rename(tmp_path / "b.make/elsewhere")
    assert main(line) == 0 and ran == ["nbits"] * 2


@pytest.mark.slow
def test_the_best_precision_of_a_teacher_of_four_bits(
    four_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, _ = report_of(capsys, four_bits, "--kv", 512, "--precision", "best", "--out", tmp_path / "b")
    assert report["ok"] and [one["precision"] for one in report["precisions"]] == ["nbits", "w8a8", "exact"]
    assert all((one["difference"] is None) == (one["precision"] == "exact") for one in report["precisions"])
    assert Bundle.open(tmp_path / "b").manifest.quantised == (report["chosen"] != "exact")


@pytest.mark.slow
def test_with_a_drafter_it_counts_times_and_plans(
    prompts: Path, tmp_path: Path, tiny_teacher: Path, tiny_heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, said = report_of(
        capsys, tiny_teacher, "--drafter", tiny_heads, "--prompts", prompts, "--kv", 512, "--precision", "exact",
        "--out", tmp_path / "bundle",
    )  # fmt: skip
    assert report["ok"] and "[9/9] bench" in said
    assert any(name.startswith("lookup-chain-7") for name in report["gears"])
    assert Bundle.open(tmp_path / "bundle").manifest.planning is not None


def test_what_is_there_is_kept_and_what_has_changed_is_made_again(tmp_path: Path) -> None:
    found = [Stage(str(n), ("plan", str(n)), tmp_path / f"made-{n}", "") for n in range(3)]
    given, other = ({"version": "1", "files": {"MODEL": {"": [n]}}, "options": {}} for n in (1, 2))

    def done(asked: list[Stage] = found, now: dict = given) -> int:
        return Kept(asked, tmp_path, now).done

    assert done() == 0
    for number, stage in enumerate(found[:2]):
        stage.makes.write_text("x")
        Kept(found, tmp_path, given).note(number, done=True)
    assert done() == 2 and done(now=other) == 0
    assert Kept(found, tmp_path, other).changed == "MODEL has changed"
    assert done([found[0], Stage("1", ("other",), found[1].makes, ""), found[2]]) == 1
    # One that was begun is done only where its output appears whole.
    Kept(found, tmp_path, given).note(1, done=False)
    assert done() == 1 and done([found[0], replace(found[1], whole=True)]) == 2
    found[0].makes.unlink()
    assert done() == 0


@pytest.mark.parametrize("text", ["5", "{}", "[5]", '[{"line": ', "", "\udcff"])
def test_a_damaged_note_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RequestError, match=r"stages\.json: damaged .*; remove it, or its folder, to begin again"):
        Kept([], tmp_path, made_from({}, {}))


@pytest.mark.parametrize("text", ["5", '{"ok": ', "", "\udcff"])
def test_a_damaged_report_of_check_is_one_line(tmp_path: Path, text: str) -> None:
    asked = argparse.Namespace(
        model="M", drafter=None, kv="128", device=None, precision="exact", prompts=None, out=tmp_path, batch_size=1,
        int8_drafter=False,
    )  # fmt: skip
    check = next(stage for stage in stages_of(asked, tmp_path) if stage.name == "check")
    check.makes.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RequestError, match=r"check\.json: damaged .*; remove it, or its folder, to begin again"):
        assert check.refuses and check.refuses(check.makes)


def test_a_model_that_has_changed_is_made_again_by_any_path(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Killed after the build: the bundle stays, unless what it was made of has changed."""
    built: list[str] = []

    def stand_in(command: Sequence[str], stdout: IO[bytes]) -> int:
        words = list(command[command.index("draftwood.tools.cli") + 1 :])
        if words[0] != "build":
            return 9
        built.append(words[1])
        (tmp_path / "b").mkdir()
        raise KeyboardInterrupt  # between the folder's last rename and the note

    monkeypatch.setattr(stages.subprocess, "call", stand_in)
    shutil.copytree(tiny_teacher, tmp_path / "teacher")
    monkeypatch.chdir(tmp_path)

    def make_it(*names: str) -> str:
        line = ["make", names[0], "--prompts", names[1], "--kv", "256", "--precision", "exact", "--out", names[2]]
        with contextlib.suppress(KeyboardInterrupt):
            main(line)
        return capsys.readouterr().err

    make_it("teacher", "prompts.jsonl", "b")
    assert "check failed (9)" in make_it(str(tmp_path / "teacher"), str(prompts), str(tmp_path / "b"))
    assert built == [str(tmp_path / "teacher")]
    (tmp_path / "teacher/tokenizer_config.json").write_text("{} ")
    said = make_it("teacher", "prompts.jsonl", "b")
    assert len(built) == 2 and "made again from the first stage on: MODEL (tokenizer_config.json) has changed" in said


def test_a_failed_check_is_one_line_and_nothing_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"graph": "verify-t16", "graphs": "cpu", "quantity": "logits", "where": "step 2", "difference": 1.5e-4}
    fine = wrong | {"difference": 1e-6, "tolerance": 1e-4, "ok": True}
    report = {"ok": False, "controls": [], "comparisons": [fine, wrong | {"tolerance": 1e-4, "ok": False}]}
    found = stages_for(tmp_path, tmp_path / "none", "--precision", "exact")
    ran: list[str] = []

    def stand_in(command: Sequence[str], stdout: IO[bytes]) -> int:
        ran.append(command[command.index("draftwood.tools.cli") + 1])
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b/check.json").write_text(json.dumps(report))
        return int(ran[-1] == "check")

    monkeypatch.setattr(stages.subprocess, "call", stand_in)
    for _ in range(2):  # the second time nothing is run at all
        with pytest.raises(StageError) as caught:
            stages.run(found, tmp_path, made_from({}, {}))
        assert "verify-t16 (cpu), logits at step 2 differs by 1.5e-04, 1.0e-04 are allowed" in str(caught.value)
        assert ran == ["build", "check"]


@pytest.mark.parametrize("missing", ["tokenizer", "memory", "disk", "vocabulary", "positions"])
def test_what_a_later_stage_needs_is_looked_at_first(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], missing: str,
) -> None:  # fmt: skip
    shutil.copytree(tiny_teacher, tmp_path / "teacher")
    size = needs.weight_bytes(Checkpoint.open(tiny_teacher), "exact")
    if missing == "tokenizer":
        (tmp_path / "teacher/tokenizer.json").unlink()
    elif missing == "memory":
        monkeypatch.setattr(needs, "memory", lambda: {"total_bytes": size // 2})
    elif missing == "disk":
        monkeypatch.setattr(needs.shutil, "disk_usage", lambda _: argparse.Namespace(free=1 << 20))
    elif missing == "vocabulary":
        monkeypatch.setattr(needs, "tokenizer_of", lambda _: argparse.Namespace(encode=lambda text: [3, 300]))
    line = ["make", str(tmp_path / "teacher"), "--prompts", str(prompts), "--precision", "exact"]
    line += ["--kv", "512,99968" if missing == "positions" else "256"]
    assert main([*line, "--out", str(tmp_path / "b")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert {
        "tokenizer": "has no tokenizer, and prompts are texts",
        "memory": "cannot run here; choose --precision nbits8",
        "disk": "cannot be written to",
        "positions": "--kv 99968: the teacher knows",
        "vocabulary": "makes token 300 of a text; expected one of the teacher's 300",
    }[missing] in said
    assert not (tmp_path / "b.make").exists()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--kv", "100", "--kv 100: expected a positive multiple of 128"),
        ("--batch-size", "33", "--batch-size 33: expected 1 to 32"),
        ("--device", "ascend-910x", "--device ascend-910x: not known; expected one of ascend-910b1"),
        ("--drafter", "TEACHER", "another language model cannot draft here"),
    ],
)
def test_an_option_that_a_later_stage_refuses_is_refused_at_once(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    option: str, value: str, said: str,
) -> None:  # fmt: skip
    line = ["make", str(tiny_teacher), "--prompts", str(prompts), option, value.replace("TEACHER", str(tiny_teacher))]
    assert main([*line, *(() if option == "--kv" else ("--kv", "256")), "--out", str(tmp_path / "b")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert said in error and not (tmp_path / "b.make").exists()


def test_the_bytes_that_are_said_are_those_that_are_written(tiny_teacher: Path, tmp_path: Path) -> None:
    """Rotary tables aside, which are small."""
    teacher = Checkpoint.open(tiny_teacher)
    for precision in precisions(teacher):
        found = in_precision(teacher, precision)
        held = sum(found.weight(name).numel() * found.weight(name).element_size() for name in found.names())
        assert needs.weight_bytes(teacher, precision) == pytest.approx(held, rel=0.02)


def test_the_precisions_to_ask_for_are_those_there_are() -> None:
    assert get_args(Precision) == PRECISIONS


def test_a_wrong_model_is_told_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make", str(tmp_path / "none"), "--out", str(tmp_path / "b")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "none" in said and not any(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["there", "/"])
def test_where_something_is_nothing_is_made_beside_it(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "there").mkdir()
    before = set(tmp_path.iterdir())
    line = ["make", str(tiny_teacher), "--prompts", str(prompts), "--kv", "256"]
    assert main([*line, "--out", str(tmp_path / out)]) == 2
    assert "exists already; expected a new folder" in capsys.readouterr().err.splitlines()[-1]
    assert set(tmp_path.iterdir()) == before


def test_the_pictures_are_those_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was made again has left those of its earlier trees."""
    for name in ("figures", "planned-2", "planned-9"):
        (tmp_path / f"plan-{name}.png").touch()
    trees = [argparse.Namespace(name=name) for name in ("plain", "planned-2", "lookup-chain-7")]
    bundle = argparse.Namespace(manifest=argparse.Namespace(trees=trees, gears=[]))
    monkeypatch.setattr(Bundle, "open", lambda _: bundle)
    monkeypatch.setattr(make, "read_note", lambda *_: defaultdict(bool))
    pictures = {
        drafter: make._report(argparse.Namespace(out=tmp_path, drafter=drafter), [], tmp_path)["pictures"]
        for drafter in ("heads", None)
    }
    assert pictures == {"heads": [str(tmp_path / f"plan-{name}.png") for name in ("figures", "planned-2")], None: []}


def test_a_stage_that_fails_is_named_with_its_command(
    tiny_teacher: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(stages.subprocess, "call", lambda command, stdout: 2)
    line = ["make", tiny_teacher, "--prompts", prompts, "--kv", 256, "--precision", "exact", "--out", tmp_path / "b"]
    assert main([*map(str, line)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("draftwood: error: build failed (2): draftwood build ")
    assert not (tmp_path / "b").exists()


def test_too_few_prompts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text('{"prompt": "one"}\n')
    assert main(["make", "demo", "--prompts", str(path), "--out", str(tmp_path / "b")]) == 2
    assert "1 conversations; expected at least 4" in capsys.readouterr().err
