"""Runs a bundle's NPU graphs as captured launches.

torch_npu's NPUGraph (aclgraph) records the launches of a step and replays them as one. GE compiles nothing: the traced
program of a step's ``.air`` is recorded, operator by operator, in torch_npu's own kernels. Its masks, lengths and slots
are tensors, so no operator's parameter changes between launches and ``NPUGraph.update`` is not needed. A record holds
addresses, so a step is recorded once for each set of buffers. Texts get their buffers from `BufferPool`, which keeps
these sets few.

It has never run on a device. The tests run it with a stand-in for torch_npu that records and repeats operators.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, fx

from draftwood.compiler.ge.torchair_bridge import devices, source_line
from draftwood.compiler.targets.online import InPlaceStep, Launch, Started, TorchairExecutor
from draftwood.compiler.targets.staging import HostOutputs
from draftwood.errors import InvariantError, LoweringError, RequestError
from draftwood.kernels.experts import GROUPED_LINEAR
from draftwood.kernels.quantised import QUANTISED_LINEAR
from draftwood.kernels.rounded import ROUNDED_LINEAR
from draftwood.kernels.scatter import SCATTER_ND_UPDATE, SCATTER_ND_UPDATE_
from draftwood.manifest import GraphSignature, Manifest

# Records that are kept. Each takes a stream at least, and a device has 1984 (CANN's document of aclrtCreateStream).
MOST = 512
# Words of a device that cannot take a record -> the remedy (vllm-ascend, compilation/acl_graph.py and issue 10555).
_STREAMS = "the device has no stream left for it: end other programs on the device, or take --engine npu"
_LACKS = {
    "alloc sq cq fail": f"install Ascend HDK 25.5.1 or later and the CANN that fits it; with these, {_STREAMS}",
    **dict.fromkeys(("207005", "207008", "resource alloc fail", "stream resources are insufficient"), _STREAMS),
}
# Settings of torch_npu that wait for every operator, or leave launches to a second queue: nothing can be recorded then.
_UNFIT = {"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}
# Ours, put to GE by converters of ours. Their references read counts on the host, or multiply int8 as floats.
_COMPOSED = {contract.operator for contract in (GROUPED_LINEAR, QUANTISED_LINEAR, ROUNDED_LINEAR)}


class CapturedExecutor(TorchairExecutor):
    """Records a step at the first launch with its addresses, and replays it from then on."""

    def __init__(self, folder: Path, manifest: Manifest, device: str = "npu:0") -> None:
        for name, value in _UNFIT.items():
            if os.environ.get(name) == value:
                raise RequestError(
                    f"--engine npu-captured: with {name}={value} no launch can be recorded; unset it, or take"
                    " --engine npu"
                )
        super().__init__(folder, manifest, device)
        self._records = Records(devices())
        self._blocks = BufferPool(super().zeros)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A buffer on the device, in the graphs' element type, at an address that another text has left if one has."""
        return self._blocks.take(shape)

    def started(self, graph: GraphSignature) -> Started:
        """A step whose launches are recorded."""
        step = self.traced(graph)
        write_in_place(step, f"{self.folder}: graph {graph.name}")
        return Started(step, graph, self.device, lambda launch: self._records.recorded(graph.name, launch))


class Records:
    """The records of a device; not for several threads at once.

    Args:
        npu: ``torch_npu.npu``.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        # A record takes no operator of the older interface, to which a tensor in a format of the device's own leads.
        npu.config.allow_internal_format = False
        # Launches take turns, and leave nothing in this memory that another reads.
        self._pool = npu.graph_pool_handle()
        self.kept: OrderedDict[tuple[Any, ...], tuple[Any, HostOutputs]] = OrderedDict()

    def recorded(self, name: str, launch: Launch) -> Launch:
        """The launch of a step, replayed if it was recorded with these addresses."""

        def run(inputs: Mapping[str, Tensor], buffers: Mapping[str, Any]) -> HostOutputs:
            places = name, *((key, value.data_ptr()) for key, value in (*inputs.items(), *buffers.items()))
            if (record := self.kept.get(places)) is None:
                # The first launch is not recorded: it loads kernels and makes the block that the host reads.
                outputs = launch(inputs, buffers)
                self.kept[places] = self._record(launch, inputs, buffers), outputs
                return outputs
            self.kept.move_to_end(places)
            graph, outputs = record
            graph.replay()
            return outputs

        return run

    def _record(self, launch: Launch, inputs: Mapping[str, Tensor], buffers: Mapping[str, Any]) -> Any:
        """Records a launch without executing it."""
        if len(self.kept) == MOST:
            _, (oldest, _) = self.kept.popitem(last=False)
            oldest.reset()
        graph = self._npu.NPUGraph()
        try:
            # Other threads allocate memory for new texts meanwhile.
            with self._npu.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                launch(inputs, buffers)
        except RuntimeError as error:
            if advice := next((advice for words, advice in _LACKS.items() if words in str(error).lower()), None):
                reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
                raise RequestError(
                    f"--engine npu-captured: a launch cannot be recorded besides {len(self.kept)} others ({reason}):"
                    f" {advice}"
                ) from error
            raise
        return graph


class BufferPool:
    """Memory for buffers; the first free block of a shape serves the next buffer of that shape."""

    def __init__(self, zeros: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._zeros = zeros
        self._made: dict[tuple[int, ...], list[Tensor]] = {}
        self._free: dict[tuple[int, ...], set[int]] = {}

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros; free again when the tensor and all views of it are gone."""
        blocks, free = self._made.setdefault(shape, []), self._free.setdefault(shape, set())
        if free:
            number = min(free)
            free.remove(number)
            blocks[number].zero_()
        else:
            number = len(blocks)
            blocks.append(self._zeros(shape))
        # Not a view of the block: views of a view would keep the block alive and not the buffer.
        block = blocks[number]
        buffer = torch.empty(0, dtype=block.dtype, device=block.device)
        buffer.set_(block.untyped_storage(), 0, block.shape, block.stride())
        finalize(buffer, free.add, number).atexit = False
        return buffer


def write_in_place(step: InPlaceStep, where: str) -> None:
    """Makes a step's program write its caches in place; torchair would do that by itself.

    Raises:
        LoweringError: torch_npu has no kernel for an operator.
    """
    graph = step.graph.graph
    for node in graph.nodes:
        if node.target in _COMPOSED:
            raise LoweringError(
                f"{where}: {node.target} at {source_line(node)} is several of torch_npu's operators, so it is not"
                " captured; take --engine npu"
            )
    inputs, output = graph.find_nodes(op="placeholder")[len(step.held) :], graph.output_node()
    values: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    for number, place in step.written:
        write, cache = values[number], inputs[place]
        if write.target != SCATTER_ND_UPDATE.operator or set(cache.users) != {write} or write.args[0] is not cache:
            raise InvariantError(f"{where}: {cache.name} is not written once, by one scatter, before it is read")
        write.target = SCATTER_ND_UPDATE_.operator
    written = {number for number, _ in step.written}
    output.args = (tuple(value for number, value in enumerate(values) if number not in written),)
    step.graph.recompile()
    step.written = []
