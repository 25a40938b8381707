"""Faults put in on purpose, one at a time: the comparison of ``draftwood check`` must tell each from the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.step import Draft
from draftwood.tools.comparison import single
from draftwood.tools.comparison.compare import Pair, compare_drafts, relative_difference
from draftwood.trees import TreeBuffers

if TYPE_CHECKING:
    from draftwood.compiler.ge.graph import Graph


@dataclass(frozen=True, slots=True)
class Control:
    """A deliberate fault and how far it moved the logits, or a draft; ``caught`` if past the tolerance."""

    gear: str
    graphs: str
    fault: str
    difference: float
    caught: bool


def controls(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Control]:
    """Faults in the inputs of one tree step, and in the commit after it."""
    tree = tree_of(pair.reference, gear, prompt)
    if tree.rows == 1:
        return
    causal = np.tril(np.ones((tree.rows, tree.rows), np.bool_))
    own = np.eye(tree.rows, dtype=np.bool_)
    swapped = np.arange(tree.rows)
    # With a row that does not see an ancestor of the last one: what the last row sees must change. Where all do, as in
    # a short chain, the root's row sees too much.
    other = next((row for row in range(1, tree.rows) if (tree.mask[-1, :-1] & ~tree.mask[row, :-1]).any()), 0)
    swapped[[other, -1]] = swapped[[-1, other]]
    faults = {} if _is_chain(tree) else {"causal mask instead of the tree's": replace(tree, mask=causal)}
    faults |= {
        "mask inverted": replace(tree, mask=~tree.mask | own),
        "two mask rows swapped": replace(tree, mask=tree.mask[swapped] | own),
        "positions of draft rows shifted by one": replace(tree, depths=tree.depths + (tree.depths > 0)),
    }
    tokens_T = np.random.default_rng(0).integers(0, pair.reference.bundle.manifest.dims.vocabulary, tree.rows)
    want = _tree_logits(pair.reference, gear, prompt, tokens_T, tree)
    for fault, wrong in faults.items():
        yield control(pair, gear, fault, _tree_logits(pair.engine, gear, prompt, tokens_T, wrong), want)
    yield from _commit_controls(pair, gear, prompt, tokens_T, tree)


def _is_chain(tree: TreeBuffers) -> bool:
    """Whether its mask is causal and its only path contiguous, so that a commit moves no row."""
    return tree.rows == int(tree.depths[-1]) + 1


def draft_controls(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Control]:
    """Faults in what one draft reads: the teacher's states, the root beside them, the drafter's own caches."""
    if not gear.neural:
        return
    before = int(prompt[-1])
    root = (before + 1) % pair.reference.bundle.manifest.dims.vocabulary
    want = _drafted(pair.reference, gear, prompt, root)
    wrong = {"teacher's states misplaced": _drafted(pair.engine, gear, prompt, root, _misplaced)}
    drafter = pair.reference.bundle.manifest.drafter
    if drafter is not None and drafter.layers:
        other = _drafted(pair.engine, gear, prompt, before)
        wrong["token before the root in its place"] = other._replace(tokens_T=np.append(root, other.tokens_T[1:]))
        wrong["drafter's caches forgotten"] = _drafted(pair.engine, gear, prompt, root, _forgotten)
    for fault, got in wrong.items():
        found = list(compare_drafts(pair, gear, [(want, got)]))
        worst = max(found, key=lambda one: one.difference / one.tolerance)
        yield Control(gear.name, pair.name, fault, worst.difference, not worst.ok)


def _drafted(
    engine: StagedEngine,
    gear: Gear,
    prompt: NDArray[np.int64],
    root: int,
    spoil: Callable[[DraftCache], None] | None = None,
) -> Draft:
    """The draft behind a prompt and a plain step, after which the drafter's caches hold the prompt.

    ``spoil`` is done to the drafter's memory in between.
    """
    state, last = engine.begin(gear.slots), int(prompt[-1])
    engine.prefill(state, prompt)
    single.draft(engine, state, gear, last)
    single.verify(engine, state, np.array([last]), engine.bundle.trees["plain"][1])
    state.commit([0])
    assert state.draft is not None
    if spoil is not None:
        spoil(state.draft)
    return single.draft(engine, state, gear, root)


def _misplaced(cache: DraftCache) -> None:
    """Every one of three states in the place of the next; of a single state its parts."""
    features = cache.features

    def turned(count: int) -> NDArray[np.float32]:
        features_nF = features(count)
        return np.roll(features_nF, features_nF.shape[1] // 3, axis=1)

    cache.features = turned  # type: ignore[method-assign]


def _forgotten(cache: DraftCache) -> None:
    for buffer in cache.buffers:
        buffer[:] = 0


def tree_of(engine: StagedEngine, gear: Gear, prompt: NDArray[np.int64]) -> TreeBuffers:
    """The gear's tree; of a budget tree the one that is drafted behind the prompt."""
    if gear.tree in engine.bundle.trees:
        return engine.bundle.trees[gear.tree][1]
    state = engine.begin(gear.slots)
    root = int(engine.prefill(state, prompt).choice_R[0])
    return single.draft(engine, state, gear, root).tree


def _commit_controls(
    pair: Pair, gear: Gear, prompt: NDArray[np.int64], tokens_T: NDArray[np.int64], tree: TreeBuffers
) -> Iterator[Control]:
    right = tree.paths[-1, : tree.depths[-1] + 1].tolist()
    want = next_logits(pair.reference, gear, prompt, tokens_T, tree, right)
    if _is_chain(tree):
        wrong = next_logits(pair.engine, gear, prompt, tokens_T, tree, right[:-1])
        yield control(pair, gear, "path's last row not committed", wrong, want)
        return
    for other in range(tree.rows - 1, right[-2], -1):
        if other != right[-1]:
            wrong = next_logits(pair.engine, gear, prompt, tokens_T, tree, [*right[:-1], other])
            yield control(pair, gear, "path index misrouted", wrong, want)
            break
    dropped = next_logits(pair.engine, gear, prompt, tokens_T, tree, right, drop=True)
    yield control(pair, gear, "commit's write dropped", dropped, want)


def next_logits(
    engine: StagedEngine,
    gear: Gear,
    prompt: NDArray[np.int64],
    tokens_T: NDArray[np.int64],
    tree: TreeBuffers,
    route: list[int],
    drop: bool = False,
) -> NDArray[np.float32]:
    """Logits of the token after a prefill, a tree step and a commit of ``route``; ``drop`` forgets its moved rows."""
    state = engine.begin(gear.slots)
    engine.prefill(state, prompt)
    single.verify(engine, state, tokens_T, tree)
    state.commit(route)
    if drop:
        state.kv.forget_moved()
    return single.verify(engine, state, tokens_T[:1], engine.bundle.trees["plain"][1]).logits_RV.copy()


def _tree_logits(
    engine: StagedEngine, gear: Gear, prompt: NDArray[np.int64], tokens_T: NDArray[np.int64], tree: TreeBuffers
) -> NDArray[np.float32]:
    """Logits of one tree step behind a prompt."""
    state = engine.begin(gear.slots)
    engine.prefill(state, prompt)
    return single.verify(engine, state, tokens_T, tree).logits_RV.copy()


def control(pair: Pair, gear: Gear, fault: str, got: NDArray, want: NDArray) -> Control:
    difference = relative_difference(got, want)
    return Control(gear.name, pair.name, fault, difference, difference > pair.tolerance)


def graph_mutations() -> dict[str, Callable[[Graph], Graph]]:
    """Faults in the NPU's graph itself: name -> what is done to it."""
    return {"mask inverted in the graph": _inverted, "one cache write dropped from the graph": _unwritten}


def _inverted(graph: Graph) -> Graph:
    """What is seen becomes what is masked."""
    nodes = {n.name: replace(n, type="Identity") if n.type == "LogicalNot" else n for n in graph.nodes.values()}
    return replace(graph, nodes=nodes)


def _unwritten(graph: Graph) -> Graph:
    """Layer 0's keys are attended through the cache as it was before the step."""
    write = next((n for n in graph.nodes.values() if n.type == "ScatterNdUpdate"), None)
    if write is None:
        return graph
    before = write.inputs[0]
    nodes = {
        n.name: replace(n, inputs=tuple(before if e is not None and e.node == write.name else e for e in n.inputs))
        for n in graph.nodes.values()
        if n is not write
    }
    return replace(graph, nodes=nodes)


def tree_step(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> tuple[NDArray, NDArray]:
    """Logits of one tree step, (engine's, reference's)."""
    tree = tree_of(pair.reference, gear, prompt)
    tokens_T = np.random.default_rng(0).integers(0, pair.reference.bundle.manifest.dims.vocabulary, tree.rows)
    engines = (pair.engine, pair.reference)
    got, want = (_tree_logits(engine, gear, prompt, tokens_T, tree) for engine in engines)
    return got, want
