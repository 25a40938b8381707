"""A missing part, and a graph that a device does not take, give one line with the way out."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood.errors import BundleError, RequestError, UserError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.choice import open_engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.engines.openvino import OpenVinoEngine
from draftwood.runtime.engines.openvino.blobs import Blobs, refused_operators
from draftwood.runtime.engines.openvino.engine import OpenVinoDevice

openvino = pytest.importorskip("openvino")


def refused(call: Callable[[], object], error: type[UserError]) -> str:
    with pytest.raises(error) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_without_the_package(python: Callable[..., str], tiny_bundle: Path) -> None:
    code = f"""
from pathlib import Path
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.openvino import OpenVinoEngine
from draftwood.errors import RequestError
try:
    OpenVinoEngine(Bundle.open(Path({str(tiny_bundle)!r})))
except RequestError as error:
    print(error)
"""
    assert python(code, blocked=["openvino"]) == (
        "--engine openvino: needs the package openvino, which is not installed: pip install 'draftwood[openvino]'\n"
    )


def test_without_the_device(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "Core", lambda: SimpleNamespace(available_devices=["CPU", "GPU.0", "GPU.1"]))
    said = refused(lambda: open_engine(bundle, Opening(engine="openvino-npu")), RequestError)
    assert said.startswith("--engine openvino-npu: OpenVINO ") and "finds no NPU here, but CPU, GPU.0, GPU.1" in said
    assert said.endswith("install Intel's NPU driver, or take --engine openvino")


def test_nothing_with_run_time_sizes_is_run(bundle: Bundle) -> None:
    engine = OpenVinoEngine(bundle, Opening(threads=1))
    given = [*engine.graphs, *engine.drafting.extends]
    assert given and all(graph.static for graph in given)


def test_operators_that_a_device_lacks_are_named(bundle: Bundle) -> None:
    """A stand-in for a device that takes everything but one type; what OpenVINO's own CPU takes is everything."""
    device, graph = OpenVinoDevice("openvino", 1), bundle.graph("decode-kv128")
    model = device.core.read_model(bundle.folder / graph.file)
    assert refused_operators(device.core, model, "CPU") == []
    lacks = SimpleNamespace(
        query_model=lambda model, name: {
            node.get_friendly_name(): name for node in model.get_ordered_ops() if node.get_type_name() != "Softmax"
        },
        read_model=device.core.read_model,
        get_versions=device.core.get_versions,
        get_property=device.core.get_property,
    )
    said = refused(lambda: Blobs(bundle, lacks, "CPU", {"other": "settings"}).compiled(graph), BundleError)
    assert "decode-kv128.onnx: CPU has no Softmax (" in said and said.endswith("openvino, which runs on the CPU")


def test_a_graph_that_openvino_cannot_read(bundle: Bundle, tmp_path: Path) -> None:
    graph = bundle.graph("decode-kv128")

    def fails(*given: object) -> None:
        raise RuntimeError("Exception from src/core:\nnot\nreadable")

    core = OpenVinoDevice("openvino", 1).core
    broken = SimpleNamespace(read_model=fails, get_versions=core.get_versions, get_property=core.get_property)
    said = refused(lambda: Blobs(bundle, broken, "CPU", {"other": "settings"}).compiled(graph), BundleError)
    assert "decode-kv128.onnx: OpenVINO does not compile it for CPU: Exception from src/core:" in said


class Context:
    """A stand-in for the remote context of a GPU or NPU, which no machine here has."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def create_host_tensor(self, kind: Any, shape: Any) -> Any:
        self.made.append(openvino.Tensor(kind, shape))
        self.made[-1].data[:] = 7  # whatever was there
        return self.made[-1]


def test_buffers_lie_where_the_device_reads_them(bundle: Bundle, prompt: list[int]) -> None:
    engine = OpenVinoEngine(bundle, Opening(threads=1))
    context = engine.executor.device._context = Context()
    state = engine.begin(128)
    assert len(context.made) == len(bundle.manifest.teacher.buffers) + 2  # caches, and two branches
    assert not any(tensor.data.any() for tensor in context.made)
    engine.start(state, np.array(prompt))
    assert sum(tensor.data.any() for tensor in context.made) == len(bundle.manifest.teacher.buffers)
    assert engine.zeros((2, 0, 3)).shape == (2, 0, 3)  # a drafter's caches before its first row
