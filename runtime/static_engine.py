"""The engine that runs a bundle's static graphs one gear at a time, as an accelerator would.

On a CPU it is the slower of the two and exists to be compared with: the graphs are the ONNX siblings of what
an NPU runs, shape for shape. Its sessions share one memory map of the weights.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.engine import Bindings, Drafter, StepResult, allocate, fixed, session
from draftwood.trees import TreeBuffers


class StaticEngine:
    """Sessions are opened when their graph is first needed and kept."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self.bundle = bundle
        self._threads = threads
        self._graphs: dict[str, _Graph] = {}
        self._drafter = Drafter(bundle, threads) if bundle.manifest.drafter else None

    def new_cache(self, slots: int) -> Cache:
        return Cache(self.bundle.manifest.dims, slots, padded=True)

    def prefill(self, cache: Cache, tokens: NDArray[np.int64]) -> StepResult:
        at = 0
        while at < len(tokens):
            signature = self._chunk(cache, len(tokens) - at)
            count = min(signature.rows, len(tokens) - at)
            graph = self._open(signature)
            graph.inputs["tokens"][:count] = tokens[at : at + count]
            if signature.kind == "prefill":
                graph.inputs["last"][0] = count - 1
            else:
                graph.inputs["visible"][:] = True
            result = graph.run(cache)
            cache.extended(count)
            at += count
        return result

    def verify(self, cache: Cache, tokens_T: NDArray[np.int64], tree: TreeBuffers) -> StepResult:
        graph = self._open(self._find({"verify", "decode"}, tree.rows, cache.slots))
        graph.inputs["tokens"][:] = tokens_T
        graph.inputs["depths"][:] = tree.depths
        graph.inputs["visible"][:] = tree.mask
        result = graph.run(cache)
        cache.branched(tree.rows)
        return result

    def draft(self, hidden_1H: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        assert self._drafter is not None
        return self._drafter(hidden_1H)

    def _chunk(self, cache: Cache, left: int) -> GraphSignature:
        """The smallest prefill graph that holds what is left, else the largest that fits, else decode."""
        fits = [
            graph
            for graph in self.bundle.manifest.graphs
            if graph.kind == "prefill" and graph.slots == cache.slots and cache.room(graph.rows)
        ]
        enough = [graph for graph in fits if graph.rows >= left]
        if enough:
            return min(enough, key=lambda graph: graph.rows)
        return max(fits, key=lambda graph: graph.rows) if fits else self._find({"decode"}, 1, cache.slots)

    def _find(self, kinds: set[str], rows: int, slots: int) -> GraphSignature:
        for graph in self.bundle.manifest.graphs:
            if graph.kind in kinds and graph.rows == rows and graph.slots == slots:
                return graph
        raise BundleError(f"{self.bundle.folder}: no graph of {rows} rows at KV length {slots}; build it with --kv")

    def _open(self, signature: GraphSignature) -> _Graph:
        if signature.name not in self._graphs:
            opened = session(self.bundle, signature, self._threads, prepack=False)
            self._graphs[signature.name] = _Graph(Bindings(opened, signature), signature)
        return self._graphs[signature.name]


class _Graph:
    """One static graph with its small inputs and its outputs allocated; caches and branch come per run."""

    def __init__(self, bindings: Bindings, signature: GraphSignature) -> None:
        self._bindings = bindings
        self._cache_shape = next(fixed(s) for s in signature.inputs if s.name == "key_cache.0")
        own = {"tokens", "depths", "visible", "last", "committed", "accepted", "path"}
        self.inputs = {s.name: allocate(s) for s in signature.inputs if s.name in own}
        results = {"logits", "choice", "hidden"}
        self._outputs = {s.name: allocate(s) for s in signature.outputs if s.name in results}
        self._branches = any(s.name == "branch.out" for s in signature.outputs)
        for name, array in self.inputs.items():
            bindings.input(name, array)
        for name, array in self._outputs.items():
            bindings.output(name, array)

    def run(self, cache: Cache) -> StepResult:
        moved = len(cache.moved)
        self.inputs["committed"][0] = cache.length
        self.inputs["accepted"][0] = moved
        # Slots past the moved rows repeat the last: any valid row will do, they are written to the spare slot.
        path = self.inputs["path"]
        path[:] = cache.moved[-1] if moved else 0
        path[:moved] = cache.moved
        self._bindings.input("branch", cache.branch)
        if self._branches:
            self._bindings.output("branch.out", cache.next_branch(cache.dims.branch_rows))
        self._bindings.caches(cache.sides, self._cache_shape)
        self._bindings.run()
        return StepResult(self._outputs["logits"], self._outputs["choice"], self._outputs["hidden"])
