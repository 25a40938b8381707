"""From the state of a text to a draft tree, alike for every kind of drafter and every engine.

An engine gives what executes a graph; here are the choice of the graph, its inputs, and how its outputs become the
tree to verify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature, TensorSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.kv_cache import Buffer
from draftwood.runtime.speculation.lookup import Levels, levels, match_class
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.shared_noise import SharedNoise
from draftwood.runtime.speculation.step import Draft
from draftwood.trees import TreeBuffers, is_tree, tree_tokens

# T tree rows, M = T - 1 draft nodes, I levels, K candidates, P rows of a draft graph, F features

# Rows that wait at most before they are written: in a text decoded plainly nothing else would ever write them.
MOST_WAITING = 256

# A graph that takes any KV length reads all of it, so a drafter's caches are only as long as the text needs: the next
# power of two, at least this. Whoever allocates anew copies what is written, once for every doubling of the text.
LEAST_SLOTS = 256

# Runs a graph on small inputs by name, and on buffers by name: the drafter's caches, which it writes, and features that
# the device has. The other outputs by name, in the host's memory, valid until the graph runs again.
RunGraph = Callable[[GraphSignature, dict[str, NDArray], dict[str, Buffer]], dict[str, NDArray]]


class Drafting:
    """The draft and extend graphs of a bundle, behind the bookkeeping of `DraftCache`."""

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature], run: RunGraph) -> None:
        self.bundle, self._run = bundle, run
        self._drafts = {graph.name: graph for graph in graphs if graph.kind == "draft"}
        self._extends = [graph for graph in graphs if graph.kind == "extend"]
        self._inputs: dict[str, dict[str, NDArray]] = {}
        # Of trees that are looked up in the text.
        self._levels: dict[str, Levels] = {}
        self.noise = SharedNoise(bundle)

    def draft(self, state: SequenceState, gear: Gear) -> Draft:
        """A tree of the gear behind the committed text and its root; may be asked for again."""
        if gear.draft is None:
            return self.tree(gear, state.root, {})
        if gear.looks_up:
            return self._looked_up(state, gear)
        assert state.draft is not None, "a gear that drafts belongs to a bundle with a drafter"
        graph, cache = self.graph(gear.draft, state.slots), state.draft
        self.settle(state, graph.rows or MOST_WAITING)
        count = cache.waiting
        kept = cache.on_device if graph.rows else None  # a graph of any size takes no padding
        features_nF = cache.features(count) if kept is None else None
        inputs = self._filled(graph, cache.after(count, state.root), features_nF, cache.length)
        noise = next((spec for spec in graph.inputs if spec.name == "noise"), None)
        if noise is not None:  # the root stands at ``length``, so the first level is of the position behind it
            inputs = inputs | {"noise": self.noise.rows(noise, state.sampling, state.length + 1)}
        outputs = self._ran(graph, inputs, cache, count, {} if kept is None else {"features": kept})
        cache.drafted(state.root)
        return self.tree(gear, state.root, outputs)

    def _looked_up(self, state: SequenceState, gear: Gear) -> Draft:
        """A tree of what followed the same tokens earlier in the text."""
        topology, tree = self.bundle.trees[gear.tree]
        if gear.tree not in self._levels:
            self._levels[gear.tree] = levels(topology)
        index = state.index()
        tokens_T = index.draft(self._levels[gear.tree], state.sampling, state.length)
        return Draft(tokens_T, np.zeros(0, np.float32), tree, match=match_class(index.match))

    @contextmanager
    def given(self, noise: SharedNoise) -> Iterator[None]:
        """In the body, drafts get this noise in the place of the teacher's; texts stay what they are."""
        shared, self.noise = self.noise, noise
        try:
            yield
        finally:
            self.noise = shared

    def settle(self, state: SequenceState, most: int) -> None:
        """Writes waiting rows until ``most`` of them are left."""
        cache = state.draft
        while cache is not None and cache.buffers and cache.waiting > most:
            self._extend(state, cache.waiting - 1)

    def catch_up(self, state: SequenceState) -> None:
        """Writes waiting rows where they have become many, as in a prompt or in a text that is decoded plainly."""
        while state.draft is not None and state.draft.waiting > MOST_WAITING:
            self._extend(state, state.draft.waiting - 1)

    def graph(self, name: str, slots: int) -> GraphSignature:
        """A draft graph by the name that a gear gives it."""
        for found in (f"{name}-kv{slots}", name):
            if found in self._drafts:
                return self._drafts[found]
        raise BundleError(f"{self.bundle.folder}: no graph {name} at KV length {slots}; build it with --kv")

    def _extend(self, state: SequenceState, count: int) -> None:
        """Writes ``count`` waiting rows, or as many as the largest graph takes; the token after them is known."""
        cache = state.draft
        assert cache is not None
        fits = [graph for graph in self._extends if graph.slots in (0, state.slots)]
        if not fits:
            raise BundleError(f"{self.bundle.folder}: no extend graph at KV length {state.slots}; build it with --kv")
        graph = min(fits, key=lambda graph: (0 < graph.rows < count, abs(graph.rows - count)))
        count = min(count, graph.rows or MOST_WAITING)
        inputs = self._filled(graph, cache.after(count, 0), cache.features(count), cache.length)
        self._ran(graph, inputs, cache, count)
        cache.extended(count)

    def _ran(
        self,
        graph: GraphSignature,
        inputs: dict[str, NDArray],
        cache: DraftCache,
        count: int,
        kept: dict[str, Buffer] | None = None,
    ) -> dict[str, NDArray]:
        """Runs a graph that writes ``count`` rows, behind caches as long as it wants them.

        It may write all its rows behind the text, or those that do not count into a spare slot, the last one.
        """
        needed = cache.length + max(count, graph.rows) + 1
        cache.reserve(graph.slots or max(LEAST_SLOTS, 1 << (needed - 1).bit_length()))
        return self._run(graph, inputs, dict(zip(graph.caches, cache.buffers, strict=True)) | (kept or {}))

    def _filled(
        self, graph: GraphSignature, tokens_n: NDArray[np.int64], features_nF: NDArray[np.float32] | None, length: int
    ) -> dict[str, NDArray]:
        """The graph's small inputs; what stands in rows behind the n given ones does not matter.

        Without ``features``, which the device has already, all but they.
        """
        count = len(tokens_n)
        if not graph.rows:
            assert features_nF is not None, "a graph of any size is a CPU's"
            found: dict[str, NDArray] = {"tokens": tokens_n, "features": np.ascontiguousarray(features_nF)}
            return found | {"committed": np.array([length + count]), "accepted": np.array([count])}
        caches = set(graph.caches)
        small = [spec for spec in graph.inputs if spec.name not in caches and spec.name != "noise"]
        inputs = self._inputs.setdefault(graph.name, {spec.name: _zeros(spec) for spec in small})
        if features_nF is not None:
            inputs["features"][:count] = features_nF
        if "tokens" in inputs:
            inputs["tokens"][:count] = tokens_n
            inputs["committed"][0], inputs["accepted"][0] = length + count, count
        return inputs if features_nF is not None else {n: v for n, v in inputs.items() if n != "features"}

    def tree(self, gear: Gear, root: int, outputs: dict[str, NDArray]) -> Draft:
        """The tree that a gear's draft graph, or the graph of a whole step, has given behind a root."""
        if gear.draft is None:
            return Draft(np.array([root], np.int64), np.zeros(0, np.float32), self.bundle.trees[gear.tree][1])
        scores = outputs["scores"]
        if "candidates" in outputs:
            candidates_IK = outputs["candidates"].copy()
            # A whole step has looked at the classes already, in fp32; its word counts.
            found = (gear.tree, *gear.class_trees)[int(outputs["class"][0])] if "class" in outputs else None
            tree = self.bundle.trees[found or self._class_tree(gear, float(scores[0, 0]))][1]
            tokens_T = tree_tokens(tree, root, candidates_IK)
            return Draft(tokens_T, scores[tree.depths[1:] - 1, tree.ranks[1:]], tree, candidates_IK)
        tree = self._chosen(gear, outputs) if "parents" in outputs else self.bundle.trees[gear.tree][1]
        return Draft(np.concatenate(([root], outputs["drafted"])), scores.copy(), tree)

    def _chosen(self, gear: Gear, outputs: dict[str, NDArray]) -> TreeBuffers:
        """The tree of the drafter's choice. What is no tree would let rows see what is not their text."""
        depth = next(tree.depth for tree in self.bundle.manifest.trees if tree.name == gear.tree)
        tree = _buffers(outputs if "paths" in outputs else outputs | _climbed(outputs["parents"], depth))
        if not is_tree(tree):
            raise BundleError(f"{self.bundle.folder}: graph {gear.draft} drafts no tree; build the bundle again")
        return tree

    def _class_tree(self, gear: Gear, score: float) -> str:
        """The tree of the confidence class that the best first candidate's log-probability falls into."""
        planning = self.bundle.manifest.planning
        if not gear.class_trees or planning is None:
            return gear.tree
        confidence = math.exp(min(score, 0.0))
        return (gear.tree, *gear.class_trees)[sum(confidence >= bound for bound in planning.bounds)]


def _climbed(parents_T: NDArray[np.int64], depth: int) -> dict[str, NDArray]:
    """Depths, mask and paths of a tree, by its parents alone; of what is no tree, anything."""
    rows_T = np.arange(len(parents_T))
    above_T, climb = np.clip(parents_T, 0, len(parents_T) - 1), [rows_T]
    for _ in range(depth):
        climb.append(above_T[climb[-1]])
    climb_LT = np.stack(climb)
    depths_T = (climb_LT != 0).sum(0)
    steps_LT = np.maximum(depths_T - np.arange(depth + 1)[:, None], 0)
    paths_TL = np.ascontiguousarray(np.take_along_axis(climb_LT, steps_LT, 0).T)
    return {"depths": depths_T, "paths": paths_TL, "mask": (paths_TL[:, :, None] == rows_T).any(1)}


def _buffers(outputs: dict[str, NDArray]) -> TreeBuffers:
    """The buffers of a tree that the drafter chose. Its rows stand by rank among their siblings."""
    parents_T, paths_TL = outputs["parents"].copy(), outputs["paths"].copy()
    rows = len(parents_T)
    elder_TT = np.tri(rows, k=-1, dtype=np.bool_) & (parents_T[:, None] == parents_T)
    elder_TT[:, 0] = False  # the root is its own parent, and no sibling of its children
    return TreeBuffers(
        parents=parents_T,
        ranks=elder_TT.sum(1),
        depths=outputs["depths"].copy(),
        mask=outputs["mask"].copy(),
        paths=paths_TL,
    )


def _zeros(spec: TensorSignature) -> NDArray:
    """Zeros of the declared shape; floating-point inputs are fp32 here, whatever the graph computes in."""
    return np.zeros([int(size) for size in spec.shape], np.int64 if spec.dtype == "int64" else np.float32)
