"""The command behind the table of W8A8: missing peers are named, and its steps are timed one by one."""

import importlib.machinery

import pytest

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.tools.measure import w8a8


def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.machinery.ModuleSpec("openvino_genai", None)
    monkeypatch.setattr(w8a8, "find_spec", lambda name: there if name == "openvino_genai" else None)
    assert w8a8.peers() == {
        "llama.cpp": "missing", "onnxruntime-genai": "missing", "OpenVINO": "installed, not run",
    }  # fmt: skip


def test_steps_are_timed_and_leave_the_text_as_it_was(tiny_bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROWS", (1, 2, 4)), ("TEXT", 20), ("SLOTS", 128)):
        monkeypatch.setattr(w8a8, name, value)
    found = w8a8.step_ms(CpuEngine(Bundle.open(tiny_bundle)), repeats=2)
    assert list(found) == [1, 2, 4] and min(found.values()) > 0


def test_the_table_has_a_line_a_precision_and_the_ratio() -> None:
    one = {"plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 20.0, "identical": 3, "turns": 4, "ties": 1}
    row = {"size": "native", "rounds": 2, "fp32": one | {"step_ms": {1: 2.0}}}
    row["w8a8"] = row["fp32"] | {"plain_tokens_per_s": 25.0}
    machine = {"model": "a processor", "features": ["amx_int8"]}
    lines = w8a8.table({"sizes": [row], "peers": {"llama.cpp": "missing"}, "machine": machine}).splitlines()
    assert "plain W8A8 over plain fp32 2.50, 2 rounds" in lines[3] and lines[4] == "llama.cpp: missing"
    assert "3/4" in lines[1] and lines[-1] == "a processor, amx_int8"
