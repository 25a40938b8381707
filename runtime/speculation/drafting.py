"""From the state of a text to a draft tree, alike for every kind of drafter and every engine.

An engine executes graphs. The choice of the graph, its inputs, and the tree that its outputs become are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.contract import ACCEPTED, COMMITTED, TAKES, names_of
from draftwood.errors import BundleError
from draftwood.manifest import Gear, GraphSignature, Manifest, TensorSignature
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.guide import Guiding
from draftwood.runtime.speculation.kv_cache import Buffer, Zeros
from draftwood.runtime.speculation.lookup import Levels, TextIndex, levels, match_class
from draftwood.runtime.speculation.merging import merged
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.shared_launch import Given, of_line, together
from draftwood.runtime.speculation.shared_noise import SharedNoise
from draftwood.runtime.speculation.step import Draft
from draftwood.trees import TreeBuffers, is_tree, tree_tokens
from draftwood.trees.topology import branches

# T tree rows, M = T - 1 draft nodes, I levels, K candidates, P rows of a draft graph, F features

# Rows that wait at most before they are written: in a text decoded plainly nothing else would ever write them.
MOST_WAITING = 256

# A graph that takes any KV length reads all of it. So a drafter's caches are only as long as the text needs: the next
# power of two, at least this. A new allocation copies the written rows, once for every doubling of the text.
LEAST_SLOTS = 256

# The inputs of a draft graph that stand for the rows that it has not seen.
_FILLED = names_of(TAKES["extend"], {"cached"})

# Launches at most by which a draft is made again for a grammar.
MOST_AGAIN = 8

# Runs a graph on small inputs by name, and on buffers by name. Buffers are the drafter's caches, which it writes, and
# features and noise on the device. The other outputs by name, in the host's memory, valid until the graph runs again.
RunGraph = Callable[[GraphSignature, dict[str, NDArray], dict[str, Buffer]], dict[str, NDArray]]


class Drafting:
    """The draft and extend graphs of a bundle, after the bookkeeping of `DraftCache`.

    ``zeros`` makes the buffers that ``run`` gets.
    """

    def __init__(self, bundle: Bundle, graphs: Sequence[GraphSignature], run: RunGraph, zeros: Zeros) -> None:
        self.bundle, self._run, self._zeros = bundle, run, zeros
        # By name, and by how many texts they draft for: those for several repeat the one for one.
        self._drafts = {graph.name: {1: graph} for graph in graphs if graph.kind == "draft"}
        for graph in graphs:
            if graph.kind == "draft-texts":
                self._drafts[graph.name.removesuffix(f"-b{graph.batch}")][graph.batch] = graph
        self.extends = [graph for graph in graphs if graph.kind == "extend"]
        self._vacant: SequenceState | None = None
        # By graph and place in a launch.
        self._inputs: dict[tuple[str, int], dict[str, NDArray]] = {}
        # Of trees that are looked up in the text.
        self._levels: dict[str, Levels] = {}
        # Tokens that may be looked up besides a drafter's.
        looks_up = any(gear.looks_up for gear in bundle.manifest.gears)
        self._ahead = bundle.manifest.dims.path_rows - 1 if looks_up and _may_branch(bundle.manifest) else 0
        # Another text in which drafts are looked up, besides the text itself.
        self.corpus = TextIndex.corpus_of(bundle.corpus) if looks_up and bundle.corpus else None
        self.noise = SharedNoise(bundle)
        # Zeros instead of noise for greedy text, and rows for lines without a text. They lie where the graphs run, and
        # are never sent.
        self._silence: dict[tuple[str, tuple[int, ...], int], Buffer] = {}

    def most_texts(self, name: str) -> int:
        """Texts that a launch of a draft graph takes, by the name that a gear gives it; 1 if none takes several."""
        named = (graphs for each, graphs in self._drafts.items() if each == name or each.startswith(f"{name}-kv"))
        return max((most for graphs in named for most in graphs), default=1)

    def drafts(self, states: Sequence[SequenceState], gears: Sequence[Gear]) -> list[Draft]:
        """`draft` of every text; those that the same graph drafts for share launches, if the bundle has graphs for
        several."""
        drafted = dict[int, Draft]()
        for graph, texts in self.launches(states, gears):
            pairs = [(states[text], gears[text]) for text in texts]
            if graph is None or graph.batch == 1:
                drafts = [self.draft(*pair) for pair in pairs]
            else:
                drafts = self._shared(graph, pairs)
            drafted |= zip(texts, drafts, strict=True)
        return [drafted[text] for text in range(len(states))]

    def launches(
        self, states: Sequence[SequenceState], gears: Sequence[Gear]
    ) -> Iterator[tuple[GraphSignature | None, list[int]]]:
        """The graphs that draft for these texts, and the texts of each, by number; None if none is run."""
        alike = dict[tuple[str | None, Any], list[int]]()
        for text, (state, gear) in enumerate(zip(states, gears, strict=True)):
            graph = self.graph(gear.draft, state.slots) if gear.draft and not gear.looks_up else None
            pool = state.kv.place.pool if graph and graph.caches and state.kv.place else None
            alike.setdefault((graph.name if graph else None, pool), []).append(text)
        for (name, pool), texts in alike.items():
            if name is None:
                yield None, texts
                continue
            graphs = self._drafts[name]
            for at in range(0, len(texts), max(graphs)):
                group = texts[at : at + max(graphs)]
                numbers = [states[text].kv.place.number for text in group] if pool else range(len(group))
                span = max(numbers) - min(numbers) + 1
                yield graphs[min((size for size in graphs if size >= span), default=1)], group

    def _shared(self, graph: GraphSignature, texts: Sequence[tuple[SequenceState, Gear]]) -> list[Draft]:
        """A launch of several texts; a place that is left over drafts for nobody."""
        (state, gear), *_ = texts
        single, lines, caches = self.graph(gear.draft or "", state.slots), list(range(len(texts))), list[Buffer]()
        if graph.caches and graph.caches == single.caches:  # those of a pool, whose places follow each other
            numbers, pool = [state.kv.place.number for state, _ in texts], state.kv.place.pool
            first = min(*numbers, pool.places - graph.batch)
            lines, caches = [number - first for number in numbers], pool.draft_window(first, graph.batch)
        by_line = dict(zip(lines, texts, strict=True))
        of_lines = [
            self._given(single, by_line[line][0], line) if line in by_line else self._nobody(single, line)
            for line in range(graph.batch)
        ]
        inputs, buffers = together(graph, of_lines)
        outputs = self._run(graph, inputs, buffers | dict(zip(graph.caches, caches, strict=False)))
        return [
            self._drafted(*text, {name: of_line(outputs, name, line, graph.batch) for name in single.results})
            for line, text in by_line.items()
        ]

    def draft(self, state: SequenceState, gear: Gear) -> Draft:
        """A tree of the gear after the committed text and its root; may be asked for again."""
        if gear.draft is None:
            return self.tree(gear, state.root, {})
        if gear.looks_up:
            return self._looked_up(state, gear)
        graph = self.graph(gear.draft, state.slots)
        return self._drafted(state, gear, self._run(graph, *self._given(graph, state)))

    def _given(
        self,
        graph: GraphSignature,
        state: SequenceState,
        place: int = 0,
        allowed: Sequence[NDArray[np.bool_]] = (),
    ) -> Given:
        """Inputs of a draft graph for a text, which has a ``place`` in the launch: small inputs, and buffers.

        ``allowed`` bool [V] are the tokens of the first levels, if more is known than the text's guide says.
        """
        assert state.draft is not None, "a gear that drafts belongs to a bundle with a drafter"
        cache = state.draft
        self.settle(state, graph.rows or MOST_WAITING)
        count = cache.waiting
        stored = cache.on_device if graph.rows else None  # a graph of any size takes no padding
        features_nF = cache.features(count) if stored is None else None
        inputs = self._filled(graph, cache.after(count, state.root), features_nF, cache.length, place)
        buffers = self._caches(graph, cache, count) | ({} if stored is None else {"features": stored})
        noise = next((spec for spec in graph.inputs if spec.name == "noise"), None)
        guide = _followed(state)
        if noise is not None and guide is None and state.sampling.greedy:
            buffers["noise"] = self._silent("noise", self.noise.shape(noise), place)
        elif noise is not None:  # the root stands at ``length``, so the first level is of the position after it
            if guide is not None:
                allowed = allowed or guide.first_levels(self.noise.shape(noise)[0])
            inputs = inputs | {"noise": self.noise.rows(noise, state.sampling, state.length + 1, place, allowed)}
        return inputs, buffers

    def _nobody(self, graph: GraphSignature, place: int) -> Given:
        """Inputs at a place that no text has: a text of one token."""
        drafter = self.bundle.manifest.drafter
        assert drafter is not None, "a bundle that drafts has a drafter"
        if self._vacant is None:
            cache = DraftCache(drafter.buffers, drafter.features, self._zeros)
            cache.append(np.zeros(1, np.int64), np.zeros((1, drafter.features), np.float32))
            self._vacant = SequenceState(None, cache)
        inputs, buffers = self._given(graph, self._vacant, place)
        if graph.rows and ACCEPTED in inputs:
            # The caches there may be another text's: all rows go to the spare slot.
            inputs[ACCEPTED][0] = 0
        if graph.static:
            shape = next(spec.shape for spec in graph.inputs if spec.name == "features")
            buffers["features"] = self._silent("features", tuple(int(size) for size in shape), place)
        return {name: array for name, array in inputs.items() if name not in buffers}, buffers

    def _drafted(self, state: SequenceState, gear: Gear, outputs: dict[str, NDArray]) -> Draft:
        """The tree of a graph's outputs for a text, whose caches now hold its rows."""
        assert state.draft is not None, "it has drafted"
        draft = self.tree(gear, state.root, outputs)
        if state.guide is not None and draft.candidates_IK is None:
            draft = self._again(state, gear, draft, state.guide)
        state.draft.drafted(state.root)
        if self._ahead and state.guide is None and (index := state.index()).match:
            return merged(draft, index.ahead(self._ahead, state.sampling, state.length))
        return _guided(state.guide, draft)

    def _again(self, state: SequenceState, gear: Gear, draft: Draft, guide: Guiding) -> Draft:
        """A draft whose nodes depend on those above them, made anew while that brings it nearer to the grammar.

        A launch settles one level more of its best path: the allowed tokens there are known once the level above is
        right.
        """
        graph, before = self.graph(gear.draft or "", state.slots), list[NDArray[np.bool_]]()
        for _ in range(MOST_AGAIN):
            allowed = guide.levels(draft.tree, draft.tokens_T, draft.scores_M)
            if not allowed or _same(allowed, before):
                break
            draft = self.tree(gear, state.root, self._run(graph, *self._given(graph, state, allowed=allowed)))
            before = allowed
        return draft

    def _silent(self, name: str, shape: tuple[int, ...], place: int) -> Buffer:
        """Zeros for one place's input: in AscendCL no memory may be passed twice in a launch."""
        key = name, shape, place
        if key not in self._silence:
            self._silence[key] = self._zeros(shape)
        return self._silence[key]

    def _looked_up(self, state: SequenceState, gear: Gear) -> Draft:
        """A tree of the tokens that followed the same tokens earlier in the text."""
        topology, tree = self.bundle.trees[gear.tree]
        if gear.tree not in self._levels:
            self._levels[gear.tree] = levels(topology)
        index, guide = state.index(), _followed(state)
        allowed = None if guide is None else guide.allowed
        tokens_T = index.draft(self._levels[gear.tree], state.sampling, state.length, allowed)
        return _guided(guide, Draft(tokens_T, np.zeros(0, np.float32), tree, match=match_class(index.match)))

    @contextmanager
    def given(self, noise: SharedNoise) -> Iterator[None]:
        """In the body, drafts get this noise instead of the teacher's, and no looked-up tokens, as in one launch a
        step; texts do not change."""
        before, (self.noise, self._ahead) = (self.noise, self._ahead), (noise, 0)
        try:
            yield
        finally:
            self.noise, self._ahead = before

    def settle(self, state: SequenceState, most: int) -> None:
        """Writes waiting rows until ``most`` of them are left."""
        cache = state.draft
        while cache is not None and cache.buffers and cache.waiting > most:
            self._extend(state, cache.waiting - 1)

    def catch_up(self, state: SequenceState) -> None:
        """Writes waiting rows if they have become many, as in a prompt or in a text that is decoded plainly."""
        while state.draft is not None and state.draft.waiting > MOST_WAITING:
            self._extend(state, state.draft.waiting - 1)

    def graph(self, name: str, slots: int) -> GraphSignature:
        """A draft graph by the name that a gear gives it."""
        for candidate in (f"{name}-kv{slots}", name):
            if candidate in self._drafts:
                return self._drafts[candidate][1]
        raise BundleError(f"{self.bundle.folder}: no graph {name} at KV length {slots}; build it with --kv")

    def _extend(self, state: SequenceState, count: int) -> None:
        """Writes ``count`` waiting rows, or as many as the largest graph takes; the token after them is known."""
        cache = state.draft
        assert cache is not None
        fits = [graph for graph in self.extends if graph.slots in (0, state.slots)]
        if not fits:
            raise BundleError(f"{self.bundle.folder}: no extend graph at KV length {state.slots}; build it with --kv")
        graph = min(fits, key=lambda graph: (0 < graph.rows < count, abs(graph.rows - count)))
        count = min(count, graph.rows or MOST_WAITING)
        inputs = self._filled(graph, cache.after(count, 0), cache.features(count), cache.length)
        self._run(graph, inputs, self._caches(graph, cache, count))
        cache.extended(count)

    def _caches(self, graph: GraphSignature, cache: DraftCache, count: int) -> dict[str, Buffer]:
        """The caches by name, as long as a graph wants them that writes ``count`` rows.

        It may write all its rows after the text, or those that do not count into a spare slot, the last one.
        """
        needed = cache.length + max(count, graph.rows) + 1
        cache.reserve(graph.slots or max(LEAST_SLOTS, 1 << (needed - 1).bit_length()))
        return dict(zip(graph.caches, cache.buffers, strict=True))

    def _filled(
        self,
        graph: GraphSignature,
        tokens_n: NDArray[np.int64],
        features_nF: NDArray[np.float32] | None,
        length: int,
        place: int = 0,
    ) -> dict[str, NDArray]:
        """The graph's small inputs; the content of rows after the n given ones does not matter.

        Without ``features``, which the device has already, all but they.
        """
        count = len(tokens_n)
        if not graph.rows:
            assert features_nF is not None, "a graph of any size is a CPU's"
            filled: dict[str, NDArray] = {"tokens": tokens_n, "features": np.ascontiguousarray(features_nF)}
            return filled | {COMMITTED: np.array([length + count]), ACCEPTED: np.array([count])}
        small = [spec for spec in graph.inputs if spec.name in _FILLED]
        inputs = self._inputs.setdefault((graph.name, place), {spec.name: _zeros(spec) for spec in small})
        if features_nF is not None:
            inputs["features"][:count] = features_nF
        if "tokens" in inputs:
            inputs["tokens"][:count] = tokens_n
            inputs[COMMITTED][0], inputs[ACCEPTED][0] = length + count, count
        return inputs if features_nF is not None else {n: v for n, v in inputs.items() if n != "features"}

    def tree(self, gear: Gear, root: int, outputs: dict[str, NDArray]) -> Draft:
        """The tree that a gear's draft graph, or the graph of a whole step, has given after a root."""
        if gear.draft is None:
            return Draft(np.array([root], np.int64), np.zeros(0, np.float32), self.bundle.trees[gear.tree][1])
        scores = outputs["scores"]
        if "candidates" in outputs:
            candidates_IK = outputs["candidates"].copy()
            tree = self.bundle.trees[gear.tree][1]
            tokens_T = tree_tokens(tree, root, candidates_IK)
            return Draft(tokens_T, scores[tree.depths[1:] - 1, tree.ranks[1:]], tree, candidates_IK)
        tree = self._chosen(gear, outputs) if "parents" in outputs else self.bundle.trees[gear.tree][1]
        return Draft(np.concatenate(([root], outputs["drafted"])), scores.copy(), tree)

    def _chosen(self, gear: Gear, outputs: dict[str, NDArray]) -> TreeBuffers:
        """The tree of the drafter's choice. Without a tree, a row could see rows that are not on its path."""
        depth = next(tree.depth for tree in self.bundle.manifest.trees if tree.name == gear.tree)
        tree = _buffers(outputs if "paths" in outputs else outputs | _climbed(outputs["parents"], depth))
        if not is_tree(tree):
            raise BundleError(f"{self.bundle.folder}: graph {gear.draft} drafts no tree; build the bundle again")
        return tree


def _may_branch(manifest: Manifest) -> bool:
    """Whether a drafter's tree may become one that branches. With rows rounded to int8, only the engine for branching
    trees gives the text of plain decoding."""
    return not manifest.quantised or any(branches(tree.rows, tree.depth) for tree in manifest.trees)


def _followed(state: SequenceState) -> Guiding | None:
    """The guide of drafts after the text's root, if it is held to a grammar."""
    if state.guide is not None and not state.guide.follow(state.tokens, state.root):
        state.guide = None
    return state.guide


def _same(masks: Sequence[NDArray[np.bool_]], others: Sequence[NDArray[np.bool_]]) -> bool:
    return len(masks) == len(others) and all(map(np.array_equal, masks, others))


def _guided(guide: Guiding | None, draft: Draft) -> Draft:
    """A draft of tokens that a grammar allows. A level's candidates then differ from path to path, so that none are
    given."""
    if guide is None:
        return draft
    return draft._replace(tokens_T=guide.filled(draft.tree, draft.tokens_T, draft.candidates_IK), candidates_IK=None)


def _climbed(parents_T: NDArray[np.int64], depth: int) -> dict[str, NDArray]:
    """Depths, mask and paths of a tree, by its parents alone; for parents that are no tree, anything."""
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
    """Zeros of the declared shape; floating-point inputs are fp32 here, in whatever type the graph computes."""
    return np.zeros([int(size) for size in spec.shape], np.int64 if spec.dtype == "int64" else np.float32)
