"""The engine of static ONNX graphs on Qualcomm's HTP, by its own compiler: onnxruntime-qnn's.

Without an HTP, on x86, the same library runs the compiled graphs in its emulator: slowly, in the HTP's arithmetic. The
compiler takes a graph whole or the engine refuses it; nothing is left to the CPU in silence. It computes in fp16;
inputs and outputs are fp32.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from draftwood.errors import BundleError, RequestError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.sessions import check_session
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.sessions import Bindings, OnnxExecutor, SessionBindings
from draftwood.runtime.engines.static import StaticEngine, static_graphs
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.threads import pool_options

# The provider is registered under this name alone (QNN-ExecutionProvider.md, "Using QNN EP as a Plugin EP").
PROVIDER = "QNNExecutionProvider"
# A Snapdragon X Elite, by its number in Qualcomm's list of SoCs. For no SoC in particular the compiler keeps fp32, in
# which it has no Gather: "Failed to finalize QNN graph", 1002.
EMULATED_SOC = "60"
_TRACE = "qnn_op_trace.json"


class Htp:
    """The HTP of this machine, or its emulator.

    Raises:
        RequestError: onnxruntime-qnn is not installed, or offers no HTP here.
    """

    def __init__(self) -> None:
        try:
            import onnxruntime_qnn
        except ImportError:
            raise RequestError(
                "--engine qnn: needs the package onnxruntime-qnn, which is not installed: pip install 'draftwood[qnn]'"
            ) from None
        if not _devices():
            ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
        npus = [device for device in _devices() if device.device.type == ort.OrtHardwareDeviceType.NPU]
        self._devices, self.emulated = npus or _devices(), not npus
        self._backend = onnxruntime_qnn.get_qnn_htp_path()
        if not self._devices or not Path(self._backend).is_file():
            raise RequestError(
                f"--engine qnn: onnxruntime-qnn {onnxruntime_qnn.__version__} has no HTP for this machine; take"
                " --engine static"
            )

    def session(self, path: Path, threads: int | None) -> ort.InferenceSession:
        """A graph, compiled whole.

        Raises:
            BundleError: the compiler does not take it; the nodes that it refuses are named.
        """
        with tempfile.TemporaryDirectory(prefix="draftwood-qnn-") as scratch, _quiet():
            folder = Path(scratch)
            try:
                opened = ort.InferenceSession(str(_fused(path, folder, threads)), self._options(folder, threads))
            except Exception as error:  # onnxruntime raises classes of its own that share no base
                why = ", ".join(refused_nodes(folder / _TRACE)) or str(error)[:200]
                raise BundleError(
                    f"{path}: the HTP's compiler does not take {why}; expected operators of its own; take --engine"
                    " cpu, as run --fallback does"
                ) from error
        opened.disable_fallback()
        return opened

    def _options(self, folder: Path, threads: int | None) -> ort.SessionOptions:
        """Nothing is left to the CPU; refusals are written into the folder."""
        options = pool_options(threads, spins=False)
        options.log_severity_level = 4
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        traced = {"enable_framework_op_trace": "1", "framework_op_trace_dir": str(folder)}
        soc = {"soc_model": EMULATED_SOC} if self.emulated else {}
        options.add_provider_for_devices(self._devices, {"backend_path": self._backend, **traced, **soc})
        return options


def _fused(path: Path, folder: Path, threads: int | None) -> Path:
    """The graph in the folder, as onnxruntime has optimised it: an RMS norm is one operator, which the HTP has too.

    In fp16 the square of a state above 255 is no number, so an HTP must not compute a norm by its parts.
    """
    options = pool_options(threads, spins=False)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    written = folder / path.name
    options.optimized_model_filepath = str(written)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", f"{path.name}.weights")
    # A norm that also adds is none of an HTP's operators.
    ort.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
    return written


def _devices() -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]


def refused_nodes(trace: Path) -> list[str]:
    """Operators that the compiler has left out, by its own trace: each with its node's name, which ends in the source
    line; none without a trace."""
    try:
        nodes = json.loads(trace.read_text())["unsupported_nodes"]
        return [f"{node['op_type']} ({node['node_name']})" for node in nodes]
    except (OSError, ValueError, KeyError, TypeError):
        return []


@contextmanager
def _quiet() -> Iterator[None]:
    """In the body, the library's prints to standard output go to standard error: reports are printed there."""
    saved, libc = os.dup(1), ctypes.CDLL(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


class HtpBindings(SessionBindings):
    """A cache has an output of its own, and is copied back: no document says that a graph may write where it reads."""

    def __init__(self, session: ort.InferenceSession, graph: GraphSignature) -> None:
        super().__init__(session, graph)
        self._written: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def caches(self, names: Iterable[str], buffers: Iterable[Buffer]) -> None:
        for name, buffer in zip(names, buffers, strict=True):
            array = buffer.reshape(self._shapes[name])
            written = self._written[name][1] if name in self._written else np.empty_like(array)
            self._written[name] = array, written
            self.inputs({name: array})
            self.outputs({f"{name}.out": written})

    def run(self) -> None:
        super().run()
        for cache, written in self._written.values():
            np.copyto(cache, written)


class HtpExecutor(OnnxExecutor):
    """Static graphs on the HTP."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        super().__init__(bundle, threads)
        self.htp, self.nodes = Htp(), Counter[str]()

    def bindings(self, graph: GraphSignature) -> Bindings:
        path = self._bundle.folder / graph.file
        opened = self.htp.session(path, self._threads)
        check_session(opened, graph, path)
        for part in opened.get_provider_graph_assignment_info():
            self.nodes[part.ep_name] += len(part.get_nodes())
        return HtpBindings(opened, graph)


def _check_rows(bundle: Bundle) -> None:
    """BundleError if rows are rounded to int8, each with a scale that is made at run time: W8A8."""
    manifest = bundle.manifest
    drafter = manifest.drafter
    if manifest.teacher.config["quantised"]:
        whose, way = "teacher", "build it with --precision nbits, which keeps the weights in eight bits"
    elif drafter and drafter.config.get("quantised"):
        whose, way = "drafter", "build it without --int8-drafter"
    else:
        return
    raise BundleError(
        f"{bundle.folder}: its {whose} rounds rows to int8, which the HTP's compiler does not take; {way}, or take"
        " --engine cpu"
    )


class HtpEngine(StaticEngine):
    """Decodes with the static ONNX graphs on an HTP. On one it has never run, in its emulator it has.

    Raises:
        RequestError: no onnxruntime-qnn.
        BundleError: the bundle holds no static ONNX graphs, or the compiler does not take one of them.
    """

    executor: HtpExecutor
    half = True

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        _check_rows(bundle)
        graphs = static_graphs(bundle)
        super().__init__(bundle, graphs, HtpExecutor(bundle, opening.threads))

    @property
    def nodes(self) -> Mapping[str, int]:
        return self.executor.nodes
