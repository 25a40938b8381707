"""Every probe of the hour on a device: executed against what stands in for one, and failed once by a planted fault."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import shapes
from draftwood.environment import torch_npu_installed
from draftwood.tests import fixtures
from draftwood.tools.demo import fetch
from draftwood.tools.lab import npu_probe, npu_report
from draftwood.tools.lab.npu_probe import PROBES, kernel_engines, verdict
from draftwood.tools.lab.npu_report import PIECES, demo_commands, describe, operators, tried, two_devices

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
    monkeypatch.setattr(npu_probe, "kernels_of", lambda *_: {"TopKV2": "AI_CPU"})
    found = verdict("topk-bf16", "cpu", made=lambda module: module)
    assert not found.works and found.seen == "as on the host; TopKV2 on AI_CPU"


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
    )
    assert kernel_engines(path) == {"TopKV2": "AI_CPU", "Add": "AI_VECTOR_CORE"}


def test_two_devices_add_up() -> None:
    """Over gloo in place of HCCL; a backend that is not there is told."""
    (good,) = two_devices("gloo")
    assert good["works"] and good["seen"] == "sum 3.0, parts [1.0, 2.0]", good
    (bad,) = two_devices("nothing")
    assert not bad["works"]


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


def test_the_demos_commands_are_draftwoods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each gets as far as what it needs and does not find here: none is misspelt."""
    monkeypatch.setattr(fetch, "model", lambda: fixtures.TEACHER)
    from draftwood.tools.cli import main

    commands = demo_commands(tmp_path, npus=3)
    names = (
        "build",
        "check",
        "bench npu",
        "check captured",
        "bench captured",
        "profile",
        "modelled",
        "atc",
        "check om",
    )
    assert [*commands][:10] == [*names, "bench acl"]
    command, _, written = commands["modelled"]
    assert main(command[3:]) == 0 and json.loads(written.read_text())["source"] == "modelled"
    capsys.readouterr()
    for name in ("check", "bench npu", "profile", "bench acl"):
        assert main(commands[name][0][3:]) == 2 and "bundle" in capsys.readouterr().err
    assert main(commands["check split"][0][-4:]) == 2 and "split" in capsys.readouterr().err
    assert "build split" in commands and "check split" not in demo_commands(tmp_path, npus=2)


def test_the_report_on_a_machine_with_an_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    verdicts = [{"ability": "it", "works": True, "seen": "as on the host"}]
    monkeypatch.setattr(npu_report, "probed", lambda module, *_: verdicts)
    monkeypatch.setattr(
        npu_report, "demo_commands", lambda folder, npus: {"build": ([sys.executable, "-c", "print(1)"], 60, None)}
    )
    found = npu_report.npu_report({"ascend": {"npus": 2, "npu_device_files": 2}}, said.append)
    assert len(found["probes"]["graphs"]) == len(PIECES) and found["probes"]["ranks"] and said[-1] == "build"
    assert found["commands"][0]["json"] == 1 and found["commands"][1] == {
        "name": "operators",
        "seconds_by_operator": [],
    }
    assert "works  it: as on the host" in describe(found) and "works  build, " in describe(found)


def test_operators_are_those_of_msprof(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "op_statistic_0_1.csv").write_text(
        "OP Type,Core Type,Count,Total Time(us)\nMatMulV2,AI_CORE,68,9\n"
    )
    assert operators(tmp_path)[0]["Core Type"] == "AI_CORE" and operators(tmp_path / "none") == []
