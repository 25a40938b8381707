"""The engine that executes a bundle's NPU graphs, the ``.air`` files themselves, with the GE interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwood.compiler.ge.graph import Graph, Node
from draftwood.compiler.ge.interpreter import Interpreter
from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.draft_cache import DraftCache
from draftwood.runtime.engine import StepResult
from draftwood.runtime.engines.static import Executable, StaticEngine
from draftwood.tools.reference.eager import host, npu_weights
from draftwood.trees import TreeBuffers

Observe = Callable[[Node, tuple[Tensor, ...]], None]


class GeEngine(StaticEngine):
    """Slow and exact: operator for operator what GE would run, in the graphs' own element type.

    ``mutate`` may change a graph before it is run, for tests that a fault is caught; ``observe`` sees every value.
    """

    def __init__(self, bundle: Bundle, mutate: Callable[[Graph], Graph] = lambda graph: graph) -> None:
        npu = bundle.manifest.graph_set("ge")
        if npu is None:
            raise BundleError(f"{bundle.folder}: holds no NPU graphs; build it with --target onnx,ge")
        super().__init__(bundle, npu.graphs)
        self.dtype: torch.dtype = getattr(torch, npu.precision.activations)
        self.observe: Observe | None = None
        self._weights = npu_weights(bundle)
        self._mutate = mutate
        self._drafts: dict[str, Interpreter] = {}

    def _run_draft(self, graph: GraphSignature, inputs: dict[str, NDArray], text: DraftCache) -> dict[str, NDArray]:
        if graph.name not in self._drafts:
            self._drafts[graph.name] = self.interpreter(graph)
        given = {name: torch.from_numpy(array) for name, array in inputs.items()}
        given = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in given.items()}
        given |= {name: side.flatten(0, 1) for name, side in zip(graph.caches, text.sides, strict=True)}
        outputs = self._drafts[graph.name].run(given, self.observe)
        return {name: host(value) for name, value in zip(graph.results, outputs, strict=True)}

    def interpreter(self, signature: GraphSignature) -> Interpreter:
        """A graph of the bundle, ready to run."""
        return Interpreter(self._mutate(Graph.load(self.bundle.folder / signature.file)), self._weights)

    def inputs_of(self, gear: Gear, prompt: NDArray[np.int64], tree: TreeBuffers) -> dict[str, Tensor]:
        """What the gear's graph is given at its first tree step behind a prompt, on seeded random tokens."""
        cache = self.new_cache(gear.slots)
        self.prefill(cache, prompt)
        graph = self._open(self._find("decode" if tree.rows == 1 else "verify", tree.rows, gear.slots))
        assert isinstance(graph, _GeGraph)
        vocabulary = self.bundle.manifest.dims.vocabulary
        self._fill(graph, np.random.default_rng(0).integers(0, vocabulary, tree.rows), tree)
        graph.prepare(cache)
        return graph.gathered(cache)

    def _executable(self, signature: GraphSignature) -> Executable:
        return _GeGraph(self, signature)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)


class _GeGraph(Executable):
    def __init__(self, engine: GeEngine, signature: GraphSignature) -> None:
        super().__init__(signature)
        self._engine, self._interpreter = engine, engine.interpreter(signature)

    def gathered(self, cache: Cache) -> dict[str, Tensor]:
        """Every input of the graph; the caches are the cache's own memory."""
        inputs = {name: torch.from_numpy(array) for name, array in self.inputs.items()}
        inputs["branch"] = cache.branch
        return inputs | {
            name: side.flatten(0, 1) for name, side in zip(self.signature.caches, cache.sides, strict=True)
        }

    def run(self, cache: Cache) -> StepResult:
        results = self._interpreter.run(self.gathered(cache), self._engine.observe)
        outputs = dict(zip(self.signature.results, results, strict=True))
        if "branch.out" in outputs:
            cache.next_branch(cache.padded).copy_(outputs["branch.out"])
        return StepResult(*(host(outputs[name]) for name in ("logits", "choice", "features")))
