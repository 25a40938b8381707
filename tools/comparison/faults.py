"""Faults put in on purpose, one at a time: the comparison of ``draftwood check`` must tell each from the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.speculation.draft_cache import DraftCache
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft
from draftwood.tools.comparison import single
from draftwood.tools.comparison.compare import Comparison, Pair, compare_drafts
from draftwood.trees import TreeBuffers

if TYPE_CHECKING:
    from draftwood.compiler.ge.graph import Graph


# If nothing is allowed, every difference is as many times that as it is large.
_LEAST = 1e-30
# Drafts that a fault is planted in: of one alone a rounding could be more than the fault.
_ROOTS = 5


@dataclass(frozen=True, slots=True)
class Control:
    """A deliberate fault, and the ``difference`` of the quantity that it moved most, measured by what is allowed;
    ``caught`` if it is more than that."""

    gear: str
    graphs: str
    fault: str
    difference: float
    caught: bool


def controls(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Control]:
    """Faults in the inputs of one tree step, in the commit after it, and in one layer's weights."""
    tree = tree_of(pair.reference, gear, prompt)
    if tree.rows == 1:
        return
    causal = np.tril(np.ones((tree.rows, tree.rows), np.bool_))
    own_rows = np.eye(tree.rows, dtype=np.bool_)
    faults = {} if _is_chain(tree) else {"causal mask instead of the tree's": replace(tree, mask=causal)}
    faults |= {
        "mask inverted": replace(tree, mask=~tree.mask | own_rows),
        "positions of draft rows shifted by one": replace(tree, depths=tree.depths + (tree.depths > 0)),
    }
    # With a row that does not see an ancestor of the last one. A row that sees a later one shows nothing: the attention
    # of some graphs is causal whatever its mask says.
    rows = [*range(1, tree.rows), 0]
    other = next((row for row in rows if (tree.mask[-1, :-1] & ~tree.mask[row, :-1]).any()), None)
    if other is not None:
        swapped = np.arange(tree.rows)
        swapped[[other, -1]] = swapped[[-1, other]]
        faults["two mask rows swapped"] = replace(tree, mask=tree.mask[swapped] | own_rows)
    steps = ReferenceSteps(pair, gear, prompt, tree)
    for fault, wrong in faults.items():
        yield control(pair, gear, fault, steps.tree(wrong))
    yield from _commit_controls(steps)
    if pair.following:  # of a whole, one scale moves less than rounding may
        with _scaled(pair.following.decoder):
            yield control(pair, gear, "a scale of one layer off by a half", steps.tree(tree))


@contextmanager
def _scaled(decoder: Any) -> Iterator[None]:
    """In the body, the attention of the layer in the middle adds half as much again."""
    layer = decoder.layers[len(decoder.layers) // 2]
    weights = layer.o.weight_scale if hasattr(layer.o, "weight_scale") else layer.o.weight
    before = weights.data
    weights.data = before * 1.5
    try:
        yield
    finally:
        weights.data = before


def _is_chain(tree: TreeBuffers) -> bool:
    """Whether its mask is causal and its only path contiguous, so that a commit moves no row."""
    return tree.rows == int(tree.depths[-1]) + 1


def draft_controls(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Control]:
    """Faults in the inputs of one draft: the teacher's states, the root next to them, the drafter's own caches."""
    if not gear.neural:
        return
    vocabulary, before = pair.reference.bundle.manifest.dims.vocabulary, int(prompt[-1])
    roots = [(before + 1 + number) % vocabulary for number in range(_ROOTS)]
    faults = {"teacher's states misplaced": drafted(pair, gear, prompt, roots, _misplaced)}
    drafter = pair.reference.bundle.manifest.drafter
    if drafter is not None and drafter.buffers:
        right = drafted(pair, gear, prompt, [before, *roots])
        # The reference's drafts next to the engine's of the root before.
        faults["token before the root in its place"] = [
            (want, single.of_root(got, want)) for (want, _), (_, got) in zip(right[1:], right[:-1], strict=True)
        ]
        faults["drafter's caches forgotten"] = drafted(pair, gear, prompt, roots, _forgotten)
    for fault, drafts in faults.items():
        yield control(pair, gear, fault, compare_drafts(pair, gear, drafts))


def drafted(
    pair: Pair,
    gear: Gear,
    prompt: NDArray[np.int64],
    roots: list[int],
    spoil: Callable[[DraftCache], None] = lambda _: None,
) -> list[tuple[Draft, Draft]]:
    """The reference's and the engine's draft of each root, all after one prompt and one plain step.

    The drafter's caches hold the prompt by then; ``spoil`` is done to the engine's before the first draft.
    """
    states, last = [engine.begin(gear.slots) for engine in pair.in_turn], int(prompt[-1])
    for engine, state in zip(pair.in_turn, states, strict=True):
        engine.prefill(state, prompt)
        single.draft(engine, state, gear, last)
    for engine, state in zip(pair.in_turn, states, strict=True):
        single.verify(engine, state, np.array([last]), engine.bundle.trees["plain"][1])
        state.commit([0])
    assert states[0].draft is not None
    spoil(states[0].draft)
    both = [
        [single.draft(engine, state, gear, root) for engine, state in zip(pair.in_turn, states, strict=True)]
        for root in roots
    ]
    return [(want, got) for got, want in both]


def _misplaced(cache: DraftCache) -> None:
    """Every one of three states instead of the next; of a single state its parts."""
    features = cache.features

    def turned(count: int) -> NDArray[np.float32]:
        features_nF = features(count)
        return np.roll(features_nF, features_nF.shape[1] // 3, axis=1)

    cache.features = turned  # type: ignore[method-assign]


def _forgotten(cache: DraftCache) -> None:
    for buffer in cache.buffers:
        buffer[:] = 0


def tree_of(engine: Engine, gear: Gear, prompt: NDArray[np.int64]) -> TreeBuffers:
    """The gear's tree; of a budget tree the one that is drafted after the prompt."""
    if gear.tree in engine.bundle.trees:
        return engine.bundle.trees[gear.tree][1]
    state = engine.begin(gear.slots)
    root = int(engine.prefill(state, prompt).choice_R[0])
    return single.draft(engine, state, gear, root).tree


class ReferenceSteps:
    """One tree step after a prompt, and one after its commit: the reference's as they should be, and the engine's
    with something wrong. The prompt is read once, and every fault begins at its end."""

    def __init__(self, pair: Pair, gear: Gear, prompt: NDArray[np.int64], tree: TreeBuffers) -> None:
        self.pair, self.gear, self.right, self._length = pair, gear, tree, len(prompt)
        vocabulary = pair.reference.bundle.manifest.dims.vocabulary
        self._tokens_T = np.random.default_rng(0).integers(0, vocabulary, tree.rows)
        self._states = [engine.begin(gear.slots) for engine in pair.in_turn]
        for engine, state in zip(pair.in_turn, self._states, strict=True):
            engine.prefill(state, prompt)

    def tree(self, wrong: TreeBuffers) -> list[Comparison]:
        """The faults of a tree step."""
        return self._verified(self._begun(), (wrong, self.right))

    def commit(self, route: list[int], path: list[int], drop: bool = False) -> list[Comparison]:
        """The rows of the token after the tree step and a commit of ``route`` for ``path``.

        ``drop`` keeps the old rows in the places of the route's rows.
        """
        states = self._begun()
        self._verified(states, (self.right, self.right))
        for state, rows in zip(states, (range(len(route)) if drop else route, path), strict=True):
            state.commit(rows)
        plain = self.pair.engine.bundle.trees["plain"][1]
        return self._verified(states, (plain, plain))

    def _begun(self) -> list[SequenceState]:
        for state in self._states:
            state.rollback(self._length)
        return self._states

    def _verified(self, states: list[SequenceState], trees: tuple[TreeBuffers, TreeBuffers]) -> list[Comparison]:
        got, want = (
            single.verify(engine, state, self._tokens_T[: tree.rows], tree)
            for engine, state, tree in zip(self.pair.in_turn, states, trees, strict=True)
        )
        return list(self.pair.rows(self.gear.name, self.gear.graph, got, want, "fault"))


def _commit_controls(steps: ReferenceSteps) -> Iterator[Control]:
    pair, gear, tree = steps.pair, steps.gear, steps.right
    right = tree.paths[-1, : tree.depths[-1] + 1].tolist()
    if _is_chain(tree):
        yield control(pair, gear, "path's last row not committed", steps.commit(right[:-1], right))
        return
    for other in range(tree.rows - 1, right[-2], -1):
        if other != right[-1]:
            yield control(pair, gear, "path index misrouted", steps.commit([*right[:-1], other], right))
            break
    yield control(pair, gear, "commit's write dropped", steps.commit(right, right, drop=True))


def control(pair: Pair, gear: Gear, fault: str, comparisons: Iterable[Comparison]) -> Control:
    """The comparison's verdict on a fault, by the quantity that it moved most."""
    worst = max(comparisons, key=lambda comparison: comparison.difference / max(comparison.tolerance, _LEAST))
    return Control(gear.name, pair.name, fault, worst.difference, not worst.ok)


def graph_mutations() -> dict[str, Callable[[Graph], Graph]]:
    """Faults in the NPU's graph itself: name -> the change to it."""
    return {"mask inverted in the graph": _inverted, "one cache write dropped from the graph": _unwritten}


def _inverted(graph: Graph) -> Graph:
    """Swaps seen and masked."""
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
