"""What runs a bundle's graphs on onnxruntime, with every buffer bound once and nothing copied per step."""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature, TensorSignature, cache_names
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.trees import TreeBuffers

# T tree rows, R rows with logits, V vocabulary, H hidden, I levels, K candidates

NUMPY = {"int64": np.int64, "int32": np.int32, "bool": np.bool_, "float32": np.float32}
_shared = False


class StepResult(NamedTuple):
    """A teacher step's outputs, as views that the next step of the same engine overwrites."""

    logits_RV: NDArray[np.float32]
    choice_R: NDArray[np.int64]
    hidden_RH: NDArray[np.float32]

    def first(self, rows: int) -> StepResult:
        """The first ``rows`` rows: what lies behind them is padding."""
        return StepResult(self.logits_RV[:rows], self.choice_R[:rows], self.hidden_RH[:rows])


class Engine(Protocol):
    """Runs the steps of a bundle; the caller owns the cache and commits."""

    bundle: Bundle

    def new_cache(self, slots: int) -> Cache:
        """An empty cache of ``slots`` slots."""

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        """Appends ``tokens`` [n], commits them, and returns the last row's outputs (R = 1)."""

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        """Runs the tree's rows behind the committed length (R = T); the branch is left open."""

    def draft(self, hidden_1H: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Candidates [I, K] of every level and their log-probabilities, best first."""


def default_threads() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0))


def share_threads(threads: int | None = None) -> None:
    """One thread pool for all sessions of this process, the fastest where several sessions take turns.

    For programs that own their process, such as the command line: from then on onnxruntime refuses every
    session, also one made elsewhere, without ``use_per_session_threads = False``. Only the first call counts;
    all processors where ``threads`` is None.
    """
    global _shared
    if not _shared:
        _shared = True
        ort.set_global_thread_pool_sizes(threads or default_threads(), 1)


def session(bundle: Bundle, graph: GraphSignature, threads: int | None, prepack: bool = True) -> ort.InferenceSession:
    """A session of one graph, on the shared pool if there is one.

    Otherwise it has a pool of its own, and ``threads`` None means all processors. A waiting pool spins, and
    the pools of two sessions that take turns would rob each other, so only the ``step`` graph's spins.
    ``prepack`` keeps a second, faster layout of the weights in memory; without it the sessions of a bundle
    share one memory map.
    """
    options = ort.SessionOptions()
    if _shared:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads or default_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if graph.kind == "step" else "0")
    options.log_severity_level = 3
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    path = bundle.folder / graph.file
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own that share no base
        raise BundleError(f"{path}: onnxruntime {ort.__version__} cannot load it: {str(error)[:200]}") from error


def fixed(spec: TensorSignature) -> tuple[int, ...]:
    """The shape of a tensor of a static graph."""
    assert not any(isinstance(size, str) for size in spec.shape), f"{spec.name} has a run-time size"
    return tuple(int(size) for size in spec.shape)


def allocate(spec: TensorSignature) -> NDArray:
    """Zeros of the declared shape and dtype."""
    return np.zeros(fixed(spec), NUMPY[spec.dtype])


class Bindings:
    """One session with its inputs and outputs bound by name to numpy memory."""

    def __init__(self, session: ort.InferenceSession, graph: GraphSignature) -> None:
        self.session = session
        self._binding = session.io_binding()
        self._types = {spec.name: NUMPY[spec.dtype] for spec in (*graph.inputs, *graph.outputs)}
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._kept: dict[str, NDArray] = {}
        self._sides: list[NDArray[np.float32]] | None = None

    def input(self, name: str, array: NDArray) -> None:
        """Binds an input to the array's memory; binding the same memory again costs nothing."""
        if self._changed(name, array):
            self._binding.bind_input(name, "cpu", 0, self._types[name], array.shape, array.ctypes.data)

    def output(self, name: str, array: NDArray) -> None:
        """Binds an output to the array's memory."""
        if self._changed(name, array):
            self._binding.bind_output(name, "cpu", 0, self._types[name], array.shape, array.ctypes.data)

    def caches(self, sides: list[NDArray[np.float32]], shape: tuple[int, ...]) -> None:
        """Binds every cache as input and output of one buffer, so that a step writes it in place."""
        if sides is self._sides:
            return
        self._sides = sides
        for name, side in zip(cache_names(len(sides) // 2), sides, strict=True):
            self.input(name, side.reshape(shape))
            self.output(f"{name}.out", side.reshape(shape))

    def _changed(self, name: str, array: NDArray) -> bool:
        key = (array.ctypes.data, array.shape)
        if self._bound.get(name) == key:
            return False
        assert array.flags.c_contiguous and array.dtype == self._types[name], (name, array.dtype, array.shape)
        self._bound[name] = key
        self._kept[name] = array  # onnxruntime keeps the pointer only
        return True

    def run(self) -> None:
        self.session.run_with_iobinding(self._binding)


class Drafter:
    """The draft step, shared by all engines: one hidden state in, candidates out."""

    def __init__(self, bundle: Bundle, threads: int | None) -> None:
        graph = bundle.graph("draft")
        self._bindings = Bindings(session(bundle, graph, threads), graph)
        arrays = [allocate(spec) for spec in (*graph.inputs, *graph.outputs)]
        self._hidden_1H, self._candidates_IK, self._scores_IK = arrays
        self._bindings.input("hidden", self._hidden_1H)
        self._bindings.output("candidates", self._candidates_IK)
        self._bindings.output("scores", self._scores_IK)

    def __call__(self, hidden_1H: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        self._hidden_1H[:] = hidden_1H
        self._bindings.run()
        return self._candidates_IK, self._scores_IK
