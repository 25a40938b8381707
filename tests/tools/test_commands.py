"""build, check, run and bench from the command line, on a tiny teacher."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.bitwise import BitwiseEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.runtime.speculation import step
from draftwood.runtime.trace import Trace
from draftwood.runtime.tuned import bundle_digest
from draftwood.tests.checked import checked
from draftwood.tools.cli import main
from draftwood.tools.commands import deploy
from draftwood.tools.commands.check import QUANTITIES
from draftwood.tools.comparison import check as check_command
from draftwood.tools.comparison.allowed import Allowed
from draftwood.tools.comparison.check import check, sample_prompts
from draftwood.tools.comparison.differences import noise_of
from draftwood.tools.measure.bench import bench
from draftwood.tools.measure.conversations import turn_prompts
from draftwood.tools.measure.runner import Way, decode
from draftwood.tools.prompts import Prompt, read_prompts

CHAT = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"id": "a/1", "prompt": "the cat sat", "conversation": "a", "source": "cats", "turn": 1},
        {"id": "a/2", "prompt": "on the mat", "conversation": "a", "source": "cats", "turn": 2},
        {"id": "b/1", "prompt": "and the hat", "conversation": "b", "source": "hats", "turn": 1},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main([str(argument) for argument in (*arguments, "--json")]) == 0
    return json.loads(capsys.readouterr().out)


def test_build_adds_plain_decoding(tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = output(capsys, "build", tiny_teacher, "--kv", "128", "--out", tmp_path / "b")
    assert report["gears"] == ["plain-kv128"]
    assert Bundle.open(tmp_path / "b").manifest.drafter is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv", "100"], "multiple of 128"),
        (["--kv", "x"], "expected whole numbers"),
        (["--kv", "128", "--target", "tpu"], "--target tpu"),
        (["--kv", "128", "--tree", "chain:3"], "3 levels deep, but there is no --drafter"),
        (["--kv", "128", "--tree", "bush:3"], "bush"),
        (["--kv", "1024"], "knows 512 positions"),
    ],
    ids=["slots", "slots-text", "target", "no-drafter", "tree", "positions"],
)
def test_build_refuses_in_one_line(
    tiny_teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["build", str(tiny_teacher), "--out", str(tmp_path / "b"), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert not list(tmp_path.iterdir())


def test_run_prints_the_same_text_for_every_gear(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": CHAT, "chat_template_kwargs": {"thinking": False}}))
    common = ["run", tiny_bundle, "--chat", tmp_path / "chat.json", "--temperature", "0.8", "--seed", "3"]
    plain, tree = (output(capsys, *common, *gear) for gear in (["--policy", "plain"], ["--policy", "ragged-kv128"]))
    assert tree["token_ids"] == plain["token_ids"] and tree["text"] == plain["text"]
    assert tree["steps"] < plain["steps"] and tree["finish_reason"] == plain["finish_reason"]


def test_run_answers_a_message_as_it_answers_a_file_of_it(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": "the cat sat"}]))
    answers = [output(capsys, "run", tiny_bundle, "--chat", chat) for chat in ("the cat sat", tmp_path / "chat.json")]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["token_ids"] != output(capsys, "run", tiny_bundle, "--prompt", "the cat sat")["token_ids"]


@pytest.mark.parametrize("words", [("run", "--prompt", "the cat"), ("chat",)], ids=["run", "chat"])
def test_a_text_for_a_bundle_without_tokenizer_is_refused_before_graphs_are_opened(
    words: tuple[str, ...],
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    manifest = json.loads((tiny_bundle / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": False}))
    monkeypatch.setattr("draftwood.open", None)
    assert main([words[0], str(tmp_path), *words[1:]]) == 2
    assert "has no tokenizer; " in capsys.readouterr().err


def test_run_ends_the_texts_line_before_the_figures(tiny_bundle: Path) -> None:
    """In a terminal, figures after "see 1" would read as "see 16 tokens"."""
    words = ["run", tiny_bundle, "--prompt", "the cat", "--max-new-tokens", "6"]
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "draftwood.tools.cli", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    ).stdout  # fmt: skip
    assert re.fullmatch(r"(?s).*\n\d+ tokens in [^\n]*\n", shown)


def test_the_first_opening_says_that_it_proves(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real model's takes tens of seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    for _ in range(2):
        assert main(["run", str(tiny_bundle), "--prompt", "the cat", "--max-new-tokens", "2", "--json"]) == 0
        said.append(capsys.readouterr().err)
    assert said == [
        f"draftwood: {tiny_bundle}: first opening here, so every gear is compared with plain decoding once\n", ""
    ]  # fmt: skip


def test_run_falls_back_to_what_there_is_and_counts_it(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No NPU is here, and this bundle has no graphs for one."""
    line = ["run", str(tiny_bundle), "--prompt", "the cat", "--max-new-tokens", "6", "--json"]
    assert main([*line, "--engine", "npu"]) == 2
    capsys.readouterr()
    assert main([*line, "--engine", "npu", "--fallback", "--trace", str(tmp_path / "t.jsonl")]) == 0
    out, err = capsys.readouterr()
    result, trace = json.loads(out), Trace.read(tmp_path / "t.jsonl")
    assert "draftwood: --engine npu: " in err and err.strip().endswith("; decoding with cpu")
    assert result["engine"] == trace.meta["engine"] == "cpu" and result["fallback_steps"] == result["steps"] > 0
    assert main([*line, "--fallback"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert usual["token_ids"] == result["token_ids"] and usual["fallback_steps"] == 0


def test_run_writes_a_trace(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = output(capsys, "run", tiny_bundle, "--prompt", "the cat", "--trace", tmp_path / "t.jsonl")
    trace = Trace.read(tmp_path / "t.jsonl")
    assert len(trace.events) == result["steps"] + 1 and all(event.invariants is None for event in trace.events)
    assert trace.meta["bundle"] == bundle_digest(Bundle.open(tiny_bundle)) and len(trace.meta["prompt"]) == 32
    output(capsys, "run", tiny_bundle, "--prompt", "the cat", "--trace", tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_text_is_printed_although_its_trace_cannot_be_written(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", str(tiny_bundle), "--prompt", "the cat", "--max-new-tokens", "4", "--json"]
    assert main([*line, "--trace", str(tmp_path / "none/t.json")]) == 2
    out, err = capsys.readouterr()
    assert len(json.loads(out)["token_ids"]) == 4 and "none/t.json: cannot be written" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-ids", "1,x"], "whole numbers"),
        (["--prompt-ids", "1,999"], "outside the vocabulary"),
        (["--prompt", "a " * 400], "context is 255"),
        (["--chat", "nowhere.json"], "not a readable JSON file"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--policy", "x"], "it holds plain-kv128"),
        (["--prompt", "a", "--trace", "t.txt"], "t.txt"),
    ],
    ids=["ids", "vocabulary", "context", "chat", "temperature", "gear", "trace"],
)
def test_run_refuses_in_one_line(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["run", str(tiny_bundle), *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_bench_finds_all_turns_identical(
    tiny_bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    options = ["--prompts", prompts, "--max-new-tokens", "24", "--temperature", temperature]
    report = output(capsys, "bench", tiny_bundle, *options, "--policy", "ragged-kv128")
    assert (report["turns"], report["identical"], report["ties"], report["differences"]) == (3, 3, 0, [])
    assert {"mean", "p1", "p50", "p99"} == set(report["speedup"])
    assert report["accept_length"]["mean"] > 1 and 0 < report["host_share"] < 1
    shares = report["accept_by_position"]
    assert shares == sorted(shares, reverse=True) and report["accept_length"]["mean"] == pytest.approx(1 + sum(shares))
    assert set(report["by_source"]) == {"cats", "hats"} and len(report["per_turn"]) == 3


def test_bench_reports_a_difference_that_is_no_tie(
    tiny_bundle: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty acceptance: with more than one row, every fifth bonus is another token."""
    engine = CpuEngine(Bundle.open(tiny_bundle))
    honest = step.accept

    def faulty(state, draft, logits_TV):  # type: ignore[no-untyped-def]
        accepted = honest(state, draft, logits_TV)
        wrong = draft.tree.rows > 1 and state.length % 5 == 0
        return replace(accepted, bonus=(accepted.bonus + 7) % 300) if wrong else accepted

    monkeypatch.setattr(step, "accept", faulty)
    plain, tree = (Policies(engine.bundle, gear) for gear in ("plain-kv128", "ragged-kv128"))
    options = Options(max_new_tokens=24, ignore_eos=True)
    report = bench(engine, read_prompts(prompts), options, plain, tree)
    assert not report["ok"] and report["identical"] < 3 and report["ties"] == 0
    assert all(d["margin"] > d["tolerance"] for d in report["differences"])


def test_the_second_turn_carries_the_first_answer(tiny_bundle: Path, prompts: Path) -> None:
    engine = CpuEngine(Bundle.open(tiny_bundle))
    answers: dict = {}
    contexts = turn_prompts(engine, read_prompts(prompts), answers)
    _, first = next(contexts)
    result = decode(Way(engine, Policies(engine.bundle, "plain")), first, Options(max_new_tokens=8)).result
    answers["a"] = result.token_ids
    _, second = next(contexts)
    text = engine.bundle.tokenizer
    assert text is not None and text.decode(result.token_ids) in text.decode(second)
    assert second[: len(first)] == first


def test_turns_without_room_are_said_and_left_out(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With those that follow them: a long answer must not end a measurement that has taken hours."""
    engine = CpuEngine(Bundle.open(tiny_bundle))
    long, short = "the cat " * 200, "the cat"
    asked = [("a", short), ("a", long), ("a", short), ("b", long), ("c", short)]
    prompts = [Prompt(id=f"{n}", text=text, conversation=name, source="") for n, (name, text) in enumerate(asked)]
    assert [prompt.id for prompt, _ in turn_prompts(engine, prompts, {})] == ["0", "4"]
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[:2] for line in said] == [[f"prompt {n}", " left out with what follows it"] for n in (1, 3)]
    with pytest.raises(RequestError, match=r"no prompt is left: .* context is 255 with the answer; shorten"):
        list(turn_prompts(engine, prompts[3:4], {}))


def test_noise_of_logits(tiny_bundle: Path) -> None:
    bundle, ids = Bundle.open(tiny_bundle), np.random.default_rng(0).integers(2, 300, 60).tolist()
    # fp32 rounding of logits of magnitude 10: of a chain where it has any, else of caches moved by their last bit.
    for engine in (CpuEngine(bundle), OnnxStaticEngine(bundle)):
        noise = noise_of(engine, ids)
        assert 0 < noise.apart < 1e-4 and noise.rows == 7
        # The moved caches' row, whose bits differ on purpose, is none of the chain's.
        assert noise.equal == 7 or isinstance(engine, OnnxStaticEngine)
    assert noise_of(BitwiseEngine(bundle), ids) == (0.0, 7, 7)


def test_check_passes_and_is_stored(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = output(capsys, "check", tiny_bundle)
    assert report == json.loads((tiny_bundle / "check.json").read_text())
    assert report["ok"] and all(c["ok"] for c in report["comparisons"]) and all(c["caught"] for c in report["controls"])
    engines = ("static", "cpu", "bitwise")
    assert {c["graphs"] for c in report["comparisons"]} == {*engines, *(f"{name} blocks" for name in engines)}
    # Chains too, whose mask is causal and whose commits move nothing.
    gears = Bundle.open(tiny_bundle).manifest.gears  # the report is not part of what the manifest vouches for
    assert {c["gear"] for c in report["controls"]} == {gear.name for gear in gears if gear.draft}


def test_check_of_one_engine(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openvino")
    report = checked(tiny_bundle, "openvino")
    said = capsys.readouterr().out
    assert said.endswith("deliberate faults caught\nok\n")
    (allowed,) = (line.split()[1:] for line in said.splitlines() if line.startswith("allowed"))
    assert allowed == ["openvino", *["1e-04"] * 4, "3e-04", "1e-03"]  # no draft cache
    assert report["ok"] and {c["graphs"] for c in report["comparisons"]} == {"openvino"}
    static = {graph.name for graph in Bundle.open(tiny_bundle).manifest.graphs_of("onnx") if graph.kind != "step"}
    assert {c["graph"] for c in report["comparisons"]} >= {name for name in static if "prefill-" in name}
    assert report["mutations"] == report["mutations_caught"] > 10


@pytest.mark.parametrize(("words", "name"), [([], "check-teacher"), (["--engine", "cpu"], "check-teacher-cpu")])
def test_a_report_of_texts_is_named_by_its_engine(
    words: list[str], name: str, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "b", copy_function=os.link)
    for path in (tmp_path / "b").glob("check*.json"):
        path.unlink()
    monkeypatch.setattr("draftwood.tools.reference.transformers.HfEngine.open", lambda *_: None)
    monkeypatch.setattr("draftwood.runtime.engines.choice.open_engine", lambda *_: None)
    monkeypatch.setattr("draftwood.tools.comparison.texts.check_texts", lambda *_: {"ok": True})
    assert main(["check", str(tmp_path / "b"), "--teacher", str(tmp_path), "--json", *words]) == 0
    assert [path.stem for path in (tmp_path / "b").glob("check*.json")] == [name]


def test_check_fails_where_a_graph_computes_something_else(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(tiny_bundle)
    from draftwood.tools.reference import eager as eager_engine

    def wrong(manifest, weights):  # type: ignore[no-untyped-def]
        decoder, drafter = bundle_modules(manifest, weights)
        decoder.layers[1].down.weight = type(decoder.layers[1].down.weight)(decoder.layers[1].down.weight * 1.01, False)
        return decoder, drafter

    bundle_modules = eager_engine.bundle_modules
    monkeypatch.setattr(eager_engine, "bundle_modules", wrong)
    report = check(bundle, list(sample_prompts(bundle, None, 1)), engine="cpu")
    assert not report["ok"] and any(not c["ok"] and c["quantity"] == "logits" for c in report["comparisons"])


def test_a_missed_fault_is_a_failure(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(tiny_bundle)
    lax = dict.fromkeys(QUANTITIES, Allowed(1e9, "so lax that nothing is told apart"))
    monkeypatch.setattr(check_command, "measured", lambda *_: (lax, lax))
    report = check(bundle, list(sample_prompts(bundle, None, 1)), engine="cpu")
    assert all(c["ok"] for c in report["comparisons"]) and not report["ok"]


@pytest.mark.parametrize(
    ("words", "threads"), [(["--replicas", "1:4"], 2), (["--replicas", "2"], 4), (["other=B", "--replicas", "1:4"], 1)]
)
def test_deploy_shares_processors_out_among_all_replicas_that_there_may_be(
    words: list[str], threads: int, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "default_threads", lambda: 8)
    parser = argparse.ArgumentParser()
    deploy.add_arguments(parser)
    deployed = deploy._deployed(parser.parse_args([str(tiny_bundle), *words]), tiny_bundle)
    assert deployed.threads == threads and deploy._enough({"a": deployed, "b": deployed}) == 8  # of one application
    more = parser.parse_args([str(tiny_bundle), "--replicas", "1:4", "--threads", "3"])
    with pytest.raises(RequestError, match="the engines need 12 processors, this machine has 8"):
        deploy._enough({"a": deploy._deployed(more, tiny_bundle)})


@pytest.mark.parametrize("line", ["{}", "[]", "not json", '{"prompt": 3}'])
def test_a_bad_prompt_file_is_named_by_line(
    tmp_path: Path, line: str, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    assert main(["bench", str(tiny_bundle), "--prompts", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err
