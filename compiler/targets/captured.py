"""Runs a bundle's NPU graphs as captured launches: torch_npu's NPUGraph (aclgraph) records what a step launches, and
launches it again as one.

GE compiles nothing. What is recorded is the traced program that a step's ``.air`` was made of, operator by operator, in
torch_npu's own kernels. Its masks, lengths and slots are tensors, so no operator's parameter changes between launches,
which ``NPUGraph.update`` would be for. A record holds addresses: a step is recorded for all that it is given, and texts
get their buffers from `Blocks`, so that they come to few of them.

It has never run on a device. The tests hold it against a stand-in for torch_npu that records and repeats operators.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, fx

from draftwood.compiler.ge.torchair_bridge import devices, source_line
from draftwood.compiler.targets.online import InPlaceStep, Launch, Started, TorchairExecutor
from draftwood.compiler.targets.staging import Taken
from draftwood.errors import InvariantError, LoweringError, RequestError
from draftwood.kernels.experts import GROUPED_LINEAR
from draftwood.kernels.quantised import QUANTISED_LINEAR
from draftwood.kernels.rounded import ROUNDED_LINEAR
from draftwood.kernels.scatter import SCATTER_ND_UPDATE, SCATTER_ND_UPDATE_
from draftwood.manifest import GraphSignature, Manifest

# Records that are kept. Each takes a stream at least, and a device has 1984 (CANN's document of aclrtCreateStream).
MOST = 512
# Words of a device that cannot take a record -> what helps (vllm-ascend, compilation/acl_graph.py and issue 10555).
_STREAMS = "the device has no stream left for it: end other programs on the device, or take --engine npu"
_LACKS = {
    "alloc sq cq fail": f"install Ascend HDK 25.5.1 or later and the CANN that fits it; with these, {_STREAMS}",
    **dict.fromkeys(("207005", "resource alloc fail", "insufficient_stream_resources"), _STREAMS),
}
# Ours, put to GE by converters of ours. Their references read counts on the host, or multiply int8 as floats.
_COMPOSED = {contract.operator for contract in (GROUPED_LINEAR, QUANTISED_LINEAR, ROUNDED_LINEAR)}


class CapturedExecutor(TorchairExecutor):
    """Records a step at the first launch with its addresses, and replays it from then on."""

    def __init__(self, folder: Path, manifest: Manifest, device: str = "npu:0") -> None:
        super().__init__(folder, manifest, device)
        self._records = Records(devices())
        self._blocks = Blocks(super().zeros)

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A buffer on the device, in the graphs' element type, at an address that another text has left if one has."""
        return self._blocks.take(shape)

    def started(self, graph: GraphSignature) -> Started:
        """A step whose launches are recorded."""
        step = self.traced(graph)
        write_in_place(step, f"{self.folder}: graph {graph.name}")
        return Started(step, graph, self.device, lambda launch: self._records.recorded(graph.name, launch))


class Records:
    """What was recorded on a device; not for several threads at once.

    Args:
        npu: ``torch_npu.npu``.
    """

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        # A record takes no operator of the older interface, to which a tensor in a format of the device's own leads.
        npu.config.allow_internal_format = False
        # Launches take turns, and leave nothing in this memory that another reads.
        self._pool = npu.graph_pool_handle()
        self.kept: OrderedDict[tuple[Any, ...], tuple[Any, Taken]] = OrderedDict()

    def recorded(self, name: str, launch: Launch) -> Launch:
        """The launch of a step, replayed where it was recorded with these addresses."""

        def run(given: Mapping[str, Tensor], buffers: Mapping[str, Any]) -> Taken:
            places = name, *((key, value.data_ptr()) for key, value in (*given.items(), *buffers.items()))
            if (record := self.kept.get(places)) is None:
                # As it is: kernels are loaded, and the block for what the host reads is made, outside of the record.
                taken = launch(given, buffers)
                self.kept[places] = self._record(launch, given, buffers), taken
                return taken
            self.kept.move_to_end(places)
            graph, taken = record
            graph.replay()
            return taken

        return run

    def _record(self, launch: Launch, given: Mapping[str, Tensor], buffers: Mapping[str, Any]) -> Any:
        """A launch that is recorded and not executed."""
        if len(self.kept) == MOST:
            _, (oldest, _) = self.kept.popitem(last=False)
            oldest.reset()
        graph = self._npu.NPUGraph()
        try:
            # Other threads begin texts meanwhile, for which they take memory.
            with self._npu.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                launch(given, buffers)
        except RuntimeError as error:
            if advice := next((advice for words, advice in _LACKS.items() if words in str(error).lower()), None):
                said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
                beside = f"a launch cannot be recorded beside {len(self.kept)} others"
                raise RequestError(f"--engine npu-captured: {beside} ({said}): {advice}") from error
            raise
        return graph


class Blocks:
    """Memory for buffers that the next one of the same shape gets when a buffer is gone, the first that is free."""

    def __init__(self, zeros: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._zeros = zeros
        self._made: dict[tuple[int, ...], list[Tensor]] = {}
        self._free: dict[tuple[int, ...], set[int]] = {}

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros; free again when the tensor and all views of it are gone."""
        made, free = self._made.setdefault(shape, []), self._free.setdefault(shape, set())
        if free:
            number = min(free)
            free.remove(number)
            made[number].zero_()
        else:
            number = len(made)
            made.append(self._zeros(shape))
        # Not a view of the block, or the views of the buffer would be views of the block and not keep the buffer.
        block = made[number]
        buffer = torch.empty(0, dtype=block.dtype, device=block.device)
        buffer.set_(block.untyped_storage(), 0, block.shape, block.stride())
        finalize(buffer, free.add, number).atexit = False
        return buffer


def write_in_place(step: InPlaceStep, where: str) -> None:
    """Has a step's program write its caches where they lie, a form that torchair finds by itself.

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
