"""The engine that runs a bundle's static graphs one gear at a time, as an accelerator does.

What executes a graph is left to an ``Executable``: onnxruntime here; an interpreter of the NPU's graphs and the NPU
itself elsewhere. All of them share the choice of the graph, its inputs, and the bookkeeping of the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Array, Cache, host_zeros
from draftwood.runtime.draft_cache import DraftCache
from draftwood.runtime.drafting import Draft, Drafting
from draftwood.runtime.engine import Bindings, DraftSessions, StepResult, allocate, fixed, session
from draftwood.trees import TreeBuffers

# What the host fills for a step; caches and branch belong to the cache.
_SMALL = {"tokens", "depths", "visible", "last", "committed", "accepted", "path"}


class Executable(ABC):
    """One opened graph: its small inputs, kept in the host's memory, and how to run it."""

    def __init__(self, signature: GraphSignature) -> None:
        self.signature = signature
        self.inputs = {s.name: allocate(s) for s in signature.inputs if s.name in _SMALL}

    def prepare(self, cache: Cache) -> None:
        """Fills what follows from the cache alone: committed length, moved rows."""
        moved = len(cache.moved)
        self.inputs["committed"][0] = cache.length
        self.inputs["accepted"][0] = moved
        # Slots past the moved rows repeat the last: any valid row will do, they are written to the spare slot.
        path = self.inputs["path"]
        path[:] = cache.moved[-1] if moved else 0
        path[:moved] = cache.moved

    @abstractmethod
    def run(self, cache: Cache) -> StepResult:
        """Runs the graph on the filled inputs; writes ``cache.sides`` in place and the next branch."""


class StaticEngine(ABC):
    """Graphs are opened when first needed and kept. Where a graph has more rows than a tree, rows are padded."""

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature]) -> None:
        self.bundle = bundle
        self._drafting = Drafting(bundle, graphs, self._run_draft)
        self.graphs = [graph for graph in graphs if graph.kind in ("prefill", "decode", "verify")]
        if not self.graphs:
            raise BundleError(f"{bundle.folder}: holds no such graphs; build it with the --target that makes them")
        branch = next(s for s in self.graphs[0].inputs if s.name == "branch")
        self._branch_rows = fixed(branch)[2]
        self._opened: dict[str, Executable] = {}

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.bundle.manifest.dims, slots, self._branch_rows, self._zeros, self.bundle.manifest.drafter)

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        at = 0
        while at < len(tokens):
            signature = self._chunk(cache, len(tokens) - at)
            graph = self._open(signature)
            count = min(signature.rows, len(tokens) - at) if signature.kind == "prefill" else 1
            graph.inputs["tokens"][:count] = tokens[at : at + count]
            if signature.kind == "prefill":
                graph.inputs["last"][0] = count - 1
            else:
                self._fill(graph, tokens[at : at + 1], self.bundle.trees["plain"][1])
            graph.prepare(cache)
            outputs = graph.run(cache)
            result = StepResult(outputs.logits_RV[:1], outputs.choice_R[:1], outputs.features_RF[:count])
            cache.extended(count)
            if cache.draft:
                cache.draft.append(tokens[at : at + count], result.features_RF)
                self._drafting.keep_up(cache)
            at += count
        return result.last()

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        self._drafting.keep_up(cache)
        kind = "decode" if tree.rows == 1 else "verify"
        graph = self._open(self._find(kind, tree.rows, cache.slots))
        self._fill(graph, tokens_T, tree)
        graph.prepare(cache)
        result = graph.run(cache).first(tree.rows)
        cache.branched(tree.rows)
        if cache.draft:
            cache.draft.open(tokens_T, result.features_RF)
        return result

    def draft(self, cache: Cache, gear: Gear, root: int) -> Draft:
        return self._drafting.draft(cache, gear, root)

    @abstractmethod
    def _run_draft(self, graph: GraphSignature, inputs: dict[str, NDArray], text: DraftCache) -> dict[str, NDArray]:
        """Runs a graph of the drafter (`drafting.RunGraph`)."""

    @abstractmethod
    def _executable(self, signature: GraphSignature) -> Executable:
        """Opens a graph."""

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        """A buffer of a cache, where this engine wants it."""
        return host_zeros(shape)

    @staticmethod
    def _fill(graph: Executable, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> None:
        """The tree's rows; a padded row repeats the root's token and place, and sees itself."""
        rows, inputs = tree.rows, graph.inputs
        inputs["tokens"][:rows], inputs["tokens"][rows:] = tokens_T, tokens_T[0]
        inputs["depths"][:rows], inputs["depths"][rows:] = tree.depths, 0
        visible = inputs["visible"]
        visible[:] = np.eye(len(visible), dtype=np.bool_)
        visible[:rows, :rows] = tree.mask

    def _chunk(self, cache: Cache, left: int) -> GraphSignature:
        """The smallest prefill graph that holds what is left, else the largest that fits, else decode."""
        fits = [
            graph
            for graph in self.graphs
            if graph.kind == "prefill" and graph.slots == cache.slots and cache.room(graph.rows)
        ]
        enough = [graph for graph in fits if graph.rows >= left]
        if enough:
            return min(enough, key=lambda graph: graph.rows)
        return max(fits, key=lambda graph: graph.rows) if fits else self._find("decode", 1, cache.slots)

    def _find(self, kind: str, rows: int, slots: int) -> GraphSignature:
        for graph in self.graphs:
            if graph.kind == kind and (kind == "decode" or graph.rows == rows) and graph.slots == slots:
                return graph
        raise BundleError(f"{self.bundle.folder}: no graph of {rows} rows at KV length {slots}; build it with --kv")

    def _open(self, signature: GraphSignature) -> Executable:
        if signature.name not in self._opened:
            self._opened[signature.name] = self._executable(signature)
        return self._opened[signature.name]


class OnnxEngine(StaticEngine):
    """The static ONNX graphs on onnxruntime: slower on a CPU than ``CpuEngine``, and there to be compared with.

    The sessions share one memory map of the weights.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        super().__init__(bundle, bundle.manifest.graphs_of("onnx"))
        self._threads = threads
        self._drafts = DraftSessions(bundle, threads)

    def _run_draft(self, graph: GraphSignature, inputs: dict[str, NDArray], text: DraftCache) -> dict[str, NDArray]:
        return self._drafts(graph, inputs, text)

    def _executable(self, signature: GraphSignature) -> Executable:
        opened = session(self.bundle, signature, self._threads, prepack=False)
        return _OnnxGraph(Bindings(opened, signature), signature)


class _OnnxGraph(Executable):
    def __init__(self, bindings: Bindings, signature: GraphSignature) -> None:
        super().__init__(signature)
        self._bindings = bindings
        self._cache_shape = next(fixed(s) for s in signature.inputs if s.name == "key_cache.0")
        self._outputs = {s.name: allocate(s) for s in signature.outputs if s.name in ("logits", "choice", "features")}
        self._branches = any(s.name == "branch.out" for s in signature.outputs)
        for name, array in self.inputs.items():
            bindings.input(name, array)
        for name, array in self._outputs.items():
            bindings.output(name, array)

    def run(self, cache: Cache) -> StepResult:
        self._bindings.input("branch", cache.branch)
        if self._branches:
            self._bindings.output("branch.out", cache.next_branch(cache.padded))
        self._bindings.caches(self.signature.caches, cache.sides, self._cache_shape)
        self._bindings.run()
        return StepResult(self._outputs["logits"], self._outputs["choice"], self._outputs["features"])
