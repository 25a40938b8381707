"""The engines of static ONNX graphs on OpenVINO's devices: a request a graph, with caches in shared tensors."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from draftwood.errors import BundleError, RequestError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.openvino.blobs import Blobs
from draftwood.runtime.engines.registry import engine_kind
from draftwood.runtime.engines.sessions import Bindings, OnnxExecutor
from draftwood.runtime.engines.static import StaticEngine, static_graphs
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros, host_zeros
from draftwood.telemetry import import_openvino
from draftwood.threads import counted_threads

# What a device computes in. The NPU has fp16 alone; the others could, and would by themselves, take less than fp32.
# A group size of 0: rows of quantised layers are rounded to int8 by the graph, one scale a row, and not once more.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
# A CPU's blobs leave out the weights that they find in the bundle.
_CONFIG = {"CPU": _EXACT | {"CACHE_MODE": "OPTIMIZE_SIZE"}, "GPU": _EXACT, "NPU": {"INFERENCE_PRECISION_HINT": "f16"}}
_DRIVERS = {"CPU": "", "GPU": "install Intel's GPU driver, or ", "NPU": "install Intel's NPU driver, or "}


class OpenVinoDevice:
    """The device of an engine of OpenVINO's, and its host's memory.

    Raises:
        RequestError: openvino is not installed, or finds no such device.
    """

    def __init__(self, engine: str, threads: int | None = None) -> None:
        self.name, self.engine, self._threads = engine_kind(engine).device, f"--engine {engine}", threads
        try:
            openvino = import_openvino()
        except ImportError:
            raise RequestError(
                f"{self.engine}: needs the package openvino, which is not installed: pip install 'draftwood[openvino]'"
            ) from None
        self._openvino, self.core, self.version = openvino, openvino.Core(), openvino.get_version()
        devices = self.core.available_devices
        if not any(available.partition(".")[0] == self.name for available in devices):
            raise RequestError(
                f"{self.engine}: OpenVINO {self.version} finds no {self.name} here, but {', '.join(devices)};"
                f" {_DRIVERS[self.name]}take --engine openvino"
            )
        # Memory that the device reads and writes itself; what lies elsewhere it copies in and out.
        self._context = None if self.name == "CPU" else self.core.get_default_context(self.name)

    @property
    def config(self) -> dict[str, Any]:
        """The settings with which every graph is compiled: one text at a time waits for each launch."""
        config = _CONFIG[self.name] | {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        return config | ({"INFERENCE_NUM_THREADS": counted_threads(self._threads)} if self.name == "CPU" else {})

    def zeros(self, shape: tuple[int, ...]) -> Buffer:
        """fp32 zeros in host memory that the device can use without a copy."""
        if self._context is None or 0 in shape:
            return host_zeros(shape)
        tensor = self._context.create_host_tensor(self._openvino.Type.f32, self._openvino.Shape(shape))
        array = tensor.data  # a view that keeps the tensor
        array[:] = 0
        return array

    def tensor(self, array: NDArray) -> Any:
        """A tensor over the array's memory."""
        return self._openvino.Tensor(array, shared_memory=True)


class RequestBindings(Bindings):
    """Bindings of an inference request."""

    def __init__(self, device: OpenVinoDevice, compiled: Any, graph: GraphSignature) -> None:
        super().__init__(graph)
        self._device, self._request = device, compiled.create_infer_request()

    def bind(self, name: str, array: NDArray, output: bool) -> None:
        self._request.set_tensor(name, self._device.tensor(array))

    def run(self) -> None:
        try:
            self._request.start_async()  # not infer(), which copies every output
            self._request.wait()
        except RuntimeError as error:
            raise BundleError(f"graph {self._name} fails on {self._device.name}: {str(error)[:300]}") from error


class OpenVinoExecutor(OnnxExecutor):
    """Graphs compiled for a device, or read from the blobs of earlier compilations."""

    def __init__(self, bundle: Bundle, device: OpenVinoDevice) -> None:
        super().__init__(bundle, None)
        self.device, self.blobs = device, Blobs(bundle, device.core, device.name, device.config)

    @property
    def zeros(self) -> Zeros:
        return self.device.zeros

    def bindings(self, graph: GraphSignature) -> Bindings:
        return RequestBindings(self.device, self.blobs.compiled(graph), graph)


class OpenVinoEngine(StaticEngine):
    """Static graphs through OpenVINO. On a GPU or NPU it has never run.

    Raises:
        RequestError: no such device here.
        BundleError: the bundle holds no static ONNX graphs, or the NPU does not take one of them.
    """

    executor: OpenVinoExecutor

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        device = OpenVinoDevice(opening.engine or "openvino", opening.threads)
        graphs = static_graphs(bundle)
        super().__init__(bundle, graphs, OpenVinoExecutor(bundle, device))

    @property
    def half(self) -> bool:
        return self.executor.device.name == "NPU"
