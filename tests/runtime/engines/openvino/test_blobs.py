"""A blob is used for the graph, the version and the device that it was compiled from, and for nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.openvino import blobs as blobs_module
from draftwood.runtime.engines.openvino.blobs import Blobs
from draftwood.runtime.engines.openvino.engine import OpenVinoDevice

pytest.importorskip("openvino")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenVinoDevice:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return OpenVinoDevice("openvino", 1)


@pytest.fixture
def graph(bundle: Bundle) -> GraphSignature:
    return bundle.graph("decode-kv128")


class Counted:
    """OpenVINO's core, and what was asked of it."""

    def __init__(self, core: Any) -> None:
        self._core, self.asked = core, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("compile_model", "import_model"):
            self.asked.append(name)
        return getattr(self._core, name)


def of(bundle: Bundle, device: OpenVinoDevice, **settings: Any) -> Blobs:
    return Blobs(bundle, Counted(device.core), "CPU", device.config | settings)


def asked(blobs: Blobs, graph: GraphSignature) -> list[str]:
    blobs.compiled(graph)
    done, blobs._core.asked = blobs._core.asked, []
    return done


def test_a_graph_is_compiled_once_on_a_machine(bundle: Bundle, device: OpenVinoDevice, graph: GraphSignature) -> None:
    assert asked(of(bundle, device), graph) == ["compile_model"]
    assert asked(of(bundle, device), graph) == ["import_model"]
    assert of(bundle, device).file(graph).is_file()


def test_a_damaged_blob_is_compiled_anew(bundle: Bundle, device: OpenVinoDevice, graph: GraphSignature) -> None:
    blobs = of(bundle, device)
    blobs.compiled(graph)
    path = blobs.file(graph)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
        path.write_bytes(damaged)
        assert asked(of(bundle, device), graph) == ["compile_model"]
        assert asked(of(bundle, device), graph) == ["import_model"]


def test_a_blob_that_the_device_refuses_is_compiled_anew(
    bundle: Bundle, device: OpenVinoDevice, graph: GraphSignature
) -> None:
    blobs = of(bundle, device)
    blobs._keep(graph, b"of another driver")
    assert asked(blobs, graph) == ["import_model", "compile_model"]


def test_what_a_blob_is_compiled_from_names_it(
    bundle: Bundle, device: OpenVinoDevice, graph: GraphSignature, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = bundle.manifest
    weights = next(one.weights for one in manifest.graph_sets)

    def with_other(name: str) -> Bundle:
        other = msgspec.structs.replace(manifest.files[name], sha256="0" * 64)
        return replace(bundle, manifest=msgspec.structs.replace(manifest, files=manifest.files | {name: other}))

    files = {
        of(bundle, device).file(graph),
        of(bundle, device).file(bundle.graph("decode-kv256")),
        of(with_other(graph.file), device).file(graph),
        of(with_other(weights), device).file(graph),
        of(bundle, device, INFERENCE_NUM_THREADS=2).file(graph),
        Blobs(bundle, device.core, "CPU", device.config | {"INFERENCE_PRECISION_HINT": "bf16"}).file(graph),
    }
    facts = blobs_module._device_facts(device.core, "CPU")
    assert any("FULL_DEVICE_NAME" in fact for fact in facts) and device.version in " ".join(facts)
    for number in range(len(facts)):
        with monkeypatch.context() as patch:
            changed = [*facts[:number], f"{facts[number]}.1", *facts[number + 1 :]]
            patch.setattr(blobs_module, "_device_facts", lambda core, device, changed=changed: changed)
            files.add(of(bundle, device).file(graph))
    assert len(files) == 6 + len(facts)
    assert all(path.parent == of(bundle, device).file(graph).parent for path in files)
    assert not any(bundle.folder in path.parents for path in files)


def test_without_room_it_is_compiled_every_time(
    bundle: Bundle, device: OpenVinoDevice, graph: GraphSignature, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [asked(of(bundle, device), graph) for _ in range(2)] == [["compile_model"]] * 2
