"""The route of a device: the parts that torchair keeps of a compiled step, and that its graph is the proved one."""

import contextlib
import copy
import importlib
import io
import logging
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftwood.compiler.ge import torchair_bridge
from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.lowering import drop_dead, fold_constants
from draftwood.compiler.ge.sameness import fingerprints
from draftwood.compiler.ge.torchair_bridge import device_of, ge_ir
from draftwood.compiler.steps.step import DTYPES
from draftwood.compiler.targets import online as online_module
from draftwood.compiler.targets.online import Started, TorchairExecutor, compile_cache
from draftwood.errors import LoweringError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle


@pytest.fixture(scope="module")
def bundle(pangu_bundle: Path) -> Bundle:
    return Bundle.open(pangu_bundle)


def graphs(bundle: Bundle) -> tuple[GraphSignature, ...]:
    """Those of one text."""
    return tuple(graph for graph in bundle.manifest.graphs_of("ge") if graph.batch == 1)


def kinds(bundle: Bundle) -> list[GraphSignature]:
    """The last graph of every kind, and of both draws. A plain step is a tree's of two rows."""
    found = {(graph.kind, "sampled" in graph.name): graph for graph in graphs(bundle) if graph.kind != "decode"}
    return [*found.values()]


def given(graph: GraphSignature) -> list[torch.Tensor]:
    return [torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in graph.inputs]


class NoDevice(Exception):
    """Where a compiled graph would start."""


def test_every_step_keeps_its_compiled_graph(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchair's own code, up to the point at which GE would compile the generated graph."""

    def kernel(*inputs: object) -> None:
        raise NoDevice

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu")
    some = [graph for graph in graphs(bundle) if graph.kind in ("prefill", "draft")]
    for graph in some:
        step = executor.compiled(graph)
        monkeypatch.setattr("torchair.npu_fx_compiler._compile_py_code", lambda code: SimpleNamespace(kernel=kernel))
        with pytest.raises(LoweringError, match="NoDevice"):
            step.compiled(*given(graph))
    places = {compile_cache(bundle.folder, bundle.manifest, graph) for graph in graphs(bundle)}
    assert len(places) == len(graphs(bundle)) == 8
    filled = {compile_cache(bundle.folder, bundle.manifest, graph) for graph in some}
    assert [len(list(folder.rglob("compiled_module"))) for folder in filled] == [1, 1]


class Agreeing(ModuleType):
    """Whatever is asked of it is there, and says yes: of CANN too, that it is new enough for every pass."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Agreeing(name)

    def __call__(self, *_: object, **__: object) -> bool:
        return True


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu can be imported, as on a device."""
    torchair_bridge._torchair()
    for name in ("torch_npu", "torch_npu.npu", "torch_npu.npu.utils"):
        monkeypatch.setitem(sys.modules, name, Agreeing(name))
    monkeypatch.setattr(torchair_bridge, "cann_available", lambda: True)
    # torchair remembers that it had no torch_npu when it first looked for patterns.
    patterns = [module for name, module in sys.modules.items() if name.startswith("torchair.patterns")]
    for one in [value for module in patterns for value in vars(module).values() if hasattr(value, "cache_clear")]:
        one.cache_clear()


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list:
    """The GE graphs that torchair converted on the route of a device, in order."""
    graphs: list = []
    converter = importlib.import_module("torchair.npu_fx_compiler")._NpuGraphConverter
    run = converter.run

    def noting(self: object, *inputs: object, **options: object) -> object:
        graphs.append(run(self, *inputs, **options))
        return graphs[-1]

    monkeypatch.setattr(converter, "run", noting)
    return graphs


def online(converted: list) -> Graph:
    """The last of them, folded and reduced as GE does on a device."""
    graph = copy.deepcopy(converted[-1].graph._proto)
    fold_constants(graph)
    drop_dead(graph)
    return Graph.of(graph)


@pytest.mark.usefixtures("importable")
def test_the_graph_of_a_device_is_the_one_that_was_proved(
    bundle: Bundle, converted: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node by node, or the launch would raise; GE folds constants on a device, as lowering has done already."""
    recovery, looked = importlib.import_module("torchair.patterns._recover_view_inplace_pattern"), list[object]()
    monkeypatch.setattr(recovery, "find_optimization_pattern", lambda graph: looked.append(graph) or [])
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    for graph in kinds(bundle):
        executor.compiled(graph).compiled(*given(graph))
        proved = Graph.load(bundle.folder / graph.file)
        assert [*fingerprints(online(converted)).values()] and len(online(converted).kernels) == len(proved.kernels)
        moved = any(spec.name == "branch" for spec in graph.inputs)
        assert online(converted).counts().get("Transpose", 0) == moved, "nothing but moved rows is turned around"
    assert looked == [], "no graph of ours has a scatter over a view, and the pass is off all the same"


def test_another_graph_than_the_proved_one_is_not_compiled(bundle: Bundle, tmp_path: Path) -> None:
    """A norm of the file has another epsilon than this machine's torchair gives it."""
    folder = tmp_path / "altered"
    shutil.copytree(bundle.folder, folder)
    graph = next(graph for graph in graphs(bundle) if graph.kind == "decode")
    model = ge_ir().ModelDef.FromString((folder / graph.file).read_bytes())
    norms = [op for op in model.graph[0].op if op.type == "AddRmsNorm"]
    norms[1].attr["epsilon"].f = 1.0
    (folder / graph.file).write_bytes(model.SerializeToString())
    executor = TorchairExecutor(folder, bundle.manifest, device="cpu", eagerly=True)
    with pytest.raises(
        LoweringError, match=rf"graph {graph.name}: .* first at AddRmsNorm {norms[1].name}, in whose place"
    ):
        executor.compiled(graph).compiled(*given(graph))


@pytest.mark.parametrize("shown", [False, True])
def test_what_cannot_be_compiled_names_its_logs(
    bundle: Bundle, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        logging.getLogger("torchair").info("what torchair says")
        raise ValueError("E40001: no kernel\nmore lines")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(torchair_bridge.SHOWN, "1" if shown else "")
    said = io.StringIO()
    monkeypatch.setattr(logging.getLogger("torchair").handlers[0], "stream", said)
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    monkeypatch.setattr(online_module, "same_as_proved", fails)
    graph = graphs(bundle)[-1]
    log = compile_cache(bundle.folder, bundle.manifest, graph).with_suffix(".log")
    with pytest.raises(LoweringError, match=rf"E40001: no kernel; torchair's log is {log}, GE's are in .*NPU_LOG=1"):
        executor.compiled(graph).compiled(*given(graph))
    assert "what torchair says" in log.read_text() and ("what torchair says" in said.getvalue()) == shown


def test_guards_are_for_the_first_launch_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    graph = graphs(bundle)[-1]
    step = executor.compiled(graph)
    step.compiled(*given(graph))
    monkeypatch.delattr(torchair_bridge, "_compiling")
    step.compiled(*given(graph))
    with pytest.raises(NameError):
        executor.compiled(graph).compiled(*given(graph))


class Noting(TorchDispatchMode):
    """Counts operators, and the bytes of those that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype == torch.uint8:
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_a_step_crosses_once_each_way(bundle: Bundle) -> None:
    """With any number of inputs and outputs; tensors that stay on the device are copied there, and nothing is
    allocated."""
    graph = next(graph for graph in graphs(bundle) if graph.kind == "decode")
    far = {*graph.caches, "branch"}
    outputs = [
        torch.full(spec.shape, i, dtype=DTYPES[spec.dtype])
        for i, spec in enumerate(graph.outputs)
        if spec.name in graph.results
    ]
    seen: list[tuple[torch.Tensor, ...]] = []
    step = SimpleNamespace(compiled=lambda *values: seen.append(values) or outputs)
    started = Started(step, graph, torch.device("cpu"))  # type: ignore[arg-type]
    small = {s.name: np.ones(s.shape, "?" if s.dtype == "bool" else "i8") for s in graph.inputs if s.name not in far}
    heads, dims = bundle.manifest.teacher.buffers[0].heads, bundle.manifest.teacher.buffers[0].width
    buffers: dict[str, Any] = {
        name: torch.zeros(graph.slots, heads, dims).bfloat16().swapaxes(0, 1) for name in graph.caches
    }
    kept = {
        s.name: torch.zeros(s.shape, dtype=DTYPES[s.dtype]) for s in graph.outputs if s.name in ("logits", "branch.out")
    }
    buffers |= kept | {s.name: torch.zeros(s.shape, dtype=DTYPES[s.dtype]) for s in graph.inputs if s.name == "branch"}
    started(small, buffers)
    with Noting() as noted:
        found = started(small, buffers)
    assert found.keys() == {*graph.results} - kept.keys() and len(noted.bytes) == 2
    # What is more, is half numbers that the host widens where it has them.
    widened = sum(o.dtype == torch.bfloat16 for o, n in zip(outputs, graph.results, strict=True) if n not in kept)
    assert noted.counts["aten._to_copy.default"] == widened
    assert noted.counts["aten.copy_.default"] == len(small) + len(kept) + 2 and noted.counts["aten.cat.out"] == 1
    assert not [name for name in noted.counts if "empty" in name or "zeros" in name]
    assert noted.bytes[1] == sum(o.nbytes for o, n in zip(outputs, graph.results, strict=True) if n not in kept)
    for i, name in enumerate(graph.results):
        assert np.all((found[name] if name in found else kept[name].float().numpy()) == float(outputs[i].flatten()[0]))
    places = {s.name: value for s, value in zip(graph.inputs, seen[1], strict=True)}
    assert all(places[name].data_ptr() == seen[0][i].data_ptr() for i, name in enumerate(places)), "addresses stay"
    assert all(np.array_equal(places[name].numpy(), array) for name, array in small.items())


def test_weights_have_fixed_addresses_and_nothing_else(bundle: Bundle, converted: list) -> None:
    """A text has caches of its own: with their addresses fixed the next text would read those of the first."""
    executor = TorchairExecutor(bundle.folder, bundle.manifest, device="cpu", eagerly=True)
    graph = next(graph for graph in graphs(bundle) if graph.kind == "verify")
    executor.compiled(graph).compiled(*given(graph))
    kinds = Counter(info.value_type.name for info in converted[-1].graph.named_inputs_info.values())
    counts = Graph.load(bundle.folder / graph.file).counts()
    assert kinds == {"PARAMETER": counts["FileConstant"], "TENSOR": len(graph.inputs)}


def test_the_engine_loads_torch_npu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            asked.append(name)

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert device_of("cpu").type == "cpu" and asked == []
    with pytest.raises(ModuleNotFoundError, match="torch_npu"):
        device_of("npu:0")
    assert asked == ["torch_npu"]


def test_ge_and_hccl_take_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    stand_in = SimpleNamespace(npu=SimpleNamespace(set_device=chosen.append))
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)  # type: ignore[arg-type]
    with contextlib.suppress(RuntimeError):  # torch knows none called npu here
        device_of("npu:1")
    assert chosen == ["npu:1"]


def test_ge_works_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would leave fusion_result.json and kernel_meta in the current one; with that in it, no bundle opens."""
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=SimpleNamespace(set_device=str)))  # type: ignore
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    work = tmp_path / "draftwood" / "npu" / "work"
    for own in ("theirs", ""):
        monkeypatch.setenv("ASCEND_WORK_PATH", own)
        if not own:
            del os.environ["ASCEND_WORK_PATH"]
        with contextlib.suppress(RuntimeError):
            device_of("npu:0")
        assert os.environ["ASCEND_WORK_PATH"] == (own or str(work))
    assert work.is_dir()
