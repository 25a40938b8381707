"""The engine that runs a bundle's static graphs one gear at a time, as an accelerator does.

What executes a graph is left to an `Executor`: onnxruntime here; an NPU, and an interpreter of the NPU's graphs,
elsewhere. All of them share the choice of the graph, its inputs, and the bookkeeping of the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.contract import BRANCH, RESULTS, names_of
from draftwood.errors import BundleError
from draftwood.manifest import GraphSignature, TokenRows, of_rank
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.chunks import next_rows
from draftwood.runtime.engines.device_parts import DeviceParts
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.executor import Executor
from draftwood.runtime.engines.inputs import branches, fill_commit, fill_tree, host_inputs
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.pools import PooledDraft, PooledKv, Pools
from draftwood.runtime.engines.sessions import OnnxExecutor, fixed, sessions_in_memory
from draftwood.runtime.speculation.deferred_cache import Branch, DeferredKvCache
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros, token_rows
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, Parts, TeacherOutput

# T rows of a graph, n tokens of a text


class StaticEngine(Engine):
    """If a graph has more rows than a tree, rows are padded. A step takes several texts if there are graphs for
    that."""

    padded = True

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature], executor: Executor) -> None:
        self.executor = executor
        super().__init__(bundle, graphs, executor.run)
        self.graphs = [graph for graph in graphs if graph.kind in ("prefill", "decode", "verify")]
        if not self.graphs:
            raise BundleError(f"{bundle.folder}: holds no such graphs; build it with the --target that makes them")
        branch = next(spec for spec in self.graphs[0].inputs if spec.name == BRANCH.name)
        self._rows = of_rank(bundle.manifest.teacher.buffers, self.ranks)
        shape, row = fixed(branch), sum(rows.elements() for rows in self._rows)
        self._branch = Branch(lambda _: shape, prod(shape) // row)
        caches = [spec for spec in self.graphs[0].inputs if spec.name in self.graphs[0].caches]
        # The first size of a cache says how it lies in memory: slots, or slots of every head. Of one head both are one.
        self._by_token = all(fixed(cache)[0] == self.graphs[0].slots for cache in caches)
        self._inputs: dict[str, dict[str, NDArray]] = {}
        self.on_device = DeviceParts(bundle, graphs, executor, self.drafting, self.tree_graph, self._run_tree)

        self.max_batch, self.batches = self.on_device.texts.most, self.on_device.texts.sizes
        drafts = of_rank(bundle.manifest.drafter.buffers, self.ranks) if bundle.manifest.drafter else ()
        self._pools = Pools(self._rows, drafts, self.max_batch, executor.zeros) if self.max_batch > 1 else None

    @property
    def parts(self) -> Parts[Any]:
        return self.on_device if self.on_device.accepts else self

    @property
    def zeros(self) -> Zeros:
        return self.executor.zeros

    def new_kv(self, slots: int) -> DeferredKvCache:
        if self._pools:
            return PooledKv(self._rows, slots, self._branch, self.zeros, self._pools)
        cache_zeros = token_rows(self.zeros) if self._by_token else self.zeros
        return DeferredKvCache(self._rows, slots, self._branch, self.zeros, cache_zeros)

    def new_draft(self, kv: Any, rows: Sequence[TokenRows], width: int) -> DraftCache:
        return PooledDraft(rows, width, self.zeros, kv) if self._pools else super().new_draft(kv, rows, width)

    def chunk(self, state: SequenceState, left: int) -> int:
        room = state.slots - 1 - state.length
        return min(next_rows(left, room, self.launches(state.slots)), left) or 1

    def launches(self, slots: int) -> tuple[int, ...]:
        return tuple(sorted(graph.rows for graph in self._prefills(slots)))

    def append(self, state: SequenceState, chunk_n: NDArray[np.int64]) -> TeacherOutput:
        count = len(chunk_n)
        fits = [graph for graph in self._prefills(state.slots) if graph.rows >= count and state.kv.room(graph.rows)]
        graph = min(fits + [self.tree_graph(1, state.slots)] * (count == 1), key=lambda graph: graph.rows)
        inputs = self.inputs(graph, state.kv)
        if graph.kind == "prefill":
            inputs["tokens"][:count], inputs["last"][0] = chunk_n, count - 1
        else:
            fill_tree(inputs, chunk_n, self.bundle.trees["plain"][1])
        outputs = self.executor.run(graph, inputs, self.buffers(graph, state.kv))
        output = TeacherOutput(outputs["logits"][:1], outputs["choice"][:1], outputs["features"][:count])
        state.extended(chunk_n, output.features_RF)
        return output

    def _prefills(self, slots: int) -> list[GraphSignature]:
        return [graph for graph in self.graphs if graph.kind == "prefill" and graph.slots == slots]

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> list[TeacherOutput]:
        (state,), (draft,) = states, drafts
        graph, rows = self.tree_graph(draft.tree.rows, state.slots), draft.tree.rows
        outputs = self._run_tree(graph, state, draft, {})
        return [TeacherOutput(*(outputs[name][:rows] for name in names_of(RESULTS)))]

    def _run_tree(
        self, graph: GraphSignature, state: SequenceState, draft: Draft, stays: dict[str, Buffer]
    ) -> dict[str, NDArray]:
        """A tree's rows after the text; outputs named in ``stays`` stay in those buffers."""
        inputs = self.inputs(graph, state.kv)
        fill_tree(inputs, draft.tokens_T, draft.tree)
        return self.executor.run(graph, inputs, self.buffers(graph, state.kv) | stays)

    def inputs(self, graph: GraphSignature, kv: DeferredKvCache) -> dict[str, NDArray]:
        """The graph's small inputs. Those that follow from the cache alone are filled in."""
        if graph.name not in self._inputs:
            self._inputs[graph.name] = host_inputs(graph)
        fill_commit(self._inputs[graph.name], kv)
        return self._inputs[graph.name]

    def buffers(self, graph: GraphSignature, kv: DeferredKvCache) -> dict[str, Buffer]:
        """The buffers that the graph reads and writes on the device, by name."""
        return branches(graph, kv) | dict(zip(graph.caches, kv.buffers, strict=True))

    def tree_graph(self, rows: int, slots: int) -> GraphSignature:
        """The graph that verifies a tree of ``rows`` rows; BundleError if there is none."""
        kind = "decode" if rows == 1 else "verify"
        for graph in self.graphs:
            if graph.kind == kind and (kind == "decode" or graph.rows == rows) and graph.slots == slots:
                return graph
        raise BundleError(f"{self.bundle.folder}: no graph of {rows} rows at KV length {slots}; build it with --kv")


def static_graphs(bundle: Bundle) -> list[GraphSignature]:
    """The ONNX graphs of fixed sizes; BundleError if there are none."""
    graphs = [graph for graph in bundle.manifest.graphs_of("onnx") if graph.static]
    if not graphs:
        raise BundleError(
            f"{bundle.folder}: holds no ONNX graphs of fixed sizes; build it with --target onnx or onnx,ge"
        )
    return graphs


class OnnxStaticEngine(StaticEngine):
    """The static ONNX graphs on onnxruntime: slower on a CPU than ``CpuEngine``, and for comparison. `sessions.session`
    says which sessions share one memory map of the weights.
    """

    def __init__(self, bundle: Bundle, opening: Opening = USUAL) -> None:
        graphs = static_graphs(bundle)
        super().__init__(bundle, graphs, OnnxExecutor(bundle, opening.threads, sessions_in_memory(bundle)))
