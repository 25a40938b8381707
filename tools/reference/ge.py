"""The engine that executes a bundle's NPU graphs, the ``.air`` files themselves, with the GE interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.ge.graph import Graph, Node
from draftwood.compiler.ge.interpreter import Interpreter
from draftwood.compiler.ge.online import declared, host
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.targets.bundled import required_set
from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.acceptance import fill_tree
from draftwood.runtime.engines.static import StaticEngine
from draftwood.trees import TreeBuffers

Observe = Callable[[Node, tuple[Tensor, ...]], None]


class InterpreterExecutor:
    """Slow and exact: operator for operator what GE would run, in the graphs' own element type.

    ``mutate`` may change a graph before it is run, for tests that a fault is caught; ``observe`` sees every value.
    """

    def __init__(self, bundle: Bundle, mutate: Callable[[Graph], Graph]) -> None:
        graphs = required_set(bundle.folder, bundle.manifest, "ge")
        self.dtype: torch.dtype = getattr(torch, graphs.precision.activations)
        self.observe: Observe | None = None
        self._folder, self._mutate = bundle.folder, mutate
        self._weights = bundle_npu_weights(bundle.folder, graphs)
        self._opened: dict[str, Interpreter] = {}

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A buffer in the graphs' element type."""
        return torch.zeros(shape, dtype=self.dtype)

    def run(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, Any]
    ) -> dict[str, NDArray]:
        """See `draftwood.runtime.engines.executor.Executor.run`."""
        if graph.name not in self._opened:
            self._opened[graph.name] = self.interpreter(graph)
        results = self._opened[graph.name].run(self.gathered(graph, inputs, buffers), self.observe)
        outputs = dict(zip(graph.results, results, strict=True))
        for name in outputs.keys() & buffers.keys():
            buffers[name].copy_(outputs.pop(name))
        return {name: host(value) for name, value in outputs.items()}

    def read(self, buffer: Tensor) -> NDArray[np.float32]:
        """See `draftwood.runtime.engines.executor.Executor.read`."""
        return host(buffer)

    def interpreter(self, signature: GraphSignature) -> Interpreter:
        """A graph of the bundle, ready to run."""
        return Interpreter(self._mutate(Graph.load(self._folder / signature.file)), self._weights)

    def gathered(
        self, graph: GraphSignature, inputs: Mapping[str, NDArray], buffers: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Every input of the graph by name; what lies in buffers is their own memory."""
        types, caches = {spec.name: getattr(torch, spec.dtype) for spec in graph.inputs}, set(graph.caches)
        given = {name: torch.from_numpy(array).to(types[name]) for name, array in inputs.items()}
        held = [spec for spec in graph.inputs if spec.name in buffers]
        return given | {s.name: declared(b, s) if s.name in caches else b for s in held for b in (buffers[s.name],)}


class GeEngine(StaticEngine):
    """Decodes with the NPU's graphs on this machine's CPU."""

    executor: InterpreterExecutor

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None = None,
        mutate: Callable[[Graph], Graph] = lambda graph: graph,
    ) -> None:
        executor = InterpreterExecutor(bundle, mutate)
        super().__init__(bundle, bundle.manifest.graphs_of("ge"), executor)

    def inputs_of(self, gear: Gear, prompt: NDArray[np.int64], tree: TreeBuffers) -> dict[str, Tensor]:
        """What the gear's graph is given at its first tree step behind a prompt, on seeded random tokens."""
        state = self.begin(gear.slots)
        self.prefill(state, prompt)
        graph = self.tree_graph(tree.rows, gear.slots)
        inputs = self.inputs(graph, state.kv)
        vocabulary = self.bundle.manifest.dims.vocabulary
        fill_tree(inputs, np.random.default_rng(0).integers(0, vocabulary, tree.rows), tree)
        return self.executor.gathered(graph, inputs, self.buffers(graph, state.kv))
