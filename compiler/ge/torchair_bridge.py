"""The one door to torchair: its own FX-to-GE converters, on any machine with the torch_npu package.

With CANN the real torchair is imported. Without it torchair's C extension cannot load, so a small stand-in takes its
place. Converters are plain Python that builds protobuf messages; they ask the extension nothing that a static
conversion needs. torch_npu itself is never imported then.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._python_dispatch import _disable_current_modes

import draftwood.kernels  # noqa: F401 (registers every operator: torchair skips converters of unknown ones)
from draftwood.compiler.ge.converters import register_converters
from draftwood.compiler.ge.forms import join_transposes, npu_forms
from draftwood.compiler.ge.rounding import round_inside
from draftwood.compiler.ge.tables import fold_tables
from draftwood.compiler.steps.tracing import uncompiled
from draftwood.environment import cann_available, torch_npu_folder
from draftwood.errors import LoweringError
from draftwood.files import cache_home

# Set, it shows messages of torchair and GE on the terminal.
SHOWN = "DRAFTWOOD_NPU_LOG"
# Where CANN writes its logs, and what it makes besides a compiled graph (its reference of environment variables).
GE_LOGS, GE_WORK = "ASCEND_PROCESS_LOG_PATH", "ASCEND_WORK_PATH"
_EXTENSION = "torchair.core._torchair"
_MESSAGES = "torchair._ge_concrete_graph.ge_ir_by_protoc_3_19_pb2"


@cache
def ge_ir() -> Any:
    """The protobuf messages of GE graphs (``ModelDef``, ``GraphDef``, ``OpDef``), without the rest of torchair."""
    path = torchair_folder() / "_ge_concrete_graph" / "ge_ir_by_protoc_3_19_pb2.py"
    if _MESSAGES in sys.modules:
        return sys.modules[_MESSAGES]
    spec = importlib.util.spec_from_file_location(_MESSAGES, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Under torchair's own name: a second load would register every message twice.
    sys.modules[_MESSAGES] = module
    spec.loader.exec_module(module)
    return module


def convert(program: ExportedProgram, written: Mapping[str, int], step: str) -> Any:
    """The GE graph (``GraphDef``) of an exported step, as torchair's compiler makes it before it compiles.

    Args:
        program: the step, traced on real or fake tensors.
        written: placeholder name -> number of the output that is written back into it; such outputs leave the
            graph's outputs.
        step: the step's name, for errors.

    Raises:
        LoweringError: an operator has no converter.
    """
    torchair = _torchair()
    module = decomposed(program)
    with _quiet(), _torch_npu_absent(), _unrecovered(), uncompiled():
        config = _config(torchair)
        _write_back(module, written)
        values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        # The context that torch.compile would give: older releases ask for the mode of the trace and fail without one.
        # It is not the mode of the values: a result that is a view of an input would then be no output of the graph.
        context = TracingContext(FakeTensorMode(allow_non_fake_inputs=True))
        try:
            with tracing(context):
                compiled = torchair.get_compiler(config)(module, values)
        except Exception as error:  # converters raise classes of every kind
            raise LoweringError(_explain(error, module, step)) from error
        return compiled.runner.graph._proto


def compile_step(
    module: nn.Module, cache: Path, eagerly: bool, judge: Callable[[Any], None]
) -> Callable[..., tuple[Tensor, ...]]:
    """A module's ``forward`` compiled for the NPU: static shapes, frozen parameters, tiling kept on the device.

    torchair tells compiled functions apart by their code, and deletes the cache of one whose code it has seen before
    (``ModelCacheWatcher``). So every step's ``forward`` has its own code, named by its cache.

    Args:
        module: its inputs that ``forward`` changes are changed in place on the device.
        cache: folder for compiled graphs, of this module's content alone.
        eagerly: stop before GE compiles, and run the traced program; needs no device.
        judge: is given the GE graph (a ``GraphDef`` of its own) before GE compiles it, and raises if it will not do.

    Raises, at the first launch, which compiles:
        LoweringError: what ``judge`` has raised, or torchair or GE cannot compile the step; names their logs.
    """
    torchair = _torchair()
    forward = _named(module.forward, f"step_{cache.name}")
    config = _config(torchair)
    config.experimental_config.frozen_parameter = True
    config.experimental_config.tiling_schedule_optimize = True
    if eagerly:
        config.debug.run_eagerly = True
        backend = torchair.get_npu_backend(compiler_config=config, custom_decompositions=npu_forms())
        compiled = torch.compile(forward, backend=backend, dynamic=False, fullgraph=True)
    else:
        inference = importlib.import_module("torchair.inference")
        cache.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"custom_decompositions": npu_forms(), "cache_dir": str(cache), "ge_cache": True}
        compiled = inference.cache_compile(forward, config=config, dynamic=False, **options)

    ready = False

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        nonlocal ready
        with torch.no_grad() if ready else _compiling(cache, judge):
            outputs = cast(tuple[Tensor, ...], compiled(*inputs))
        ready = True
        return outputs

    return run


def _config(torchair: ModuleType) -> Any:
    """torchair's options, the same here as on a device.

    The pattern passes act only if torch_npu can be imported, so no proof would hold for their results.
    """
    config = torchair.CompilerConfig()
    if hasattr(config.experimental_config, "pattern_fusion_pass"):  # releases before 2.7 have no such passes
        config.experimental_config.pattern_fusion_pass = False
    return config


@contextlib.contextmanager
def _unrecovered() -> Iterator[None]:
    """Without torchair's pass that puts scatters over views back in place: it asks for CANN 8.3, and has no switch."""
    try:
        module = importlib.import_module("torchair.patterns._recover_view_inplace_pattern")
    except ModuleNotFoundError:  # an older release
        yield
        return
    with patch.object(module, "recover_view_inplace_pattern", _left):
        yield


def _left(module: fx.GraphModule, example_inputs: object = None, config: object = None) -> fx.GraphModule:
    return module


@contextlib.contextmanager
def _compiling(cache: Path, judge: Callable[[Any], None]) -> Iterator[None]:
    """The settings of a first launch, which later ones do without."""
    log = cache.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with _quiet(log), _torch_npu_absent(), _unrecovered(), _judged(judge), torch.no_grad():
        try:
            yield
        except Exception as error:  # dynamo, torchair and GE raise classes of every kind
            *_, first = causes = list(_causes(error))
            if (ours := next((each for each in causes if isinstance(each, LoweringError)), None)) is not None:
                raise ours from None
            reason = next((line.strip() for line in str(first).splitlines() if line.strip()), type(first).__name__)
            raise LoweringError(
                f"torchair or GE cannot compile or start a step: {reason[:300]}; torchair's log is {log}, GE's are in"
                f" {os.environ.get(GE_LOGS, '~/ascend/log')}; {SHOWN}=1 shows both"
            ) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, the latest first."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or getattr(seen, "inner_exception", None)  # dynamo's own has its cause there


@contextlib.contextmanager
def _judged(judge: Callable[[Any], None]) -> Iterator[None]:
    """Shows every GE graph that is made in the body to ``judge``, once torchair is done with it."""
    graphs = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter").GeConcreteGraph
    finish = graphs.optimize_graph_without_runtime

    def finished(self: Any, *inputs: Any, **options: Any) -> Any:
        done = finish(self, *inputs, **options)
        with _disable_current_modes():  # dynamo compiles under tensors without values
            judge(copy.deepcopy(self.graph._proto))
        return done

    with patch.object(graphs, "optimize_graph_without_runtime", finished):
        yield


def device_of(name: str) -> torch.device:
    """The device; torch knows none called npu before torch_npu is loaded, which may have been forbidden at start."""
    if name.startswith("npu"):
        # Read by CANN's logger when torch_npu loads it.
        os.environ.setdefault(GE_LOGS, str(cache_home() / "draftwood" / "npu" / "log"))
        # Else GE takes the current folder, which may be a bundle, or one that it cannot write.
        with contextlib.suppress(OSError):
            (work := cache_home() / "draftwood" / "npu" / "work").mkdir(parents=True, exist_ok=True)
            os.environ.setdefault(GE_WORK, str(work))
        if os.environ.get(SHOWN):
            os.environ.setdefault("ASCEND_SLOG_PRINT_TO_STDOUT", "1")
        # GE and HCCL take the chosen device, on whatever device a tensor lies.
        devices().set_device(name)
    return torch.device(name)


def devices() -> Any:
    """``torch_npu.npu``: the devices, and graphs of their launches."""
    return importlib.import_module("torch_npu").npu


@contextlib.contextmanager
def profiled(folder: str) -> Iterator[None]:
    """The device's operators in the body, written into a folder by torch_npu's profiler."""
    torch_npu = importlib.import_module("torch_npu")
    with torch_npu.profiler.profile(on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(folder)):
        yield
        torch_npu.npu.synchronize()


def _named(method: Any, name: str) -> Any:
    """The bound method with a code object of this name, unequal to that of any other."""
    function = method.__func__
    code = function.__code__.replace(co_name=name)
    return MethodType(FunctionType(code, function.__globals__, name, closure=function.__closure__), method.__self__)


def decomposed(program: ExportedProgram) -> fx.GraphModule:
    """The step in the operators that are converted; its nodes have the names that a GE graph's values refer to."""
    from draftwood.compiler.ge.retracing import retraced  # with most of torch's compiler, which no reader needs

    with _quiet(), _torch_npu_absent(), uncompiled():
        table = _decompositions()
        join_transposes(program.graph)
        round_inside(program.graph)
        fold_tables(program)
        module = retraced(program, table)
    # torch.export notes the type before every cast; a note is nothing to convert.
    for note in module.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        module.graph.erase_node(note)
    module.recompile()
    return module


def torchair_folder() -> Path:
    """torchair's folder; ModuleNotFoundError if there is none."""
    folder = torch_npu_folder()
    if folder is None:
        raise ModuleNotFoundError("torch_npu holds torchair's converters", name="torch_npu")
    return folder / "dynamo" / "torchair"


@cache
def _torchair() -> ModuleType:
    package = torchair_folder()
    if cann_available():
        importlib.import_module("torch_npu")
        return _with_ours(importlib.import_module("torchair"))
    sys.modules.setdefault(_EXTENSION, _StandIn(_EXTENSION))
    sys.path.insert(0, str(package.parent))
    try:
        with _quiet(), _torch_npu_absent(), _signals_left():
            return _with_ours(importlib.import_module("torchair"))
    finally:
        sys.path.remove(str(package.parent))


def _signals_left() -> contextlib.AbstractContextManager[Any]:
    """torchair takes over SIGINT and SIGTERM at import to shut a device down that is not there. One that came while its
    handlers stood would be lost, so they never do."""
    take = signal.signal

    def left(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in (signal.SIGINT, signal.SIGTERM) else take(number, handler)

    return patch.object(signal, "signal", left)


def _with_ours(torchair: ModuleType) -> ModuleType:
    ge, utils = (importlib.import_module(f"torchair._ge_concrete_graph.{name}") for name in ("ge_apis", "utils"))
    register_converters(torchair, ge, utils.dtype_promote)
    return torchair


class _Names:
    """An enumeration whose numbers only code for a device reads."""

    def __getattr__(self, name: str) -> str:
        return name


class _StandIn(ModuleType):
    """In place of torchair's C extension: starts and stops an engine that is not there."""

    class TorchNpuGraphBase:
        def __init__(self, name: str) -> None:
            self.name = name

    TorchDataType = _Names()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"torchair asked its C extension for {name}, which needs CANN")

    @staticmethod
    def InitializeGraphEngine(options: Mapping[str, str]) -> None: ...

    @staticmethod
    def FinalizeGraphEngine() -> None: ...

    @staticmethod
    def check_cann_compat(operator: str, inputs: object, attributes: object) -> str:
        return ""  # no CANN of any version to disagree with


class _Absent:
    """A finder that knows torch_npu does not load here, so that no half of it is ever imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "torch_npu":
            raise ModuleNotFoundError(f"{name} needs CANN", name=name)
        return None


@contextlib.contextmanager
def _torch_npu_absent() -> Iterator[None]:
    """Hides torch_npu from torchair if CANN is absent. A ``None`` in ``sys.modules`` must not be there either."""
    if cann_available():
        yield
        return
    hidden = "torch_npu" in sys.modules and sys.modules["torch_npu"] is None
    if hidden:
        del sys.modules["torch_npu"]
    finder = _Absent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if hidden:
            sys.modules["torch_npu"] = None  # type: ignore[assignment]


@contextlib.contextmanager
def _quiet(log: Path | None = None) -> Iterator[None]:
    """Keeps hundreds of warnings about unused converters from the terminal, unless the user asked for them.

    ``log`` is a file that is written anew with all that torchair says.
    """
    logger, on_screen = logging.getLogger("torchair"), bool(os.environ.get(SHOWN))
    level, levels = logger.level, [(handler, handler.level) for handler in logger.handlers]
    logger.setLevel(logging.INFO if log or on_screen else logging.CRITICAL)
    for handler in () if on_screen else tuple(logger.handlers):
        handler.setLevel(logging.CRITICAL)
    file = logging.FileHandler(log, mode="w", encoding="utf-8") if log else None
    if file is not None:
        logger.addHandler(file)
    with warnings.catch_warnings():
        warnings.simplefilter("default" if on_screen else "ignore")
        try:
            yield
        finally:
            if file is not None:
                logger.removeHandler(file)
                file.close()
            logger.setLevel(level)
            for handler, before in levels:
                handler.setLevel(before)


@cache
def _decompositions() -> dict[Any, Any]:
    """torchair's own table, and ours."""
    config = _torchair().CompilerConfig()
    utils = importlib.import_module("torchair._utils")
    theirs: dict[Any, Any] = utils.get_npu_default_decompositions()
    utils.add_npu_patch(theirs, config)
    return theirs | npu_forms()


def _write_back(module: fx.GraphModule, written: Mapping[str, int]) -> None:
    """Turns outputs into copies onto their inputs: the form in which torchair recognises a write in place."""
    graph = module.graph
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    output = graph.output_node()
    values: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    with graph.inserting_before(output):
        for target, number in written.items():
            copy = graph.call_function(torch.ops.aten.copy_.default, (inputs[target], values[number]))
            copy.meta = dict(values[number].meta)
    file = set(range(len(values))) - set(written.values())
    output.args = (tuple(values[number] for number in sorted(file)),)
    module.recompile()


def _explain(error: Exception, module: fx.GraphModule, step: str) -> str:
    """One line: operator, step, source line, and torchair's reason."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    named = re.search(r"While executing %(\w+)", text)
    node = next((n for n in module.graph.nodes if named and n.name == named[1]), None)
    if node is None:
        return f"step {step}: torchair cannot lower it: {reason[:300]}"
    return f"step {step}: operator {node.target} at {source_line(node)} cannot be lowered to GE: {reason[:300]}"


def source_line(node: fx.Node) -> str:
    """File and line that a traced node comes from."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else "an unknown line"


__all__ = ["compile_step", "convert", "decomposed", "device_of", "devices", "ge_ir", "profiled", "source_line"]
