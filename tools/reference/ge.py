"""The engine that executes a bundle's NPU graphs, the ``.air`` files themselves, with the GE interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.interpreter import Interpreter
from draftwood.compiler.ge.lockstep import Gathered, run_ranks
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.targets.bundled import required_set
from draftwood.compiler.targets.online import declared, host
from draftwood.contract import NEXT_BRANCH
from draftwood.errors import InvariantError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.tools.reference.invariants import Held
from draftwood.tools.reference.ranks import RankBuffers, of_rank


class InterpreterExecutor:
    """Slow and exact: operator for operator as GE would run, in the graphs' own element type.

    ``mutate`` may change a graph before it is run, for tests that a fault is caught. With several ranks it runs all of
    them, or ``rank`` alone, for which ``gathered`` fetches the others' parts.
    """

    def __init__(
        self,
        bundle: Bundle,
        mutate: Callable[[Graph], Graph] = lambda graph: graph,
        rank: int | None = None,
        gathered: Gathered = lambda values: values,
    ) -> None:
        graphs = required_set(bundle.folder, bundle.manifest, "ge")
        self.dtype: torch.dtype = getattr(torch, graphs.precision.activations)
        self._folder, self._mutate, self._gathered = bundle.folder, mutate, gathered
        sets = [
            graphs_of_rank for graphs_of_rank in bundle.manifest.rank_sets("ge") if rank in (None, graphs_of_rank.rank)
        ]
        self._weights = [bundle_npu_weights(bundle.folder, graphs_of_rank) for graphs_of_rank in sets]
        self._opened: dict[str, list[Interpreter]] = {}

    def zeros(self, shape: tuple[int, ...]) -> Buffer:
        """A buffer in the graphs' element type, of every rank if there are several."""
        parts = [torch.zeros(shape, dtype=self.dtype) for _ in self._weights]
        return RankBuffers(parts) if len(parts) > 1 else parts[0]

    def run(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, Buffer]
    ) -> dict[str, NDArray]:
        """See `draftwood.runtime.engines.executor.Executor.run`."""
        if graph.name not in self._opened:
            self._opened[graph.name] = [self.interpreter(graph, rank) for rank in range(len(self._weights))]
        operands = [self.gathered(graph, inputs, buffers, rank) for rank in range(len(self._weights))]
        by_rank = run_ranks(self._opened[graph.name], operands, self._gathered)
        outputs = [dict(zip(graph.results, results, strict=True)) for results in by_rank]
        _check_alike(graph, outputs)
        for rank, of_this in enumerate(outputs):
            for name in of_this.keys() & buffers.keys():
                of_rank(buffers[name], rank).copy_(of_this.pop(name))
        return {name: host(value) for name, value in outputs[0].items()}

    def read(self, buffer: Buffer) -> NDArray[np.float32]:
        """See `draftwood.runtime.engines.executor.Executor.read`."""
        return host(of_rank(buffer, 0))

    def interpreter(self, signature: GraphSignature, rank: int = 0) -> Interpreter:
        """A graph of the bundle, ready to run."""
        return Interpreter(self._mutate(Graph.load(self._folder / signature.file)), self._weights[rank])

    def gathered(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, Buffer], rank: int = 0
    ) -> dict[str, Tensor]:
        """Every input of a rank's graph by name; buffers are the rank's own memory."""
        buffers = {name: of_rank(buffer, rank) for name, buffer in buffers.items()}
        types, caches = {spec.name: getattr(torch, spec.dtype) for spec in graph.inputs}, set(graph.caches)
        tensors = {name: torch.from_numpy(array).to(types[name]) for name, array in inputs.items()}
        stored = [spec for spec in graph.inputs if spec.name in buffers]
        return tensors | {s.name: declared(b, s) if s.name in caches else b for s in stored for b in (buffers[s.name],)}


def _check_alike(graph: GraphSignature, outputs: Sequence[Mapping[str, Tensor]]) -> None:
    """All that the graphs give but a rank's rows of its own caches must be the same on all ranks: bit for bit."""
    for rank, others in enumerate(outputs[1:], 1):
        for name, value in others.items():
            if name != NEXT_BRANCH.name and not torch.equal(value, outputs[0][name]):
                raise InvariantError(f"graph {graph.name}: {name} of rank {rank} differs from that of rank 0")


class GeEngine(Held, StaticEngine):
    """Decodes with the NPU's graphs on this machine's CPU, those of all ranks together."""

    executor: InterpreterExecutor

    def __init__(
        self,
        bundle: Bundle,
        opening: Opening = USUAL,
        mutate: Callable[[Graph], Graph] = lambda graph: graph,
    ) -> None:
        executor = InterpreterExecutor(bundle, mutate)
        self.ranks = len(bundle.manifest.rank_sets("ge"))
        super().__init__(bundle, bundle.manifest.graphs_of("ge"), executor)
