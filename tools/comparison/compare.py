"""Runs two engines of a bundle in lockstep, through several steps with commits of every kind, and compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.static import StaticEngine
from draftwood.runtime.rounding import HALF_TOLERANCE, TOLERANCE
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.comparison import single
from draftwood.tools.comparison.allowed import (
    Allowed,
    half_name,
    host,
    measured,
    relative_difference,
    row_difference,
)
from draftwood.tools.reference.followed import ExchangedEager, FollowingEager, States
from draftwood.trees import TreeBuffers, require

# How far bf16 is from fp32 is a property of the model, not a fault: reported, and refused only if it is absurd.
ROUNDED_TOLERANCE = 2e-1
# The share of drafted tokens that may differ is this times the tolerance. That is none in fp32, and three in ten in
# half precision, whose neighbouring candidates are a rounding apart. In int8 no more (measured 4e-2 of the demo's
# EAGLE-3).
DIFFERING_TOKENS = 10
# A score is the small difference of logits, and a path's the sum of several: their rounding is that of the logits.
SCORES = 3
STEPS = 6  # tree steps a prompt and gear: enough for commits in place, moved, and both in turn


# The reason if no rounding was measured.
CHOSEN = "chosen for this arithmetic"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity of one graph. The difference is a share of the largest reference value, or of a row's length if
    blocks are compared one by one.

    ``graphs`` says whose were compared: "cpu", "static" and "bitwise" with eager fp32, "ge" with eager in the NPU's
    type, "eager" the latter with fp32. ``reason`` says where what is allowed comes from.
    """

    gear: str
    graph: str
    graphs: str
    quantity: str
    difference: float
    tolerance: float
    where: str
    reason: str = CHOSEN
    ok: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", self.difference <= self.tolerance)

    @property
    def badness(self) -> tuple[bool, float]:
        """Sorts by whether it fails, then by the share of what is allowed."""
        return not self.ok, self.difference / max(self.tolerance, 1e-30)


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, the one it is held against, and the difference allowed.

    A reference that follows takes each half of a block from the engine's own state, so it runs after the engine.
    """

    name: str
    reference: Engine
    engine: Engine
    tolerance: float
    # The tolerance of drafts, if it differs: a drafter in int8 goes with a teacher that is not.
    of_drafts: float | None = None
    # By quantity, if rounding was measured.
    measured: Mapping[str, Allowed] = field(default_factory=dict)
    # Whether drafts and the drafter's caches are compared.
    drafts: bool = True

    @property
    def draft_tolerance(self) -> float:
        """The difference allowed of drafts."""
        return self.tolerance if self.of_drafts is None else self.of_drafts

    @property
    def following(self) -> FollowingEager | None:
        """The reference, if it is one that follows."""
        return self.reference if isinstance(self.reference, FollowingEager) else None

    @property
    def in_turn(self) -> tuple[Engine, Engine]:
        """Both in the order in which they run: a reference that follows has to be the second."""
        return self.engine, self.reference

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
        """Holds a quantity against its reference; ``tolerance`` is allowed if none was measured, not the pair's."""
        if tolerance is None and self.following:
            return self.found(gear, graph, quantity, row_difference(got - want, want), where)
        return self.found(gear, graph, quantity, relative_difference(got, want), where, tolerance)

    def found(
        self, gear: str, graph: str, quantity: str, difference: float, where: str, tolerance: float | None = None
    ) -> Comparison:
        """A difference that is known already."""
        allowed = self.measured.get(quantity, Allowed(self.tolerance if tolerance is None else tolerance, CHOSEN))
        return Comparison(gear, graph, self.name, quantity, difference, allowed.value, where, allowed.reason)

    def rows(self, gear: str, graph: str, got: TeacherOutput, want: TeacherOutput, where: str) -> Iterator[Comparison]:
        """The results of a launch; and every half of a block, if the reference follows."""
        yield self.compared(gear, graph, "logits", got.logits_RV, want.logits_RV, where)
        yield self.compared(gear, graph, "features", got.features_RF, want.features_RF, where)
        # Logit of the token each side chose: equal unless a choice differs by more than a numeric tie.
        rows = np.arange(len(want.choice_R))
        lead_R = want.logits_RV[rows, want.choice_R] - want.logits_RV[rows, got.choice_R]
        if self.following is None:
            apart = float(lead_R.max()) / max(1.0, float(np.abs(want.logits_RV).max()))
            yield self.found(gear, graph, "choice", apart, where)
            return
        yield self.found(gear, graph, "choice", row_difference(lead_R[:, None], want.logits_RV), where)
        for number, (apart_TH, added_TH) in enumerate(self.following.halves):
            place = f"layer {(number - 1) // 2}, {where}" if number else f"embedding, {where}"
            yield self.found(gear, graph, half_name(number), row_difference(apart_TH, added_TH), place)


def compare_gear(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Prefill, then steps of the gear's tree on the same tokens and the same commits; the caches at the end."""
    states = [e.begin(gear.slots) for e in pair.in_turn]
    got, want = (e.prefill(s, prompt) for e, s in zip(pair.in_turn, states, strict=True))
    yield from pair.rows(gear.name, "prefill", got, want, "prefill")
    text = [*prompt.tolist(), int(want.choice_R[0])]
    drafts: list[tuple[Draft, Draft]] = []
    followed = list(pair.following.followed) if pair.following else []
    for step in range(STEPS):
        tokens_T, tree = np.array(text[-1:]), pair.reference.bundle.trees["plain"][1]
        if gear.draft:
            theirs, mine = (single.draft(e, s, gear, text[-1]) for e, s in zip(pair.in_turn, states, strict=True))
            drafts.append((mine, theirs))
            tokens_T, tree = mine.tokens_T, mine.tree
        got, want = (single.verify(e, s, tokens_T, tree) for e, s in zip(pair.in_turn, states, strict=True))
        comparisons = list(pair.rows(gear.name, gear.graph, got, want, f"step {step}"))
        path = tree.paths[-1, : tree.depths[-1] + 1]
        if not all(c.ok for c in comparisons):
            comparisons = list(_again(pair, comparisons, [*text[:-1], *tokens_T[path]]))
        yield from comparisons
        rows = step_path(tree, step)
        followed += [[state_TH[rows] for state_TH in pair.following.taken]] if pair.following else []
        for state in states:
            state.commit(rows)
            state.check()
        text += [*tokens_T[rows[1:]].tolist(), int(want.choice_R[rows[-1]])]
    if gear.neural and pair.drafts:
        yield from compare_drafts(pair, gear, drafts)
    yield from _compare_caches(pair, gear, text, states[0], followed)


def compare_far(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """A step of the gear's tree where its caches end, and a plain one after its commit: positions and slots that a
    prompt of the comparison never comes to. The slots between hold the prompt's rows, over and over."""
    plain = pair.reference.bundle.trees["plain"][1]
    _, tree = pair.reference.bundle.trees.get(gear.tree, (None, plain))
    length = gear.slots - 2 - tree.rows
    states = [engine.begin(gear.slots) for engine in pair.in_turn]
    for engine, state in zip(pair.in_turn, states, strict=True):
        engine.prefill(state, prompt)
        for buffer in state.kv.buffers:
            for at in range(len(prompt), length, len(prompt)):
                buffer[:, at : min(at + len(prompt), length)] = buffer[:, : min(len(prompt), length - at)]
        state.kv.extended(length - len(prompt))
    tokens_T = np.random.default_rng(0).integers(0, pair.reference.bundle.manifest.dims.vocabulary, tree.rows)
    for rows_T, shape in ((tokens_T, tree), (tokens_T[:1], plain)):
        got, want = (single.verify(e, s, rows_T, shape) for e, s in zip(pair.in_turn, states, strict=True))
        yield from pair.rows(gear.name, gear.graph, got, want, f"after {states[0].length} tokens")
        for state in states:
            state.commit(step_path(shape, 0))


def _again(pair: Pair, comparisons: Iterable[Comparison], text: Sequence[int]) -> Iterator[Comparison]:
    """The comparisons with a tolerance measured on this very text, read in plain order, if that is larger."""
    if pair.following or not pair.measured or not isinstance(pair.reference, ExchangedEager):
        yield from comparisons
        return
    whole, _ = measured(pair.reference, [np.array(text, np.int64)])
    for c in comparisons:
        allowed = max(whole.get(c.quantity, Allowed(0.0, "")), Allowed(c.tolerance, c.reason))
        yield replace(c, tolerance=allowed.value, reason=allowed.reason)


def _compare_caches(
    pair: Pair, gear: Gear, text: list[int], state: SequenceState, followed: Sequence[States]
) -> Iterator[Comparison]:
    """After many commits they must hold what a fresh prefill holds."""
    length = state.length
    # One more row, so that the last commit is written.
    single.verify(pair.engine, state, np.array(text[-1:]), pair.reference.bundle.trees["plain"][1])
    fresh = _fresh(pair, gear.slots, np.array(text[:length], np.int64), followed)
    comparisons = []
    for i, (buffer, reference) in enumerate(zip(state.kv.buffers, fresh.kv.buffers, strict=True)):
        name = f"layer {i // 2} {'value' if i % 2 else 'key'}"
        fresh_one = host(reference[:, :length])
        cached = host(state.kv.text(buffer, length), len(fresh_one))
        comparisons.append(pair.compared(gear.name, gear.graph, "cache after commit", cached, fresh_one, name))
    yield from comparisons if all(c.ok for c in comparisons) else _again(pair, comparisons, text[:length])
    if gear.neural and pair.drafts and fresh.draft and fresh.draft.buffers:
        yield from _draft_caches(pair, gear, text[length], state, fresh)


def _fresh(pair: Pair, slots: int, tokens_n: NDArray[np.int64], followed: Sequence[States]) -> SequenceState:
    """The reference's text in one piece; if it follows an engine, from the states that the text's rows had."""
    if pair.following:
        return pair.following.replayed(slots, tokens_n, followed)
    state = pair.reference.begin(slots)
    pair.reference.prefill(state, tokens_n)
    return state


def compare_drafts(pair: Pair, gear: Gear, drafts: list[tuple[Draft, Draft]]) -> Iterator[Comparison]:
    """Scores of the nodes, and the share of their tokens that differ, over pairs of drafts of one text.

    Two candidates of nearly equal scores may change places; what was drafted below them is then of different texts
    and is left out. In half precision such ties are common, so some tokens may differ there.
    """
    assert gear.draft is not None
    differing, of_nodes = [0], list[float]()
    for number, (want, got) in enumerate(drafts):
        for draft in (want, got):
            require(draft.tree, f"{gear.name}: draft {number}")
        same_T = want.tokens_T == got.tokens_T
        if not np.array_equal(want.tree.parents, got.tree.parents):  # a budget tree of another shape: its first level
            same_T[1:] = False
        above_M = np.array([same_T[want.tree.paths[parent]].all() for parent in want.tree.parents[1:]])
        above_M &= got.tree.parents[1:] == want.tree.parents[1:]
        differing += (~same_T[1:])[above_M].tolist()
        both = got.scores_M[above_M], want.scores_M[above_M]
        of_nodes += (np.abs(both[0] - both[1]) / max(1.0, float(np.abs(both[1]).max()))).tolist()
        allowed = SCORES * pair.draft_tolerance
        yield pair.compared(gear.name, gear.draft, "draft scores", *both, f"step {number}", allowed)
    if pair.following:  # both drafters read the same states
        # A rounding of one row moves only the nodes below it; a fault moves nearly all.
        quartile, where = sorted(of_nodes)[(len(of_nodes) - 1) // 4], f"a quarter of {len(of_nodes)} nodes"
        yield pair.found(gear.name, gear.draft, "draft scores, quartile", quartile, where, SCORES * TOLERANCE)
    share = float(np.mean(differing))
    allowed = DIFFERING_TOKENS * min(pair.draft_tolerance, HALF_TOLERANCE)
    yield pair.found(gear.name, gear.draft, "draft tokens", share, f"{len(differing)} nodes", allowed)


def _draft_caches(
    pair: Pair, gear: Gear, root: int, state: SequenceState, fresh: SequenceState
) -> Iterator[Comparison]:
    """The drafter's caches after many drafts against those of the same text in one piece."""
    for engine, owner in ((pair.engine, state), (pair.reference, fresh)):
        single.draft(engine, owner, gear, root)
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
    """A graph for prompts, or one that extends a drafter's caches, on a chunk that fills it. The prompt is repeated if
    it is shorter."""
    assert isinstance(pair.engine, StaticEngine)
    rows = min(graph.rows, graph.slots // 2)
    # The last token waits for the one after it.
    tokens, where = np.resize(prompt, rows + (graph.kind == "extend")), f"{rows} tokens"
    states = [engine.begin(graph.slots) for engine in pair.in_turn]
    got, want = (engine.prefill(state, tokens) for engine, state in zip(pair.in_turn, states, strict=True))
    if graph.kind == "prefill":
        yield from pair.rows("", graph.name, got, want, where)
        return
    for engine, state in zip(pair.in_turn, states, strict=True):
        engine.drafting.settle(state, 1)
        assert state.draft and state.draft.length == rows
    mine, theirs = states
    yield from _compared_draft_caches(pair, "", graph.name, mine, theirs, rows)


def worst(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The worst of each graph and quantity: one that fails, or else the one that is nearest to what it may be.

    What is allowed is not the same in all launches, so the largest difference may be fine next to one that is not.
    """
    worst_of: dict[tuple[str, str], Comparison] = {}
    for comparison in comparisons:
        key = (comparison.graph, comparison.quantity)
        if key not in worst_of or comparison.badness > worst_of[key].badness:
            worst_of[key] = comparison
    return list(worst_of.values())


def step_path(tree: TreeBuffers, step: int) -> list[int]:
    """A root path to commit: over the steps every kind occurs, from the root alone to the last deepest row.

    Which path the teacher would accept does not matter here, only that all engines commit the same one.
    """
    row = (step * 7 + tree.rows - 1) % tree.rows
    return tree.paths[row, : tree.depths[row] + 1].tolist()
