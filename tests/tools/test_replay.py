"""Recorded texts and policies over them; what `tune` keeps."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from draftwood.planned import StepTime
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.policy import Gears, Outcome, Policies, policy_for
from draftwood.runtime.policy.tuned import keep_times, tuned_file, tuned_times
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.trace import Trace
from draftwood.tools.cli import main
from draftwood.tools.lab.counting import widest_gear
from draftwood.tools.lab.replay import Replay, Text, read_surveys, report
from draftwood.tools.lab.survey import survey
from draftwood.tools.lab.timer import tune

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=11)}


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def engine(request: pytest.FixtureRequest, tiny_bundle: Path, tiny_draft_bundles: dict[str, Path]) -> CpuEngine:
    bundle = Bundle.open({"medusa": tiny_bundle, **tiny_draft_bundles}[request.param])
    if any(tree.file is None for tree in bundle.manifest.trees):
        fixed = tuple(gear for gear in bundle.manifest.gears if gear.tree != "budget")
        object.__setattr__(bundle, "manifest", msgspec.structs.replace(bundle.manifest, gears=fixed))
    return CpuEngine(bundle)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_replayed_gear_accepts_what_it_accepted_live(engine: CpuEngine, sampling: Sampling, tmp_path: Path) -> None:
    """Step by step, as far as the live path is one of the survey's tree: beyond it nothing is known."""
    prompt, options = list(range(5, 45)), Options(max_new_tokens=60, sampling=sampling, ignore_eos=True)
    times = tune(engine, 0.01)
    survey(engine, prompt, options, times).write(tmp_path / "a.jsonl")
    gears, (text,) = read_surveys([tmp_path / "a.jsonl"])
    assert text.greedy == sampling.greedy and len(text.events) == 59
    drafter = engine.bundle.manifest.drafter
    surveyed = engine.bundle.trees[engine.bundle.gear(widest_gear(engine.bundle)).tree][0].paths
    for gear in (gear for gear in engine.bundle.manifest.gears if gear.slots == 128):
        trace, replayed = Trace(), Trace()
        Decoding(engine, prompt, options, policy_for(engine.bundle, gear.name), trace).run()
        live = [(event.position, event.path) for event in trace.events if event.kind != "prefill"]
        found = Replay(gears).run(_Noted(Replay(gears).policy(gear.name, text), replayed := []), text)
        known = len(replayed) - 1
        if drafter.kind == "eagle3":  # ranks no levels: where the survey's tree ends, another's tokens are unknown
            known = next((i for i, (_, path) in enumerate(live) if path and path not in surveyed), known)
        assert [(one.length, one.path) for one in replayed][:known] == live[:known] and known >= 5
        assert found.steps == len(replayed)
        assert found.unknown <= found.steps / 2 or drafter.kind == "eagle3"


class _Noted:
    """A policy whose outcomes are kept."""

    def __init__(self, policy: object, outcomes: list[Outcome]) -> None:
        self._policy, self._outcomes = policy, outcomes

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)

    def observe(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._policy.observe(outcome)


def test_an_oracle_is_no_slower_than_any_policy(engine: CpuEngine, tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.jsonl" for seed in range(3)]
    for seed, path in enumerate(paths):
        options = Options(max_new_tokens=40, sampling=Sampling(temperature=0.6, seed=seed), ignore_eos=True)
        survey(engine, list(range(5, 25)), options, tune(engine, 0.01)).write(path)
    gears, texts = read_surveys(paths[:1])
    texts += [Text(path.stem, False, Trace.read(path).events) for path in paths[1:]]
    found = report(gears, texts)
    every = [one["speedup"] for part in ("gears", "policies") for one in found[part].values()]
    assert found["speedup_oracle"] >= max(every) and found["speedup_oracle"] >= found["speedup_best_single_each_text"]
    assert found["gears"][found["best_single"]]["regret"] == pytest.approx(0)
    for one in (found["gears"] | found["policies"]).values():
        assert sum(one["share"].values()) == pytest.approx(1) and one["regret"] > -1


def test_the_command_records_and_replays(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"{i}", "prompt": "the cat", "conversation": f"{i}", "source": "cats", "turn": 1} for i in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = ["--prompts", str(prompts)]
    arguments = ["replay", "--record", str(tiny_bundle), "--out", str(tmp_path / "texts"), *made]
    assert main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["texts"] == 2 and first["tokens"] == 230
    files = sorted(map(str, (tmp_path / "texts").iterdir()))
    assert main(["replay", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert main(["replay", *files]) == 0
    assert "best gear in hindsight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay"], "expected recorded texts"),
        (["replay", "{trace}"], "has no draft at every position"),
        (["replay", "--record", "{bundle}"], "--record BUNDLE and --out DIR go together"),
        (["replay", "{nowhere}"], "cannot be read"),
        (["run", "{bundle}", "--prompt-ids", "5", "--policy", "fixed"], "it holds"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], message: str, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trace().write(tmp_path / "trace.jsonl")
    places = {"trace": tmp_path / "trace.jsonl", "bundle": tiny_bundle, "nowhere": tmp_path / "none.jsonl"}
    assert main([argument.format(**places) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_what_a_late_token_takes_is_timed_where_the_drafter_has_caches(
    tiny_bundle: Path, tiny_draft_bundles: dict[str, Path]
) -> None:
    late = {
        name: [time.late for time in tune(CpuEngine(Bundle.open(folder)), 0.01) if time.late]
        for name, folder in {"medusa": tiny_bundle, **tiny_draft_bundles}.items()
    }
    assert late == {"medusa": [], "eagle3": [32], "fasteagle": [32]}


def test_tuned_times_are_kept_for_this_bundle_and_machine(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = Bundle.open(tiny_bundle)
    assert tuned_times(bundle, "cpu", 1) == () and not Gears.of(bundle).times.absolute
    assert main(["tune", str(tiny_bundle), "--engine", "cpu", "--threads", "1"]) == 0
    times = tuned_times(bundle, "cpu", 1)
    shown = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert shown == [[o.gear, str(o.length), str(o.late), f"{o.us / 1000:.3f}"] for o in times]
    assert {one.gear for one in times} == {gear.name for gear in bundle.manifest.gears}
    assert Policies(bundle, times=times).gears.times.absolute
    assert tuned_times(bundle, "cpu", 2) == () == tuned_times(bundle, "npu", 1)
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    fields = json.loads((other / "manifest.json").read_text())
    fields["provenance"]["draftwood"] = "another"
    (other / "manifest.json").write_text(json.dumps(fields))
    assert tuned_times(Bundle.open(other), "cpu", 1) == ()


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
