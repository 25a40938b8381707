"""Sessions of a bundle's graphs on onnxruntime, with every buffer bound once and nothing copied per step."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from draftwood.contract import lives
from draftwood.errors import BundleError, RequestError
from draftwood.manifest import LAYOUTS, GraphSignature, TensorSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.bundle.sessions import check_session
from draftwood.runtime.bundle.weights import read_header
from draftwood.runtime.engines.memory import machine_memory
from draftwood.runtime.engines.turns import Turns
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros, host_zeros
from draftwood.threads import pool_options

NUMPY = {"int64": np.int64, "int32": np.int32, "bool": np.bool_, "float32": np.float32}
# Processors whose uint8 by int8 products onnxruntime sums without saturating; on other x86 it needs an option to be
# exact.
_EXACT = {"avx_vnni", "avx512_vnni", "amx_int8"}
# 1.29 and 1.24 abort at int8 weights if products saturate and have to be exact.
LEAST_ONNXRUNTIME = (1, 30)
# Kinds of graphs that multiply several rows at every step.
_OF_ROWS = {"step", "grouped", "batch", "bitwise", "verify", "draft", "draft-texts"}


def session(bundle: Bundle, graph: GraphSignature, threads: int | None) -> ort.InferenceSession:
    """A session of one graph, on the shared pool if there is one."""
    path = bundle.folder / graph.file
    if tuple(int(number) for number in ort.__version__.split(".")[:2]) < LEAST_ONNXRUNTIME:
        least = ".".join(map(str, LEAST_ONNXRUNTIME))
        raise RequestError(f"{path}: onnxruntime {ort.__version__} is too old for it; install {least} or later")
    options = session_options(bundle, graph, threads)
    try:
        opened = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        raise BundleError(f"{path}: onnxruntime {ort.__version__} cannot load it: {str(error)[:200]}") from error
    check_session(opened, graph, path)
    return opened


def session_options(bundle: Bundle, graph: GraphSignature, threads: int | None) -> ort.SessionOptions:
    """The options to open a graph with. If no pool is shared it has one of its own, and ``threads`` None means all
    processors. A waiting pool spins, and the pools of two sessions that take turns would rob each other. So only that
    of a step of any size spins. A graph that multiplies several rows at every step keeps its weights in a second
    layout, or each launch would make it anew. Static graphs, one for every tree, do so unless the weights are large.
    All other sessions share one memory map, unless the teacher's weights are packed.
    """
    options = pool_options(threads, spins=graph.kind in ("step", "grouped", "batch", "bitwise"))
    if bundle.manifest.int8 and products_saturate():
        options.add_session_config_entry("session.x64quantprecision", "1")
    laid_out = graph.kind in _OF_ROWS and not (graph.slots and _is_large(bundle))
    # If packed weights are not laid out anew, their products compute another function, hundreds of times slower.
    if not laid_out and not bundle.manifest.packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _is_large(bundle: Bundle) -> bool:
    """Whether the weights take more than an eighth of this machine's memory."""
    return _weights_bytes(bundle) > machine_memory() // 8


def sessions_in_memory(bundle: Bundle) -> int | None:
    """Graphs with packed weights that are open at a time, if each needs the weights in a layout of its own.

    A quarter of this machine's memory is theirs. None of other weights, which all sessions share.
    """
    if not bundle.manifest.packed:
        return None
    return max(1, machine_memory() // 4 // _weights_bytes(bundle))


def _weights_bytes(bundle: Bundle) -> int:
    """Without layouts: a graph that finds none of them makes as much itself."""
    graphs = bundle.manifest.graph_set("onnx")
    assert graphs is not None, "a graph of it is being opened"
    tensors = read_header(bundle.folder / graphs.weights)
    spans = [tensor.data_offsets for name, tensor in tensors.items() if not name.startswith(LAYOUTS)]
    return sum(end - begin for begin, end in spans)


def products_saturate(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor's fast products of uint8 and int8 lose what exceeds 16 bits: x86 without VNNI."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine() in ("x86_64", "AMD64")  # exact everywhere, and slower
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    return flags is not None and not flags & _EXACT


def fixed(spec: TensorSignature) -> tuple[int, ...]:
    """The shape of a tensor of a static graph."""
    assert not any(isinstance(size, str) for size in spec.shape), f"{spec.name} has a run-time size"
    return tuple(int(size) for size in spec.shape)


def allocate(spec: TensorSignature) -> NDArray:
    """Zeros of the declared shape. For a graph in half precision they are fp32, which its executor rounds."""
    return np.zeros(fixed(spec), NUMPY.get(spec.dtype, np.float32))


class Bindings(ABC):
    """A graph with its inputs and outputs bound by name to numpy memory, which whatever runs it reads and writes."""

    def __init__(self, graph: GraphSignature) -> None:
        self._name = graph.name
        self._types = {spec.name: NUMPY[spec.dtype] for spec in (*graph.inputs, *graph.outputs)}
        # A cache has its signature's shape; at most one of its sizes is chosen at run time.
        self._shapes = {
            spec.name: tuple(-1 if isinstance(size, str) else size for size in spec.shape) for spec in graph.inputs
        }
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._kept: dict[str, NDArray] = {}
        self._buffers: dict[str, Buffer] = {}

    @abstractmethod
    def bind(self, name: str, array: NDArray, output: bool) -> None:
        """Hands an array's memory over, which is kept alive here."""

    @abstractmethod
    def run(self) -> None:
        """One launch; BundleError if the graph fails."""

    def inputs(self, arrays: Mapping[str, NDArray]) -> None:
        """Binds inputs to the arrays' memory; binding the same memory again costs nothing."""
        for name, array in arrays.items():
            if self._changed(name, array):
                self.bind(name, array, output=False)

    def outputs(self, arrays: Mapping[str, NDArray]) -> None:
        """Binds outputs to the arrays' memory."""
        for name, array in arrays.items():
            if self._changed(name, array):
                self.bind(name, array, output=True)

    def caches(self, names: Iterable[str], buffers: Iterable[Buffer]) -> None:
        """Binds every cache as input and output of one buffer, so that a step writes it in place."""
        for name, buffer in zip(names, buffers, strict=True):
            if buffer is not self._buffers.get(name):
                self._buffers[name] = buffer
                array = buffer.reshape(self._shapes[name])
                self.inputs({name: array})
                self.outputs({f"{name}.out": array})

    def _changed(self, name: str, array: NDArray) -> bool:
        key = (array.ctypes.data, array.shape)
        if self._bound.get(name) == key:
            return False
        assert array.flags.c_contiguous and array.dtype == self._types[name], (name, array.dtype, array.shape)
        self._bound[name] = key
        self._kept[name] = array
        return True


class SessionBindings(Bindings):
    """Bindings of a session of onnxruntime."""

    def __init__(self, session: ort.InferenceSession, graph: GraphSignature) -> None:
        super().__init__(graph)
        self.session = session
        self._binding = session.io_binding()

    def bind(self, name: str, array: NDArray, output: bool) -> None:
        bind = self._binding.bind_output if output else self._binding.bind_input
        bind(name, "cpu", 0, self._types[name], array.shape, array.ctypes.data)

    def run(self) -> None:
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime raises classes of its own that share no base
            raise BundleError(f"graph {self._name} fails as it runs: {str(error)[:200]}; build it again") from error


class OnnxExecutor:
    """Runs graphs of a bundle whose outputs have fixed shapes; a graph is opened when it is first needed, or before.

    At most ``most`` are open at a time, None meaning all: another one takes the place of the one opened first.
    """

    @staticmethod
    def read(buffer: Buffer) -> NDArray[np.float32]:
        """See `executor.Executor.read`."""
        return np.asarray(buffer, np.float32)

    @property
    def zeros(self) -> Zeros:
        """See `executor.Executor.zeros`."""
        return host_zeros

    def __init__(self, bundle: Bundle, threads: int | None, most: int | None = None) -> None:
        self._bundle, self._threads, self._most = bundle, threads, most
        self._opened: dict[str, tuple[Bindings, dict[str, NDArray]]] = {}
        self._opening = Turns()

    def run(self, graph: GraphSignature, inputs: dict[str, NDArray], buffers: dict[str, Buffer]) -> dict[str, NDArray]:
        """See `executor.Executor.run`."""
        bindings, outputs = self.open(graph)
        read, written = {spec.name for spec in graph.inputs}, {spec.name for spec in graph.outputs}
        caches = [name for name in graph.caches if name in buffers]
        bindings.caches(caches, [buffers[name] for name in caches])
        bindings.inputs(inputs | {name: buffers[name] for name in buffers.keys() & read - set(caches)})
        bindings.outputs(outputs | {name: buffers[name] for name in buffers.keys() & written})
        bindings.run()
        return outputs

    def open(self, graph: GraphSignature) -> tuple[Bindings, dict[str, NDArray]]:
        """The graph with its outputs bound; the one that was opened before, if it was."""
        opened = self._opened.get(graph.name)
        if opened is None:
            with self._opening:
                opened = self._opened.get(graph.name)
                if opened is None:
                    while self._most and len(self._opened) >= self._most:
                        del self._opened[next(iter(self._opened))]
                    opened = self._opened[graph.name] = self._bound(graph)
        return opened

    def bindings(self, graph: GraphSignature) -> Bindings:
        """The graph, opened, with nothing bound."""
        return SessionBindings(session(self._bundle, graph, self._threads), graph)

    def _bound(self, graph: GraphSignature) -> tuple[Bindings, dict[str, NDArray]]:
        bindings = self.bindings(graph)
        stays = lives(graph, "sequence")
        outputs = {s.name: allocate(s) for s in graph.outputs if s.name in graph.results and s.name not in stays}
        bindings.outputs(outputs)
        return bindings, outputs
