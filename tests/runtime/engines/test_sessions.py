"""Which sessions keep their weights in a second layout, and which share a memory map of the first."""

import ctypes
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from draftwood.errors import RequestError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines import sessions, static
from draftwood.runtime.engines.memory import machine_memory
from draftwood.runtime.engines.qnn import HtpBindings
from draftwood.runtime.engines.sessions import Bindings, OnnxExecutor, fixed, session, sessions_in_memory
from draftwood.runtime.engines.static import OnnxStaticEngine
from draftwood.tests.decoded import decoded

SHARES = "session.disable_prepacking"


def sharing(bundle: Bundle) -> set[str]:
    """Kinds of the graphs whose sessions share the memory map; a star marks those with run-time sizes."""
    found = set()
    for graph in bundle.manifest.graphs_of("onnx"):
        options = session(bundle, graph, 1).get_session_options()
        try:
            shares = options.get_session_config_entry(SHARES) == "1"
        except RuntimeError:  # never set
            shares = False
        if shares:
            found.add(graph.kind + "*" * (not graph.static))
    return found


def test_what_multiplies_rows_at_every_step_is_laid_out(bundle: Bundle) -> None:
    assert sharing(bundle) == {"prefill", "decode"}


def test_an_onnxruntime_that_would_end_the_process_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions.ort, "__version__", "1.29.0")
    with pytest.raises(RequestError, match=r"onnxruntime 1\.29\.0 is too old for it; install 1\.30 or later"):
        session(bundle, bundle.graph("step"), 1)


def test_static_graphs_share_weights_that_memory_does_not_hold_for_each(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else own(name))
    assert sharing(bundle) == {"prefill", "decode", "verify"}


def test_packed_weights_are_laid_out_for_as_many_graphs_as_memory_holds(
    bundle: Bundle, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one opened first leaves for another; texts do not change."""
    free = decoded(OnnxStaticEngine(bundle), prompt, "ragged-kv128").token_ids
    opened, bindings = list[weakref.ref[Bindings]](), OnnxExecutor.bindings

    def counted(executor: OnnxExecutor, graph: GraphSignature) -> Bindings:
        made = bindings(executor, graph)
        opened.append(weakref.ref(made))
        return made

    monkeypatch.setattr(OnnxExecutor, "bindings", counted)
    monkeypatch.setattr(static, "sessions_in_memory", lambda _: 1)
    engine = OnnxStaticEngine(bundle)
    assert decoded(engine, prompt, "ragged-kv128").token_ids == free
    assert len(opened) > 1 and sum(made() is not None for made in opened) == 1


def test_the_number_of_graphs_follows_from_memory(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sessions_in_memory(bundle) is None  # its weights are shared
    graphs = bundle.manifest.graph_set("onnx")
    packed = SimpleNamespace(packed=True, graph_set=lambda _: graphs)
    tensors = load_file(bundle.folder / "onnx/weights.safetensors")
    weights = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("layouts."))
    for quarters, most in ((11, 2), (1, 1)):
        monkeypatch.setattr(sessions, "machine_memory", lambda memory=quarters * weights: memory)
        assert sessions_in_memory(SimpleNamespace(manifest=packed, folder=bundle.folder)) == most


def test_a_containers_limit_of_memory_counts(tmp_path: Path) -> None:
    (own := tmp_path / "own").write_text("0::/a.slice/b.service\n")
    (inner := tmp_path / "a.slice" / "b.service").mkdir(parents=True)
    (tmp_path / "a.slice" / "memory.max").write_text("max\n")
    machine = machine_memory(tmp_path, own)
    (tmp_path / "memory.max").write_text("4294967296\n")
    assert machine_memory(tmp_path, own) == min(machine, 4 << 30)
    (inner / "memory.max").write_text("268435456\n")
    assert machine_memory(tmp_path, own) == 256 << 20


def test_an_htp_writes_its_caches_apart_and_copies_them_back(bundle: Bundle) -> None:
    """No document says that a graph may write where it reads."""
    graph = next(graph for graph in bundle.manifest.graphs_of("onnx") if graph.kind == "decode")
    caches = {spec.name: np.zeros(fixed(spec), np.float32) for spec in graph.inputs if spec.name in graph.caches}
    places = dict[str, int]()

    class Binding:
        def bind_input(self, name: str, *where: object) -> None:
            places[name] = where[-1]

        bind_output = bind_input

    def launch(_: Binding) -> None:
        for name, array in caches.items():
            ctypes.memset(places[f"{name}.out"], 1, array.nbytes)
            assert not array.any(), "it writes where it reads"

    bindings = HtpBindings(SimpleNamespace(io_binding=Binding, run_with_iobinding=launch), graph)
    bindings.caches(caches, caches.values())
    bindings.run()
    assert caches and all(array.view(np.uint8).all() for array in caches.values())
