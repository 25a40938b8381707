"""The doctor: right about this machine, and never a patient."""

import argparse
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwood import environment
from draftwood.runtime.engines.qnn import Htp
from draftwood.tools import machine
from draftwood.tools.commands import doctor
from draftwood.tools.packages import EXTRAS, MODULES

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
# What a machine without onnxruntime cannot do, an NPU's lines aside.
EVERYTHING = {
    "run bundles",
    "build bundles",
    "serve bundles",
    "deploy on Ray",
    "run with OpenVINO",
    "run for an HTP",
    "train",
    "check --teacher",
}
ASK = "from draftwood.tools.cli import main; print(main(['doctor', '--json']))"
X86 = "processor : 0\nmodel name : Some Xeon\nflags : fpu avx2 avx512f amx_tile amx_int8\n"
ARM = "processor : 0\nBogoMIPS : 200.00\nFeatures : fp asimd asimddp sve i8mm bf16\n"


@pytest.fixture
def npu_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which torch_npu, CANN and one NPU are found."""
    (tmp_path / "dynamo" / "torchair").mkdir(parents=True)
    monkeypatch.setattr(environment, "torch_npu_folder", lambda: tmp_path)
    monkeypatch.setattr(environment, "cann_available", lambda: True)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setattr(environment, "npu_chips", lambda: ("Ascend910B3",) * environment.cann_available())
    versions = {"torch_npu": "2.13.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(doctor, "version", lambda name: versions.get(name, "1.0"))
    monkeypatch.setattr(machine, "_told", lambda code: None)  # what other devices it has takes seconds to ask
    return tmp_path


def test_text_answers_for_every_ability(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argparse.Namespace(json=False, npu=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    for ability in doctor.NEEDS:
        (line,) = (line for line in lines if line.startswith(f"  {ability}  "))
        assert line.removeprefix(f"  {ability}").split()[0] in ("yes", "no")


def test_a_probe_imports_nothing_of_the_folder_that_one_is_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('somebody else's')")
    monkeypatch.chdir(tmp_path)
    assert machine._told("import json; print(json.dumps(1))") == 1
    assert machine.probed("json.tool", "--help")[0]["seen"].startswith("exit code 0: ")


def test_this_machine_runs_and_builds() -> None:
    found = doctor.report()
    assert found["can"]["run bundles"]["ok"]
    assert found["can"]["build bundles"]["ok"]
    assert "CPUExecutionProvider" in found["onnxruntime_providers"]
    assert found["cpu"]["threads"] >= 1


@pytest.mark.parametrize(
    ("blocked", "lost"),
    [
        (["torch"], {"build bundles", "train", "check --teacher"}),
        (["onnxruntime"], EVERYTHING),
        (["ray"], {"deploy on Ray"}),
        (["openvino"], {"run with OpenVINO"}),
        (["onnxruntime_qnn"], {"run for an HTP"}),
        (["transformers", "matplotlib"], {"check --teacher"}),
        ([name for name in EXTRAS if name != "torch_npu"], EVERYTHING),
    ],
    ids=["torch", "onnxruntime", "ray", "openvino", "qnn", "extras", "everything"],
)
def test_absent_packages(blocked: list[str], lost: set[str], python: Callable[..., str]) -> None:
    out = python(ASK, blocked=[MODULES.get(name, name) for name in blocked])
    assert out.endswith("\n0\n")
    found = json.loads(out.removesuffix("0\n"))
    unable = {name for name, facts in found["can"].items() if not facts["ok"]}
    # What an NPU needs is not there to be lost on every machine.
    assert unable - {"lower for the NPU", "run on an NPU (npu)", "run on an NPU (acl)"} == lost
    assert all("lower for the NPU" in unable for name in blocked if name in ("torch", "onnxruntime"))
    assert all(found["packages"][name]["version"] is None for name in blocked)
    assert all(facts["missing"] for name, facts in found["can"].items() if name in lost)


def test_a_broken_onnxruntime_is_reported(python: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "site" / "onnxruntime").mkdir(parents=True)
    (tmp_path / "site" / "onnxruntime" / "__init__.py").write_text("raise OSError('no libgomp')\n")
    out = python(ASK, environment={"PYTHONPATH": str(tmp_path / "site")})
    assert json.loads(out.removesuffix("0\n"))["onnxruntime_providers"] == ["broken: no libgomp"]


def test_an_htp_is_told_from_its_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_qnn")
    assert doctor.report()["htp"] == ("found" if not Htp().emulated else "emulated")
    monkeypatch.setattr(machine, "HTP", "raise OSError('a broken driver')")
    assert machine.htp() is None


def test_an_npu_host(npu_host: Path) -> None:
    found = doctor.report()
    assert found["ascend"]["torchair"] == "real"
    assert found["can"]["run on an NPU (npu)"]["ok"] and found["can"]["run on an NPU (acl)"]["ok"]
    assert "draftwood doctor --npu tries it" in doctor.render(found)
    assert "CANN 8.5.0    FusedInferAttentionScore" in doctor.render(found)


def test_torch_npu_without_cann(npu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cann_available", lambda: False)
    found = doctor.report()
    assert found["ascend"]["torchair"] == "offline"
    assert found["can"]["run on an NPU (npu)"]["missing"] == ["cann", "npu"]
    assert any("TORCH_DEVICE_BACKEND_AUTOLOAD=0" in step for step in found["next_steps"])
    (npu_host / "Ascend" / "cann").mkdir(parents=True)
    (npu_host / "Ascend" / "cann" / "set_env.sh").touch()  # where 8.5.0 and later have it
    monkeypatch.setenv("HOME", str(npu_host))
    assert any(step.endswith("source ~/Ascend/cann/set_env.sh") for step in doctor.report()["next_steps"])
    monkeypatch.setenv("ASCEND_HOME_PATH", "nowhere")
    monkeypatch.setattr(machine, "SET_ENV", ())
    assert any("where ASCEND_HOME_PATH points" in step for step in doctor.report()["next_steps"])


@pytest.mark.parametrize(
    ("torch_npu", "cann", "chip", "engines"),
    [
        ("2.12.0", "9.1.0", "Ascend910B3", "npu acl"),
        ("2.9.0.post2", "9.0.0", "Ascend910_9362", "npu acl"),
        ("2.13.0", "9.1.0", "Ascend910B3", "acl"),
        ("2.8.0", "8.3.RC1", "Ascend910B3", ""),
        ("2.9.0", "8.5.0", "Ascend310P3", ""),
        ("2.9.0", "8.5.0", "Ascend310B4", ""),
        ("2.9.0", "8.5.0", "Ascend910B", ""),
        ("2.9.0", "8.5.0", "Ascend910PremiumA", ""),
        ("2.9.0", "8.5.0", "Ascend910B4-1", "npu acl"),
    ],
)
def test_which_engine_a_machine_can_run(
    torch_npu: str, cann: str, chip: str, engines: str, npu_host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: torch_npu if name == "torch_npu" else "1.0")
    monkeypatch.setattr(environment, "npu_chips", lambda: (chip,))
    monkeypatch.setattr(environment, "cann_version", lambda: cann)
    found = doctor.report()
    able = [name for name in ("npu", "acl") if found["can"][f"run on an NPU ({name})"]["ok"]]
    assert " ".join(able) == engines
    text = doctor.render(found)
    old = chip.startswith("Ascend310") or chip in ("Ascend910B", "Ascend910PremiumA")
    assert (f"{chip} is not supported: it has no FusedInferAttentionScore" in text) == old
    assert ("with CANN 9.1.0 goes torch_npu 2.12.0 or" in text) == (torch_npu == "2.13.0")


def test_a_container_without_the_driver(npu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CANN is whole, and set_env.sh has been sourced."""
    monkeypatch.setattr(environment, "cann_available", lambda: False)
    monkeypatch.setattr(environment, "cann_lacks", lambda: "libascend_hal.so")
    monkeypatch.setattr(machine, "SET_ENV", (str(npu_host),))
    steps = doctor.report()["next_steps"]
    assert any("libascend_hal.so is not found: source its set_env.sh;" in step for step in steps)
    assert not any("not on the library path" in step for step in steps)


def test_npus_that_torch_npu_does_not_find(npu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container with two of them, say, whose ids there are 0 and 1."""
    monkeypatch.setattr(environment, "npu_chips", tuple)
    files, glob = {"davinci[0-9]*": [Path("/dev/davinci4"), Path("/dev/davinci5")]}, Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: files.get(pattern) or glob(folder, pattern))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    found = doctor.report()
    why = "torch_npu finds none of the 2 NPUs: look at npu-smi info, and at ASCEND_RT_VISIBLE_DEVICES"
    assert found["can"]["run on an NPU (npu)"]["why"] == why and not found["can"]["run on an NPU (npu)"]["ok"]
    assert any("ASCEND_RT_VISIBLE_DEVICES=4,5, and torch_npu finds 0" in step for step in found["next_steps"])


def test_torch_and_torch_npu_of_two_releases(npu_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "2.12.0" if name == "torch" else "2.13.0.post1")
    assert any("do not fit" in step for step in doctor.report()["next_steps"])


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [(X86, ["avx2", "avx512f", "amx_tile", "amx_int8"]), (ARM, ["asimddp", "sve", "i8mm", "bf16"]), ("", [])],
    ids=["x86", "Arm", "unknown"],
)
def test_processor_features(cpuinfo: str, features: list[str]) -> None:
    assert machine.processor(cpuinfo)["features"] == features


def test_extras_are_those_of_the_project() -> None:
    extras: dict[str, Any] = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for package, extra in EXTRAS.items():
        name = package.replace("_", "-") if package != "torch_npu" else package
        assert any(line.startswith((f"{name}=", f"{name}>", f"{name}[")) for line in extras[extra]), package
    assert doctor.CPU_TORCH.split()[2] in PROJECT["optional-dependencies"]["build"]
