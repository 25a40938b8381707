"""Runs two engines of a bundle in lockstep, through several steps with commits of every kind, and compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.proof import HALF_TOLERANCE
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.comparison import single
from draftwood.trees import TreeBuffers, require

# How far bf16 is from fp32 is the model's own business, not a fault: reported, and refused only where it is absurd.
ROUNDED_TOLERANCE = 2e-1
# Drafted tokens may differ by this times the tolerance: none in fp32, three in ten in half precision, where candidates
# next to each other are a rounding apart, and no more in int8 (measured 4e-2 of the demo's EAGLE-3).
DIFFERING_TOKENS = 10
# A score is the small difference of logits, and a path's the sum of several: their rounding is that of the logits.
SCORES = 3
STEPS = 6  # tree steps a prompt and gear: enough for commits in place, moved, and both in turn


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity of one graph; the difference is relative to the largest reference value.

    ``graphs`` says whose were compared: "cpu", "static" and "bitwise" with eager fp32, "ge" with eager in the NPU's
    type, "eager" the latter with fp32.
    """

    gear: str
    graph: str
    graphs: str
    quantity: str
    difference: float
    tolerance: float
    where: str
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", self.difference <= self.tolerance)


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, the one it is held against, and the difference allowed."""

    name: str
    reference: StagedEngine
    engine: StagedEngine
    tolerance: float
    # Of drafts, where it is another: a drafter in int8 goes with a teacher that is not.
    of_drafts: float | None = None

    @property
    def draft_tolerance(self) -> float:
        """The difference allowed of drafts."""
        return self.tolerance if self.of_drafts is None else self.of_drafts

    def compared(
        self,
        gear: str,
        graph: str,
        quantity: str,
        got: NDArray,
        want: NDArray,
        where: str,
        tolerance: float | None = None,
    ) -> Comparison:
        """Holds a quantity against its reference; ``tolerance`` is allowed where it is not the pair's."""
        allowed = self.tolerance if tolerance is None else tolerance
        return self.found(gear, graph, quantity, relative_difference(got, want), where, allowed)

    def found(
        self, gear: str, graph: str, quantity: str, difference: float, where: str, tolerance: float
    ) -> Comparison:
        """A difference that is known already."""
        return Comparison(gear, graph, self.name, quantity, difference, tolerance, where)


def relative_difference(got: NDArray, want: NDArray) -> float:
    """Largest absolute difference, as a share of the largest reference value (at least 1); inf for no number."""
    difference = float(np.abs(got - want).max() / max(1.0, float(np.abs(want).max())))
    return difference if np.isfinite(difference) else float("inf")


def compare_gear(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Prefill, then steps of the gear's tree on the same tokens and the same commits; the caches at the end."""
    engines = (pair.reference, pair.engine)
    states = [e.begin(gear.slots) for e in engines]
    want, got = (e.prefill(s, prompt) for e, s in zip(engines, states, strict=True))
    yield pair.compared(gear.name, "prefill", "logits", got.logits_RV, want.logits_RV, "prefill")
    text = [*prompt.tolist(), int(want.choice_R[0])]
    drafts: list[tuple[Draft, Draft]] = []
    for step in range(STEPS):
        where = f"step {step}"
        tokens_T, tree = np.array(text[-1:]), pair.reference.bundle.trees["plain"][1]
        if gear.draft:
            mine, theirs = (single.draft(e, s, gear, text[-1]) for e, s in zip(engines, states, strict=True))
            drafts.append((mine, theirs))
            tokens_T, tree = mine.tokens_T, mine.tree
        want, got = (single.verify(e, s, tokens_T, tree) for e, s in zip(engines, states, strict=True))
        for quantity, found, expected in _quantities(got, want):
            yield pair.compared(gear.name, gear.graph, quantity, found, expected, where)
        rows = step_path(tree, step)
        for state in states:
            state.commit(rows)
            state.check()
        text += [*tokens_T[rows[1:]].tolist(), int(want.choice_R[rows[-1]])]
    if gear.neural:
        yield from compare_drafts(pair, gear, drafts)
    # One more row, so that the last commit is written; then the caches must hold what a fresh prefill holds.
    length = states[1].length
    single.verify(pair.engine, states[1], np.array(text[-1:]), pair.reference.bundle.trees["plain"][1])
    fresh = pair.reference.begin(gear.slots)
    pair.reference.prefill(fresh, np.array(text[:length], np.int64))
    for i, (buffer, reference) in enumerate(zip(states[1].kv.buffers, fresh.kv.buffers, strict=True)):
        name = f"layer {i // 2} {'value' if i % 2 else 'key'}"
        fresh_one = host(reference[:, :length])
        held = host(states[1].kv.text(buffer, length), len(fresh_one))
        yield pair.compared(gear.name, gear.graph, "cache after commit", held, fresh_one, name)
    if gear.neural and fresh.draft and fresh.draft.buffers:
        yield from _draft_caches(pair, gear, text[length], states[1], fresh)


def compare_drafts(pair: Pair, gear: Gear, drafts: list[tuple[Draft, Draft]]) -> Iterator[Comparison]:
    """Scores of the nodes, and the share of their tokens that differ, over pairs of drafts of one text.

    Two candidates of nearly equal scores may change places; what was drafted below them is then of different texts
    and is left out. In half precision such ties are common, so some tokens may differ there.
    """
    assert gear.draft is not None
    differing = [0]
    for number, (want, got) in enumerate(drafts):
        for draft in (want, got):
            require(draft.tree, f"{gear.name}: draft {number}")
        same_T = want.tokens_T == got.tokens_T
        if not np.array_equal(want.tree.parents, got.tree.parents):  # a budget tree of another shape: its first level
            same_T[1:] = False
        above_M = np.array([same_T[want.tree.paths[parent]].all() for parent in want.tree.parents[1:]])
        above_M &= got.tree.parents[1:] == want.tree.parents[1:]
        differing += (~same_T[1:])[above_M].tolist()
        scores = got.scores_M[above_M], want.scores_M[above_M]
        allowed = SCORES * pair.draft_tolerance
        yield pair.compared(gear.name, gear.draft, "draft scores", *scores, f"step {number}", allowed)
    share = float(np.mean(differing))
    allowed = DIFFERING_TOKENS * min(pair.draft_tolerance, HALF_TOLERANCE)
    yield pair.found(gear.name, gear.draft, "draft tokens", share, f"{len(differing)} nodes", allowed)


def _draft_caches(
    pair: Pair, gear: Gear, root: int, state: SequenceState, fresh: SequenceState
) -> Iterator[Comparison]:
    """The drafter's caches after many drafts against those of the same text in one piece."""
    for engine, one in ((pair.engine, state), (pair.reference, fresh)):
        single.draft(engine, one, gear, root)
    yield from _compared_draft_caches(pair, gear.name, gear.draft or "", state, fresh, state.length)


def _compared_draft_caches(
    pair: Pair, gear: str, graph: str, state: SequenceState, fresh: SequenceState, length: int
) -> Iterator[Comparison]:
    assert state.draft and fresh.draft
    for i, (buffer, reference) in enumerate(zip(state.draft.buffers, fresh.draft.buffers, strict=True)):
        name = f"drafter's layer {i // 2} {'value' if i % 2 else 'key'}"
        theirs = host(reference[:, :length])
        mine = host(buffer[:, :length], len(theirs))
        yield pair.compared(gear, graph, "draft cache", mine, theirs, name, pair.draft_tolerance)


def compare_chunk(pair: Pair, graph: GraphSignature, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """A graph for prompts, or one that extends a drafter's caches, on a chunk that fills it; the prompt is repeated
    where it is shorter."""
    assert isinstance(pair.engine, StaticEngine)
    rows = min(graph.rows, graph.slots // 2)
    # The last token waits for the one behind it.
    tokens, where = np.resize(prompt, rows + (graph.kind == "extend")), f"{rows} tokens"
    engines = pair.reference, pair.engine
    states = [engine.begin(graph.slots) for engine in engines]
    want, got = (engine.prefill(state, tokens) for engine, state in zip(engines, states, strict=True))
    if graph.kind == "prefill":
        yield pair.compared("", graph.name, "logits", got.logits_RV, want.logits_RV, where)
        return
    for engine, state in zip(engines, states, strict=True):
        engine.drafting.settle(state, 1)
        assert state.draft and state.draft.length == rows
    yield from _compared_draft_caches(pair, "", graph.name, states[1], states[0], rows)


def worst(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The worst of each graph and quantity."""
    found: dict[tuple[str, str], Comparison] = {}
    for one in comparisons:
        key = (one.graph, one.quantity)
        if key not in found or one.difference > found[key].difference:
            found[key] = one
    return list(found.values())


def host(values: Any, heads: int = 0) -> NDArray[np.float32]:
    """A cache's values as fp32 in the host's memory, wherever the engine keeps them; all ``heads`` of several ranks."""
    if hasattr(values, "parts"):
        parts = [host(part) for part in values.parts]
        # Where there are fewer heads than ranks, several hold the same.
        return np.concatenate(parts[:: len(parts) * len(parts[0]) // heads])
    return np.asarray(values.float().cpu().numpy() if hasattr(values, "float") else values)


def _quantities(got: TeacherOutput, want: TeacherOutput) -> Iterator[tuple[str, NDArray, NDArray]]:
    yield "logits", got.logits_RV, want.logits_RV
    yield "features", got.features_RF, want.features_RF
    # Logit of the token each side chose: equal unless a choice differs by more than a numeric tie.
    rows = np.arange(len(want.choice_R))
    yield "choice", want.logits_RV[rows, got.choice_R], want.logits_RV[rows, want.choice_R]


def step_path(tree: TreeBuffers, step: int) -> list[int]:
    """A root path to commit: over the steps every kind occurs, from the root alone to the last deepest row.

    Which path the teacher would accept does not matter here, only that all engines commit the same one.
    """
    row = (step * 7 + tree.rows - 1) % tree.rows
    return tree.paths[row, : tree.depths[row] + 1].tolist()
