"""Every probe of the hour on a device: executed against what stands in for one, and failed once by a planted fault."""

import copy
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.sources import Sources
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.environment import torch_npu_installed
from draftwood.tools.demo import resolve
from draftwood.tools.doctor import npu_probe, npu_report, npu_steps, ranks_probe
from draftwood.tools.doctor.npu_models import MODELS, make
from draftwood.tools.doctor.npu_probe import PROBES, kernel_engines, verdict
from draftwood.tools.doctor.npu_report import PIECES, describe, operators, tried, two_devices
from draftwood.tools.doctor.npu_steps import BUNDLES, TrialCommand, steps
from draftwood.tools.tokenizers import tokenizer_of
from draftwood.trees import Topology

needs_converters = pytest.mark.skipif(not torch_npu_installed(), reason="needs the torch_npu package")


def test_the_report_asks_every_probe() -> None:
    assert {*PIECES} == {*PROBES}


@pytest.mark.parametrize("name", PROBES)
def test_each_probe_sees_a_result_that_is_wrong(name: str) -> None:
    def wrong(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *given: tuple(result + 1 for result in module(*given))

    def refuses(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
        raise RuntimeError("EZ9999: no kernel\nmore lines")

    good = verdict(name, "cpu", made=lambda module: module)
    assert good.works and good.seen == "as on the host"
    bad = verdict(name, "cpu", made=wrong)
    assert not bad.works and bad.seen.startswith("result 0 differs by")
    assert (lambda one: (one.works, one.seen))(verdict(name, "cpu", made=refuses)) == (False, "EZ9999: no kernel")


def test_a_right_result_of_the_ai_cpu_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_probe, "kernels_of", lambda *_: {"TopKV2": "AI_CPU and AI_VECTOR_CORE"})
    found = verdict("topk-bf16", "cpu", made=lambda module: module)
    assert not found.works and found.seen == "as on the host; TopKV2 on AI_CPU and AI_VECTOR_CORE"


def test_a_cache_that_is_not_written_is_seen() -> None:
    def copies(module: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *given: module(*(value.clone() for value in given))

    found = verdict("in-place", "cpu", made=copies)
    assert not found.works and found.seen.startswith("result 3 differs")


@needs_converters
def test_the_attention_is_tried_as_the_graphs_have_it(npu_bundle: Path) -> None:
    """In their layout, under a mask of their form."""
    operator, probe = torch.ops.npu.npu_fused_infer_attention_score.default, PROBES["attention-16"]()
    (tried,) = torch.export.export(probe.module, probe.inputs).graph.find_nodes(op="call_function", target=operator)
    graph = Graph.load(npu_bundle / "npu" / "verify-t7-kv128.air")
    used = [node for node in graph.nodes.values() if node.type == "FusedInferAttentionScore"]
    assert len(used) == 2
    for node in used:
        assert {name: node.attributes[name] for name in ("input_layout", "sparse_mode")} == {
            name: tried.kwargs[name] for name in ("input_layout", "sparse_mode")
        }
        masked = node.input("atten_mask")
        assert masked is not None
        ((dtype, shape),) = shapes(graph)[masked.node]
        assert (dtype, shape[:2]) == (probe.inputs[3].dtype, probe.inputs[3].shape[:2]) == (torch.bool, (1, 1))


@needs_converters
def test_a_probe_goes_torchairs_way() -> None:
    assert verdict("slices", "cpu").works


def test_the_core_of_a_kernel_is_the_profilers(tmp_path: Path) -> None:
    path = tmp_path / "kernel_details.csv"
    path.write_text(
        "Name,Type,Accelerator Core,Duration(us)\nTopKV2_1,TopKV2,AI_CPU,812.5\nAdd_2,Add,AI_VECTOR_CORE,2.1\n"
        "Cast_1,Cast,AI_CPU,90\nCast_2,Cast,AI_VECTOR_CORE,1.9\n"
    )
    cores = {"TopKV2": "AI_CPU", "Add": "AI_VECTOR_CORE", "Cast": "AI_CPU and AI_VECTOR_CORE"}
    assert kernel_engines(path) == cores


def test_two_devices_add_up() -> None:
    """Over gloo instead of HCCL."""
    (good,) = two_devices("gloo")
    assert good["works"] and good["seen"] == "sum 3.0, parts [1.0, 2.0]", good


def test_two_devices_that_do_not_meet_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing backend ends a rank, and ranks that end at once are a verdict.

    The rank has a process of its own: torch counts a group that could not be made, and names the next one otherwise.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = [sys.executable, "-P", "-m", ranks_probe.__name__, "nothing"]
    ended = subprocess.run(words, env=os.environ | alone, capture_output=True, text=True, timeout=60)
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode and last.startswith(("AssertionError", "ValueError")) and "nothing" in last, ended.stderr
    monkeypatch.setattr(npu_report, "RANKS_PROBE", "draftwood.tools.doctor.no_probe")
    (bad,) = two_devices("gloo")
    assert not bad["works"] and bad["ability"]


def test_how_a_command_ended(tmp_path: Path) -> None:
    def python(code: str, limit_s: float = 60) -> dict[str, Any]:
        return tried([sys.executable, "-c", code], limit_s)

    assert python("print('{\"a\": 1}')")["json"] == {"a": 1}
    written = tmp_path / "report.json"
    command = [sys.executable, "-c", f"open({str(written)!r}, 'w').write('[2]')"]
    assert tried(command, 60, written)["json"] == [2]
    assert "json" not in tried([sys.executable, "-c", "print(3)"], 60, written)  # what is old is not shown
    failed = python("import sys; print('x' * 9000); sys.exit('no device')")
    assert failed["code"] == 1 and failed["said"].endswith("no device\n") and len(failed["said"]) == 1500
    assert python("import time; time.sleep(60)", 0.2)["said"] == "took longer than 0.2 s"
    assert "No such file" in tried(["/no/such/program"], 1)["said"]


def test_the_steps_are_draftwoods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each gets as far as what it needs and does not find here: none is misspelt."""
    from draftwood.tools.cli import main

    monkeypatch.setattr(npu_steps.shutil, "which", lambda name: name)
    found = {step.name: step for step in steps(tmp_path, npus=3)}
    assert len(found) == len(steps(tmp_path, npus=3)) and "check split" not in {s.name for s in steps(tmp_path, 2)}
    assert [*found][:6] == [
        "make small",
        "build medusa",
        "check medusa npu",
        "atc medusa",
        "check medusa acl",
        "build eagle3",
    ]
    assert {"check wide npu", "check wide-w8a8 npu", "check wide-8 npu", "check eagle3 npu", "msprof wide"} <= {*found}
    made = {tmp_path / "models" / name for name in MODELS} | {tmp_path / name for name in (*BUNDLES, "demo", "split")}
    assert {step.needs for step in found.values()} <= made | {
        tmp_path / n / "npu" / "om" for n in ("medusa", "wide")
    } | {None}
    for step in found.values():
        if step.command[1:4] == ("-P", "-m", "draftwood.tools.cli") and step.needs is not None:
            assert main([*step.command[4:]]) == 2, step.name
            assert str(tmp_path) in capsys.readouterr().err, step.name
            # The bundles are for an NPU alone, and only some commands can take one.
            assert step.needs not in {tmp_path / name for name in BUNDLES} or "--engine" in step.command, step.name
    assert main([*found["check split"].command[-4:]]) == 2
    atc = [step.command for step in steps(tmp_path, 1, "Ascend910_9391") if step.name.startswith("atc ")]
    assert len(atc) == 2 and all("SOC_VERSION=Ascend910_9391" in command for command in atc)


def test_the_steps_work_in_a_folder_with_a_blank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR may name any; a path is one argument, also of the command that msprof is given."""
    monkeypatch.setattr(npu_steps.shutil, "which", lambda name: name)
    folder = tmp_path / "a blank"
    for step in steps(folder, npus=3):
        *words, last = step.command
        parts = [*words, *(shlex.split(last.partition("=")[2]) if last.startswith("--application=") else [last])]
        assert not [part for part in parts if str(tmp_path) in part and str(folder) not in part], step.name
        assert any(str(folder) in part for part in parts), step.name


@needs_converters
@pytest.mark.parametrize("drafter", ["medusa", "eagle3"])
def test_the_hours_models_are_read(drafter: str, tmp_path: Path) -> None:
    """Names and shapes of all tensors fit; the wide ones differ in sizes alone."""
    make("small", tmp_path / "small")
    request = BuildRequest(
        model=tmp_path / "small",
        drafter=tmp_path / "small" / drafter,
        trees=(("plain", Topology.plain()),),
        slots=(128,),
    )
    sources = Sources.open(request)
    assert sources.draft_model is not None and sources.draft_model.kind == drafter
    assert tokenizer_of(tmp_path / "small").encode("The cat") and sources.teacher.config.head_dim == 64
    for name in ("wide", "wide-8"):
        shape, changed = MODELS[name]
        fields = json.loads((resolve(shape) / "config.json").read_text()) | changed
        assert (fields["hidden_size"], fields["num_attention_heads"], fields["vocab_size"]) == (4096, 32, 151936)
    assert MODELS["wide-8"][1]["num_key_value_heads"] == 4


def step(name: str, code: str, needs: Path | None = None, limit_s: float = 60) -> TrialCommand:
    return TrialCommand(name, (sys.executable, "-c", code), limit_s, needs=needs)


def hour(
    monkeypatch: pytest.MonkeyPatch, given: list[TrialCommand], minutes: float = 60, pieces: int = 2
) -> tuple[dict, list]:
    """The report of a machine with two NPUs, and all that was kept on the way."""
    kept: list[dict] = []
    monkeypatch.setattr(npu_report, "PIECES", PIECES[:pieces])
    monkeypatch.setattr(npu_report, "probed", lambda *_, **__: [{"ability": "it", "works": True, "seen": "well"}])
    monkeypatch.setattr(npu_report, "steps", lambda folder, npus, chip: given)
    doctor = {"ascend": {"npus": 2, "chips": [], "npu_device_files": 2}}
    return npu_report.npu_report(doctor, lambda found: kept.append(copy.deepcopy(found)), minutes), kept


def test_a_failed_step_ends_nothing_but_what_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = [
        step("fails", "raise SystemExit('no device')"),
        step("needs", "", tmp_path / "bundle"),
        step("goes", "print(1)"),
    ]
    found, _ = hour(monkeypatch, given)
    fails, needs, goes = found["commands"]
    assert fails["code"] == 1 and needs == {"name": "needs", "left_out": "bundle is not there"} and goes["json"] == 1
    assert "works  goes, " in describe(found) and "no     needs, bundle is not there" in describe(found)
    assert len(found["probes"]["graphs"]) == 2 and found["probes"]["ranks"] and found["probes"]["acl"]


def test_the_report_says_at_every_moment_what_ran_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [step("first", "print(1)"), step("second", "print(2)")]
    _, kept = hour(monkeypatch, given)
    assert [one["running"] for one in kept] == [
        *(f"probe {piece}" for piece in PIECES[:2]), "probe of AscendCL", "two devices", "first", "second", None
    ]  # fmt: skip
    before_second = kept[-2]
    assert before_second["left"] == [] and [one["name"] for one in before_second["commands"]] == ["first"]
    assert kept[0]["left"][-2:] == ["first", "second"] and kept[0]["probes"]["graphs"] == []


def test_what_is_not_begun_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = hour(monkeypatch, [step("late", "print(1)")], minutes=0)
    assert found["commands"] == [{"name": "late", "left_out": npu_report.OVER}]
    assert all(verdict["seen"] == npu_report.OVER for verdict in found["probes"]["graphs"])


def test_a_killed_doctor_leaves_what_it_has_found(tmp_path: Path) -> None:
    """Killed while a step runs: the file names the step, and holds the one before."""
    code = f"""
import sys, time
from pathlib import Path
from draftwood.tools.commands import doctor
from draftwood.tools.doctor import npu_report
from draftwood.tools.doctor.npu_steps import TrialCommand

npu_report.PIECES = ()
npu_report.probed = lambda *_, **__: []
waits = f"open({str(tmp_path / "begun")!r}, 'w'); import time; time.sleep(600)"
lines = (("one", "print(1)"), ("two", waits))
npu_report.steps = lambda *_: [TrialCommand(name, (sys.executable, "-c", line), 60) for name, line in lines]
doctor.report = lambda: {{"ascend": {{"npus": 1, "chips": [], "npu_device_files": 1}}}}
from draftwood.tools.cli import main
main(["doctor", "--npu", {str(tmp_path / "report.json")!r}])
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("two"):
            break
    process.kill()
    process.communicate()
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["running"] == "two" and [one["json"] for one in found["commands"]] == [1]


def test_a_step_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    """One that holds the pipes open would hold the hour, too."""
    started = tmp_path / "pid"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    begun = time.monotonic()
    assert tried([sys.executable, "-c", code], 5)["said"] == "took longer than 5 s"
    if started.exists() and (process := started.read_text()):  # on a busy machine it may not have begun
        while not _ended(process):
            assert time.monotonic() - begun < 300
            time.sleep(0.01)


def _ended(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_operators_are_those_of_msprof(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "op_statistic_0_1.csv").write_text(
        "OP Type,Core Type,Count,Total Time(us)\nMatMulV2,AI_CORE,68,9\n"
    )
    assert operators(tmp_path)[0]["Core Type"] == "AI_CORE" and operators(tmp_path / "none") == []
