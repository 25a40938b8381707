"""An engine is registered in one place: help, refusals, extras, the doctor, proofs and ``inspect`` read it there."""

import importlib.metadata
import json
import os
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from draftwood.errors import RequestError
from draftwood.runtime import proving
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import registry
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.registry import ENGINES, EngineKind, engine_kind

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
# Another package: the engine, and the line of its metadata that registers it.
ENGINE = """
from draftwood.runtime.engines.cpu import CpuEngine


class OtherEngine(CpuEngine):
    pass
"""
KIND = """
from draftwood.runtime.engines.registry import EngineKind

KIND = EngineKind(
    name="other", help="an engine of another package", source="other_engine:OtherEngine", graph="step",
    packages=("other_package",), extra="other", ability="run on other", quick=True,
)
"""
METADATA = "[draftwood.engines]\nother = other_kind:KIND\n"
ASK = """
import contextlib, io, json, sys
from draftwood.tools.cli import main

bundle = {bundle!r}
with contextlib.redirect_stdout(io.StringIO()) as help:
    main(["run", "--help"])
loaded = sorted({{"numpy", "onnxruntime", "torch", "other_engine"}} & set(sys.modules))

import draftwood
from draftwood.runtime import proving
from draftwood.tools.commands.doctor import NEEDS
from draftwood.tools.commands.inspect import bundle_figures
from draftwood.tools.packages import install

proved_here, proving.prove = [], lambda engine: proved_here.append(engine)
with draftwood.open(bundle, engine="other", threads=1) as model:
    kind, engines = type(model.engine).__name__, bundle_figures(model.bundle)["engines"]
with contextlib.redirect_stderr(io.StringIO()) as refusal:
    main(["run", bundle, "--prompt", "x", "--engine", "nine"])
print(json.dumps({{
    "help": " ".join(help.getvalue().split()), "loaded": loaded, "install": install("other_package"),
    "needs": NEEDS["run on other"], "kind": kind, "engines": engines, "proved here": len(proved_here),
    "refusal": " ".join(refusal.getvalue().split()),
}}))
"""


def test_an_engine_of_another_package_is_one_registration(
    tiny_bundle: Path, python: Callable[..., str], tmp_path: Path
) -> None:
    site = tmp_path / "site"
    (site / "other-1.0.dist-info").mkdir(parents=True)
    (site / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (site / "other-1.0.dist-info" / "entry_points.txt").write_text(METADATA)
    (site / "other_engine.py").write_text(ENGINE)
    (site / "other_kind.py").write_text(KIND)
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)}  # a machine that has proved nothing yet
    found = json.loads(python(ASK.format(bundle=str(tiny_bundle)), environment=variables))
    assert "other: an engine of another package" in found["help"] and found["loaded"] == []
    assert found["install"] == "pip install 'draftwood[other]'"
    assert found["needs"][-1] == "other_package"
    assert (found["kind"], found["proved here"]) == ("OtherEngine", 0)
    assert found["engines"][-1] == "other"
    assert "invalid choice: 'nine'" in found["refusal"] and "other" in found["refusal"]


def test_an_engine_of_this_process_is_proved_here_at_every_opening(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own would know no such name, or the engine that was replaced."""
    proved: list[Engine] = []
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(proving, "prove", proved.append)
    monkeypatch.setattr(proving, "_prove_apart", lambda *given: pytest.fail("another process proves it"))
    registry.register(EngineKind(name="cpu", help="another", source=CpuEngine, graph="step", quick=True))
    for count in (1, 2):
        proving.proved_engine(Bundle.open(tiny_bundle), Opening(engine="cpu", threads=1))
        assert len(proved) == count


@pytest.mark.parametrize("kind", ENGINES, ids=lambda kind: kind.name)
def test_every_engine_names_what_is_there(kind: EngineKind) -> None:
    for place in filter(None, [kind.source, kind.ready]):
        module, name = str(place).split(":")
        if "reference" not in module or find_spec("torch"):
            assert callable(getattr(import_module(module), name))
    assert kind.extra in {"", *PROJECT["optional-dependencies"]}
    assert not kind.quick or not (kind.npu or kind.packages), "a device is not opened twice"


def test_who_is_no_engine_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"--engine nine: not known; expected one of acl, bitwise, cpu, "):
        engine_kind("nine")

    class Entry:
        name, value = "odd", "odd:Odd"

        def load(self) -> object:
            return object()

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    for ask in (registry.engines, lambda: engine_kind("odd")):
        with pytest.raises(RequestError, match="engine odd: odd:Odd is no EngineKind"):
            ask()
    assert engine_kind("cpu") in ENGINES  # its opening asks no other package
