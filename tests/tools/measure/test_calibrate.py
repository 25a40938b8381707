"""Calibration by answering: the teacher's own text is counted, whoever runs the jobs."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood.compiler.bundle.staging import exclusive
from draftwood.errors import RequestError, TreeError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy import widest_gear
from draftwood.tools.cli import main
from draftwood.tools.commands.calibrate import executor_of, figures, parse_temperatures
from draftwood.tools.measure.calibrate import CANDIDATES, Job, count, count_all, jobs, visited
from draftwood.tools.prompts import read_prompts
from draftwood.trees.calibration import END, Calibration
from draftwood.trees.calibration_file import read_calibration, write_calibration

TOKENS = 10


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [
        {"id": "a/1", "prompt": "the cat sat", "conversation": "a", "source": "cats"},
        {"id": "a/2", "prompt": "on the mat", "conversation": "a", "source": "cats"},
        {"id": "b", "prompt": "and the hat", "source": "hats"},
        {"id": "c", "prompt": "the mat", "source": "hats"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def work(prompts: Path, tiny_teacher: Path, tiny_heads: Path) -> list[Job]:
    (tiny_heads / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    return jobs(
        read_prompts(prompts),
        tiny_teacher,
        tiny_heads,
        temperatures=(0.0, 0.8),
        max_new_tokens=TOKENS,
        size=2,
    )


def test_what_is_counted_is_what_the_bundle_decodes(prompts: Path, work: list[Job], tiny_bundle: Path) -> None:
    """The rank paths of greedy answers, by the runtime's own engine and drafts, one position after the other."""
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decoding import Decoding
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.runtime.options import Options
    from draftwood.runtime.policy import FixedTree

    engine = CpuEngine(Bundle.open(tiny_bundle))
    text = engine.bundle.tokenizer
    assert text is not None
    options = Options(max_new_tokens=TOKENS)
    counted = Calibration.from_bytes(count(next(job for job in work if len(job.conversations) == 2)), "job")
    prompt = (
        text.encode("the cat sat") if not text.has_chat else text.chat([{"role": "user", "content": "the cat sat"}])
    )
    answer = Decoding(engine, prompt, options, FixedTree(engine.bundle)).run().token_ids
    contexts = counted.contexts
    assert contexts.total > 0 and contexts.depth <= 2 and contexts.width <= CANDIDATES
    whole = [*prompt, *answer]
    lengths = {-(-length // 64) for length in range(len(prompt), len(whole))}
    assert lengths <= set(contexts.steps_N.tolist())
    assert set(counted.tasks) == {"", "cats", "hats"}


def test_every_executor_counts_the_same(work: list[Job]) -> None:
    alone = Calibration()
    done = list(count_all(work, alone, None))
    assert done == work
    with ThreadPoolExecutor(2) as pool:
        shared = Calibration()
        list(count_all(work, shared, pool))
    assert shared == alone and alone.contexts.total > 0 and alone.grouped


def test_a_stopped_run_goes_on_where_it_was(work: list[Job]) -> None:
    whole, part = Calibration(), Calibration()
    list(count_all(work, whole, None))
    for _ in zip(range(1), count_all(work, part, None), strict=False):
        break
    part = Calibration.from_bytes(part.to_bytes())
    left = list(count_all(work, part, None))
    assert len(left) == len(work) - 1 and part == whole
    assert list(count_all(work, part, None)) == []


def test_a_conversation_is_counted_once_among_whatever_others(
    prompts: Path, tiny_teacher: Path, tiny_heads: Path
) -> None:
    """A file of prompts that grows is cut into other jobs."""
    read, asked = read_prompts(prompts), {"temperatures": (0.0,), "max_new_tokens": 2, "size": 2}
    counted = Calibration()
    list(count_all(jobs(read[:3], tiny_teacher, tiny_heads, **asked), counted, None))
    (job,) = count_all(jobs([*read[3:], *read[:3]], tiny_teacher, tiny_heads, **asked), counted, None)
    assert [turns[0].id for turns in job.conversations.values()] == ["c"] and len(counted.sources) == 3


def test_prompts_that_the_teacher_has_no_room_for_are_said(
    prompts: Path, tiny_teacher: Path, tiny_heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"temperatures": (0.0,), "max_new_tokens": 8}
    long = [replace(prompt, text=prompt.text * 400) for prompt in read_prompts(prompts)[3:]]
    (job,) = jobs(long, tiny_teacher, tiny_heads, **asked)
    assert not Calibration.from_bytes(count(job)).contexts.total
    assert "prompt c: left out with what follows it: " in capsys.readouterr().err
    with pytest.raises(RequestError, match="--max-new-tokens 512: the teacher has 512 positions"):
        jobs(long, tiny_teacher, tiny_heads, **asked | {"max_new_tokens": 512})


def test_the_command_and_a_plan_of_what_it_counted(
    prompts: Path, tiny_teacher: Path, tiny_heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_heads / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    stats, plan = tmp_path / "stats.bin", tmp_path / "plan.json"
    options = [tiny_teacher, "--drafter", tiny_heads, "--prompts", prompts, "--max-new-tokens", "40"]
    assert main(["calibrate", *map(str, options), "--out", str(stats)]) == 0
    summary = figures(read_calibration(stats))
    assert f": {summary['contexts']} contexts added, " in capsys.readouterr().out and summary["contexts"] > 20
    assert summary["with_length"] == summary["contexts"] and summary["grouped"]
    assert main(["calibrate", *map(str, options), "--out", str(stats)]) == 0
    assert ": 0 contexts added, " in capsys.readouterr().out
    assert main(["plan", str(stats), "--max-nodes", "5", "--out", str(plan)]) == 0
    trees = json.loads(plan.read_text())["trees"]
    assert trees and all(tree["promise"]["counted"]["tokens"] >= 1 for tree in trees)


def test_counts_of_other_models_are_not_added(
    prompts: Path, tiny_bundle: Path, tmp_path: Path, call: Callable[..., str]
) -> None:
    """Neither to a file of another drafter nor to one that does not say whose counts it holds."""
    options = ["--prompts", prompts, "--max-new-tokens", 4, "--out"]
    stats, unknown = tmp_path / "stats.bin", tmp_path / "unknown.bin"
    assert main(["calibrate", str(tiny_bundle), *map(str, [*options, stats])]) == 0
    before, counted = stats.read_bytes(), read_calibration(stats)
    manifest = Bundle.open(tiny_bundle).manifest
    assert manifest.drafter and counted.models == {
        "teacher": manifest.teacher.digest,
        "drafter": manifest.drafter.digest,
    }
    other = shutil.copytree(tiny_bundle, tmp_path / "other")
    fields = json.loads((other / "manifest.json").read_text())
    fields["drafter"]["digest"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(fields))
    assert "holds counts of another drafter; take another --out" in call("calibrate", other, *options, stats)
    assert stats.read_bytes() == before
    counted.models = {}
    write_calibration(counted, unknown)
    assert "nothing says of which models" in call("calibrate", tiny_bundle, *options, unknown)


def test_a_teachers_answers_are_not_added_to_those_of_another(work: list[Job], tmp_path: Path) -> None:
    """By whichever process they were counted."""
    stats = Calibration()
    stats.merge(Calibration.from_bytes(count(work[0]), "job"))
    assert stats.models == work[0].models and work[0].models.keys() == {"teacher", "drafter"}
    strange = replace(work[1], models={**work[1].models, "teacher": "another"})
    with pytest.raises(TreeError, match="the counts are of two teachers"):
        list(count_all([strange], stats, None))


def test_workers_end_with_the_command_whatever_they_are_at() -> None:
    with pytest.raises(KeyboardInterrupt), executor_of(2) as pool:
        assert pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result() == {signal.SIGINT}
        for _ in range(2):
            pool.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_a_worker_that_is_lost_is_one_line() -> None:
    with pytest.raises(RequestError, match="--workers 2: one has ended, as the system ends"), executor_of(2) as pool:
        pool.submit(os._exit, 1).result()


@pytest.mark.parametrize("text", ["", "warm", "-1", "0,inf", "0,1000", "nan"])
def test_temperatures_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="--temperature"):
        parse_temperatures(text)


def test_refusals(tiny_teacher: Path, tiny_bundle: Path, tmp_path: Path, call: Callable[..., str]) -> None:
    out = ["--out", str(tmp_path / "stats.bin")]
    assert "if it is a teacher, give --drafter" in call("calibrate", tiny_teacher, *out)
    assert "no drafter; expected a folder with" in call("calibrate", tiny_teacher, "--drafter", tmp_path, *out)
    assert "is a bundle, which answers here" in call("calibrate", tiny_bundle, "--workers", 0, *out)
    assert not (tmp_path / "stats.bin").exists()


def test_counts_that_another_process_adds_to_are_left_alone(tmp_path: Path, call: Callable[..., str]) -> None:
    """Both would read the file, and the one that writes last would drop what the other has counted."""
    out = tmp_path / "stats.bin"
    with ThreadPoolExecutor(1) as other, exclusive(out):  # of this thread it would be the same owner's
        refusal = other.submit(call, "calibrate", tmp_path, "--out", out).result()
    assert "stats.bin: process " in refusal and "is writing it; wait until it is done, or choose another" in refusal


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must be refused, and returns its one line."""

    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        return error[-1]

    return run


def test_contexts_are_those_at_which_a_decoding_stands() -> None:
    """Half of a text at one token a step, half at three: steps are counted, not positions."""
    text = [()] * 6 + [(0, 0)] * 6
    at = [place for _, place in visited({0: text})]
    assert at == [0, 1, 2, 3, 4, 5, 6, 9]  # a step of two accepted drafts and the bonus passes over two
    accepted = sum(len(text[place]) for place in at)
    assert len(text) / len(at) == 1 + accepted / len(at)


def test_unknown_contexts_are_passed_and_not_counted() -> None:
    assert list(visited({7: [(0,), (0,), None, None]})) == [(7, 0)]
    assert list(visited({7: [None]})) == []


def test_a_turn_counts_again_if_an_earlier_one_has_changed(prompts: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    """Its own text is the same, and what stands before it is not."""
    stats = tmp_path / "stats.bin"
    words = ["calibrate", str(tiny_bundle), "--prompts", str(prompts), "--max-new-tokens", "8", "--out", str(stats)]
    assert main(words) == 0 and len(read_calibration(stats).sources) == 4
    prompts.write_text(prompts.read_text().replace("the cat sat", "the hat sat"))
    assert main(words) == 0 and len(read_calibration(stats).sources) == 6


def test_a_bundle_counts_what_its_own_steps_accept(
    prompts: Path, tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted against the accept lengths that `bench` sees on the same turns: they must agree exactly."""
    stats = tmp_path / "stats.bin"
    options = [str(tiny_bundle), "--prompts", str(prompts), "--max-new-tokens", "24"]
    assert main(["calibrate", *options, "--out", str(stats)]) == 0
    capsys.readouterr()
    widest = ["--policy", widest_gear(Bundle.open(tiny_bundle))]
    assert main(["bench", *options, *widest, "--json"]) == 0
    turns = json.loads(capsys.readouterr().out)["per_turn"]
    accepted = [length for turn in turns for length in turn["speculative"]["accepted"]]
    counted = read_calibration(stats)
    summary = figures(counted)
    assert summary["contexts"] == counted.contexts.total == len(accepted) > 10
    lengths_N = 1 + (counted.contexts.ranks_ND != END).sum(1)
    assert lengths_N @ counted.contexts.counts_N == sum(accepted)
    assert summary["with_length"] == summary["contexts"] and summary["grouped"]
    assert main(["calibrate", *options, "--out", str(stats)]) == 0
    assert ": 0 contexts added, " in capsys.readouterr().out


def test_what_a_bundle_looks_up_is_not_counted(prompts: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    """Its largest tree is looked up: the drafter's is counted, as a bundle with no other counts it."""
    counted = []
    for name, change in (("both", {"draft": "lookup"}), ("alone", None)):
        folder, stats = shutil.copytree(tiny_bundle, tmp_path / name), tmp_path / f"{name}.stats"
        fields = json.loads((folder / "manifest.json").read_text())
        ragged = [gear for gear in fields["gears"] if gear["tree"] == "ragged"]
        for gear in ragged:
            gear.update(change or {})
        fields["gears"] = [gear for gear in fields["gears"] if change or gear not in ragged]
        (folder / "manifest.json").write_text(json.dumps(fields))
        options = ["--prompts", str(prompts), "--max-new-tokens", "24", "--out", str(stats)]
        assert main(["calibrate", str(folder), *options]) == 0
        counted.append(read_calibration(stats).contexts)
    assert counted[0].total == counted[1].total > 10 and counted[0].width == counted[1].width == 1


@pytest.mark.slow
def test_a_clusters_processes_and_the_job_may_be_killed(
    prompts: Path,
    work: list[Job],
    tiny_teacher: Path,
    tiny_heads: Path,
    head: Callable[..., Any],
    encrypted: None,
    tmp_path: Path,
) -> None:
    """Every conversation is counted once, whatever ends meanwhile: as by this process alone."""
    pytest.importorskip("ray", reason="needs the extra cluster")
    rows = [{"id": f"{n}", "prompt": f"the cat sat on the mat {n}", "source": "cats"} for n in range(80)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["calibrate", str(tiny_teacher), "--drafter", str(tiny_heads), "--prompts", str(prompts)]
    arguments += ["--max-new-tokens", "100", "--out"]
    assert main([*arguments, str(tmp_path / "alone")]) == 0
    command = [sys.executable, "-P", "-m", "draftwood.tools.cli", *arguments, str(tmp_path / "spread")]
    with head("token") as (address, first):
        for stopped in (True, False):
            job = subprocess.Popen([*command, "--workers", address], stderr=subprocess.PIPE, text=True)
            assert job.stderr is not None
            assert any(" of " in line for line in job.stderr)
            if stopped:
                job.kill()
            else:
                while not (calls := calls_of(first)):  # one has ended, and the next has not begun
                    assert job.poll() is None
                    time.sleep(0.01)
                os.kill(calls[0], signal.SIGKILL)
            job.communicate(timeout=300)
            assert stopped or job.returncode == 0
    spread = read_calibration(tmp_path / "spread")
    assert spread.to_bytes() == read_calibration(tmp_path / "alone").to_bytes()
    assert len(spread.sources) == 80


def calls_of(first: int) -> list[int]:
    """Ray's processes below one that make a call now."""
    found, calls = [first], []
    for process in found:
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{process}/cmdline").read_text().startswith("ray::count"):
                calls.append(process)
            for thread in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, thread.read_text().split())
    return calls
