"""Nothing is reported to the makers of the packages that run graphs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftwood.tools.machine import OPENVINO

# Each of them silences onnxruntime by itself.
SILENT = ("CI", "GITHUB_ACTIONS", "TF_BUILD", "JENKINS_URL", "ORT_RUNNING_UNIT_TESTS", "ORT_DISABLE_TELEMETRY")
SESSION = """
import draftwood, onnxruntime
from onnx import TensorProto, helper
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "ab"]
graph = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "graph", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
"""
IMPORTED = """
import sys
from draftwood.telemetry import import_openvino
name = import_openvino().__name__
print(name, [module for module in sys.modules if module.startswith("openvino_telemetry")])
"""


@pytest.fixture
def at_home(tmp_path: Path) -> dict[str, str | None]:
    """Variables of a process of a user who has never run anything, outside CI."""
    (home := tmp_path / "home").mkdir()  # openvino_telemetry makes none, and is silent without
    return {**dict.fromkeys((*SILENT, "XDG_CACHE_HOME")), "HOME": str(home)}


def files(at_home: dict[str, str | None]) -> list[str]:
    home = Path(str(at_home["HOME"]))
    return [name for _, _, names in os.walk(home) for name in names]


def test_onnxruntime_keeps_no_number_for_the_machine(python: Callable[..., str], at_home: dict) -> None:
    python(SESSION, environment=at_home)
    assert files(at_home) == []


def test_openvino_finds_nothing_to_report_with(python: Callable[..., str], at_home: dict) -> None:
    pytest.importorskip("openvino")
    assert python(IMPORTED, environment=at_home) == "openvino []\n"
    assert files(at_home) == []


def test_the_doctor_asks_openvino_in_silence(python: Callable[..., str], at_home: dict) -> None:
    pytest.importorskip("openvino")
    assert python(OPENVINO, environment=at_home).startswith('{"CPU": ')
    assert files(at_home) == []


def test_a_users_choice_stands(python: Callable[..., str]) -> None:
    code = "import os, draftwood; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    assert python(code, environment={"ORT_DISABLE_TELEMETRY": "0"}) == "0\n"
