"""From the state of a text to a draft tree, alike for every kind of drafter and every engine.

An engine gives what executes a graph; here are the choice of the graph, its inputs, and how its outputs become the
tree to verify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature, TensorSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cache import Cache
from draftwood.runtime.draft_cache import DraftCache
from draftwood.trees import TreeBuffers, tree_tokens

# T tree rows, M = T - 1 draft nodes, I levels, K candidates, P rows of a draft graph, F features

# Rows that wait at most before they are written: in a text decoded plainly nothing else would ever write them.
MOST_WAITING = 256

# A graph that takes any KV length reads all of it, so a drafter's caches are only as long as the text needs: the next
# power of two, at least this. Whoever allocates anew copies what is written, once for every doubling of the text.
LEAST_SLOTS = 256

# Runs a graph on small inputs by name and the drafter's caches, which it writes: the other outputs by name, in the
# host's memory, valid until the graph runs again.
RunGraph = Callable[[GraphSignature, dict[str, NDArray], DraftCache], dict[str, NDArray]]


class Draft(NamedTuple):
    """A tree to verify: the token of every row, the root's first, and the tree's buffers.

    ``scores_M`` are log-probabilities of the nodes: a candidate's own where levels are ranked (Medusa, FastEagle),
    its path's where nodes are (EAGLE-3). ``candidates_IK`` are a ranked drafter's of every level, None for another;
    valid until the next draft.
    """

    tokens_T: NDArray[np.int64]
    scores_M: NDArray[np.float32]
    tree: TreeBuffers
    candidates_IK: NDArray[np.int64] | None = None

    @property
    def confidence(self) -> float:
        """Probability of the best first candidate."""
        return min(1.0, math.exp(float(self.scores_M[0])))

    def rank(self, depth: int, token: int) -> int | None:
        """A token's rank among the candidates behind a path of ``depth`` nodes, K if it is none of them.

        None where the candidates are not known: of a drafter that ranks none, or past its levels.
        """
        if self.candidates_IK is None or depth >= len(self.candidates_IK):
            return None
        ranked = self.candidates_IK[depth].tolist()
        return ranked.index(token) if token in ranked else len(ranked)


class Drafting:
    """The draft and extend graphs of a bundle, behind the bookkeeping of `DraftCache`."""

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature], run: RunGraph) -> None:
        self.bundle, self._run = bundle, run
        self._drafts = {graph.name: graph for graph in graphs if graph.kind == "draft"}
        self._extends = [graph for graph in graphs if graph.kind == "extend"]
        self._inputs: dict[str, dict[str, NDArray]] = {}

    def draft(self, cache: Cache, gear: Gear, root: int) -> Draft:
        """A tree of the gear behind the committed text and its pending token ``root``; may be asked for again."""
        assert gear.draft is not None and cache.draft is not None, "plain decoding drafts nothing"
        graph, text = self.graph(gear.draft, cache.slots), cache.draft
        while text.sides and text.waiting > (graph.rows or MOST_WAITING):
            self._extend(cache, text.waiting - 1)
        count = text.waiting
        inputs = self._filled(graph, *text.rows(count, root), text.length)
        outputs = self._ran(graph, inputs, text, count)
        text.drafted(root)
        return self._tree(gear, root, outputs)

    def keep_up(self, cache: Cache) -> None:
        """Writes waiting rows where they have become many."""
        text = cache.draft
        while text is not None and text.waiting > MOST_WAITING:
            self._extend(cache, text.waiting - 1)

    def graph(self, name: str, slots: int) -> GraphSignature:
        """A draft graph by the name that a gear gives it."""
        for found in (f"{name}-kv{slots}", name):
            if found in self._drafts:
                return self._drafts[found]
        raise BundleError(f"{self.bundle.folder}: no graph {name} at KV length {slots}; build it with --kv")

    def _extend(self, cache: Cache, count: int) -> None:
        """Writes ``count`` waiting rows, or as many as the largest graph takes; the token after them is known."""
        text = cache.draft
        assert text is not None
        fits = [graph for graph in self._extends if graph.slots in (0, cache.slots)]
        if not fits:
            raise BundleError(f"{self.bundle.folder}: no extend graph at KV length {cache.slots}; build it with --kv")
        graph = min(fits, key=lambda graph: (0 < graph.rows < count, abs(graph.rows - count)))
        count = min(count, graph.rows or MOST_WAITING)
        self._ran(graph, self._filled(graph, *text.rows(count, 0), text.length), text, count)
        text.extended(count)

    def _ran(
        self, graph: GraphSignature, inputs: dict[str, NDArray], text: DraftCache, count: int
    ) -> dict[str, NDArray]:
        """Runs a graph that writes ``count`` rows, behind caches as long as it wants them.

        It may write all its rows behind the text, or those that do not count into a spare slot, the last one.
        """
        needed = text.length + max(count, graph.rows) + 1
        text.reserve(graph.slots or max(LEAST_SLOTS, 1 << (needed - 1).bit_length()))
        return self._run(graph, inputs, text)

    def _filled(
        self, graph: GraphSignature, tokens_n: NDArray[np.int64], features_nF: NDArray[np.float32], length: int
    ) -> dict[str, NDArray]:
        """The graph's small inputs; what stands in rows behind the n given ones does not matter."""
        count = len(tokens_n)
        if not graph.rows:
            found: dict[str, NDArray] = {"tokens": tokens_n, "features": np.ascontiguousarray(features_nF)}
            return found | {"committed": np.array([length + count]), "accepted": np.array([count])}
        caches = set(graph.caches)
        small = [spec for spec in graph.inputs if spec.name not in caches]
        inputs = self._inputs.setdefault(graph.name, {spec.name: _zeros(spec) for spec in small})
        inputs["features"][:count] = features_nF
        if "tokens" in inputs:
            inputs["tokens"][:count] = tokens_n
            inputs["committed"][0], inputs["accepted"][0] = length + count, count
        return inputs

    def _tree(self, gear: Gear, root: int, outputs: dict[str, NDArray]) -> Draft:
        scores = outputs["scores"]
        if "candidates" in outputs:
            candidates_IK = outputs["candidates"]
            tree = self.bundle.trees[self._class_tree(gear, float(scores[0, 0]))][1]
            tokens_T = tree_tokens(tree, root, candidates_IK)
            return Draft(tokens_T, scores[tree.depths[1:] - 1, tree.ranks[1:]], tree, candidates_IK)
        tree = _chosen(outputs) if "parents" in outputs else self.bundle.trees[gear.tree][1]
        return Draft(np.concatenate(([root], outputs["drafted"])), scores.copy(), tree)

    def _class_tree(self, gear: Gear, score: float) -> str:
        """The tree of the confidence class that the best first candidate's log-probability falls into."""
        planning = self.bundle.manifest.planning
        if not gear.class_trees or planning is None:
            return gear.tree
        confidence = min(1.0, math.exp(score))
        return (gear.tree, *gear.class_trees)[sum(confidence >= bound for bound in planning.bounds)]


def _chosen(outputs: dict[str, NDArray]) -> TreeBuffers:
    """The buffers of a tree that the drafter chose. Its rows stand by rank among their siblings."""
    parents_T, paths_TL = outputs["parents"].copy(), outputs["paths"].copy()
    rows = len(parents_T)
    elder_TT = np.tri(rows, k=-1, dtype=np.bool_) & (parents_T[:, None] == parents_T)
    elder_TT[:, 0] = False  # the root is its own parent, and no sibling of its children
    return TreeBuffers(
        parents=parents_T,
        ranks=elder_TT.sum(1),
        depths=outputs["depths"].copy(),
        valid=np.ones(rows, np.bool_),
        mask=outputs["mask"].copy(),
        ancestors=np.ascontiguousarray(paths_TL.T),
        paths=paths_TL,
    )


def _zeros(spec: TensorSignature) -> NDArray:
    """Zeros of the declared shape; floating-point inputs are fp32 here, whatever the graph computes in."""
    return np.zeros([int(size) for size in spec.shape], np.int64 if spec.dtype == "int64" else np.float32)
