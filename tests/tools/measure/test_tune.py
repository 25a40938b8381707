"""Times of `tune`, and the part that it keeps."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.policy import Gears, Learned
from draftwood.runtime.tuned import keep_times, tuned_file, tuned_times
from draftwood.tools.cli import main
from draftwood.tools.commands import tune as tune_command
from draftwood.tools.measure.tune import IN_A_ROW, LEAST_ROUNDS, time_gears, tune


def test_what_a_late_token_takes_is_timed_where_the_drafter_has_caches(tiny_bundles: dict[str, Path]) -> None:
    late = {
        name: [time.late for time in tune(CpuEngine(Bundle.open(folder)), 0.01) if time.late]
        for name, folder in tiny_bundles.items()
    }
    assert late == {"medusa": [], "eagle3": [32], "fasteagle": [32]}


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "fasteagle"])
def test_steps_of_several_texts_are_timed_as_a_decoding_takes_them(
    kind: str, tiny_bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gear after both lengths; each text is committed, and set back when there is no room."""
    engine = CpuEngine(Bundle.open(tiny_bundles[kind]), Opening(threads=1))
    seen: dict[str, list[list[int]]] = {gear.name: [] for gear in engine.bundle.manifest.gears}
    honest = engine.step

    def step(states, gears):  # type: ignore[no-untyped-def]
        (name,) = {gear.name for gear in gears}
        seen[name].append([state.length for state in states])
        found = honest(states, gears)
        for state in states:
            state.check()
        return found

    monkeypatch.setattr(engine, "step", step)
    for gear in engine.bundle.manifest.gears:
        found = time_gears(engine, [(gear, 20), (gear, gear.slots - 12)], 3, 0.0)
        assert found.keys() == {(gear.name, 20), (gear.name, gear.slots - 12)} and min(found.values()) > 0
        lengths = seen[gear.name]
        assert len(lengths) == LEAST_ROUNDS * IN_A_ROW * 2 and all(len(one) == 3 for one in lengths)
        assert all(min(one) == 20 for one in lengths[:: 2 * IN_A_ROW]) and lengths[1] > lengths[0]


def test_every_time_is_of_whole_steps(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one text: an engine may have other launches for them than for their parts, one by one."""
    engine = CpuEngine(Bundle.open(tiny_bundle), Opening(threads=1))
    seen, honest = Counter[tuple[str, int]](), engine.step

    def step(states, gears):  # type: ignore[no-untyped-def]
        seen[gears[0].name, len(states)] += 1
        return honest(states, gears)

    monkeypatch.setattr(engine, "step", step)
    tune(engine, 0.0, (2,))
    names = {gear.name for gear in engine.bundle.manifest.gears}
    assert seen == dict.fromkeys(((name, count) for name in names for count in (1, 2)), 2 * LEAST_ROUNDS * IN_A_ROW)


def test_tuned_times_are_kept_for_this_bundle_and_machine(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tune_command, "SECONDS", 0.1)
    bundle = Bundle.open(tiny_bundle)
    assert tuned_times(bundle, "cpu", 1) == () and not Learned(Gears.of(bundle)).times(1).absolute
    assert main(["tune", str(tiny_bundle), "--engine", "cpu", "--threads", "1"]) == 0
    times = tuned_times(bundle, "cpu", 1)
    shown = [line.split()[:5] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert shown == [[o.gear, str(o.texts), str(o.length), str(o.late), f"{o.us / 1000:.3f}"] for o in times]
    assert {one.gear for one in times} == {gear.name for gear in bundle.manifest.gears}
    learned = Learned(Gears.of(bundle, times))
    gears, alone = {one.gear for one in times}, learned.times(1)
    assert {one.texts for one in times} == {1, 2, 4}
    for texts in (1, 2, 3, 4):
        table = learned.times(texts)
        assert table.absolute and (texts == 1 or any(table.us(gear, 0) != alone.us(gear, 0) for gear in gears))
    assert tuned_times(bundle, "cpu", 2) == () == tuned_times(bundle, "npu", 1)
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    fields = json.loads((other / "manifest.json").read_text())
    fields["provenance"]["draftwood"] = "another"
    (other / "manifest.json").write_text(json.dumps(fields))
    assert tuned_times(Bundle.open(other), "cpu", 1) == ()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")  # nobody makes a folder there
    monkeypatch.setattr("draftwood.tools.measure.tune.tune", None)
    assert main(["tune", str(tiny_bundle)]) == 2
    assert "set XDG_CACHE_HOME to a folder of yours" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"\xff\xfe"])
def test_a_damaged_cache_is_no_cache(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle = Bundle.open(tiny_bundle)
    keep_times(bundle, "cpu", 1, ())
    tuned_file(bundle, "cpu", 1).write_bytes(content)
    assert tuned_times(bundle, "cpu", 1) == ()


@pytest.mark.parametrize("change", ["us", "late", "fifo", "folder", "large", "deep"])
def test_a_cache_that_is_no_file_of_step_times_is_none(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundle = Bundle.open(tiny_bundle)
    times = [StepTime(gear=gear.name, length=1, us=10.0) for gear in bundle.manifest.gears]
    path = keep_times(bundle, "cpu", 1, times)
    assert tuned_times(bundle, "cpu", 1) == tuple(times)
    text = path.read_text()
    if change in ("fifo", "folder"):
        path.unlink()
        os.mkfifo(path) if change == "fifo" else path.mkdir()
    else:
        wild = {
            "us": text.replace("10.0", "1e300"),
            "late": text.replace('"late": 0', '"late": -1'),
            "large": text + " " * (1 << 20),
            "deep": "[" * 100_000,
        }[change]
        assert wild != text
        path.write_text(wild)
    assert tuned_times(bundle, "cpu", 1) == ()
