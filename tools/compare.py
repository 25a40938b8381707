"""Runs two engines of a bundle in lockstep, through several steps with commits of every kind, and compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.manifest import Gear, GraphSignature
from draftwood.runtime.cache import Cache
from draftwood.runtime.engine import Engine, StepResult
from draftwood.runtime.static_engine import StaticEngine
from draftwood.trees import Topology, tree_tokens

STEPS = 6  # tree steps a prompt and gear: enough for commits in place, moved, and both in turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One quantity of one graph; the difference is relative to the largest reference value.

    ``graphs`` says what was compared: "onnx" and "onnx-cpu" with eager fp32, "ge" with eager in the NPU's type,
    "eager" the latter with fp32.
    """

    gear: str
    graph: str
    graphs: str
    quantity: str
    difference: float
    tolerance: float
    ok: bool
    where: str


@dataclass(frozen=True, slots=True)
class Pair:
    """An engine, the one it is held against, and the difference allowed."""

    name: str
    reference: Engine
    engine: Engine
    tolerance: float

    def compared(self, gear: str, graph: str, quantity: str, got: NDArray, want: NDArray, where: str) -> Comparison:
        difference = relative_difference(got, want)
        return Comparison(
            gear=gear,
            graph=graph,
            graphs=self.name,
            quantity=quantity,
            difference=difference,
            tolerance=self.tolerance,
            ok=difference <= self.tolerance,
            where=where,
        )


def relative_difference(got: NDArray, want: NDArray) -> float:
    """Largest absolute difference, as a share of the largest reference value (at least 1); inf for no number."""
    difference = float(np.abs(got - want).max() / max(1.0, float(np.abs(want).max())))
    return difference if np.isfinite(difference) else float("inf")


def compare_gear(pair: Pair, gear: Gear, prompt: NDArray[np.int64]) -> Iterator[Comparison]:
    """Prefill, then steps of the gear's tree on the same tokens and the same commits; the caches at the end."""
    topology, tree = pair.reference.bundle.trees[gear.tree]
    engines = (pair.reference, pair.engine)
    caches = [e.new_cache(gear.slots) for e in engines]
    want, got = (e.prefill(c, prompt) for e, c in zip(engines, caches, strict=True))
    yield pair.compared(gear.name, "prefill", "logits", got.logits_RV, want.logits_RV, "prefill")
    text = [*prompt.tolist(), int(want.choice_R[0])]
    hidden = want.hidden_RH[-1:].copy()
    for step in range(STEPS):
        where, tokens = f"step {step}", None
        if topology.depth:
            (tokens, want_scores), (_, got_scores) = pair.reference.draft(hidden), pair.engine.draft(hidden)
            yield pair.compared(gear.name, "draft", "draft scores", got_scores, want_scores, where)
        tokens_T = tree_tokens(tree, text[-1], tokens)
        want, got = (e.verify(c, tokens_T, tree) for e, c in zip(engines, caches, strict=True))
        for quantity, mine, theirs in _quantities(got, want):
            yield pair.compared(gear.name, gear.graph, quantity, mine, theirs, where)
        rows = _path(topology, step)
        for cache in caches:
            cache.commit(rows)
            cache.check()
        text += [*tokens_T[rows[1:]].tolist(), int(want.choice_R[rows[-1]])]
        hidden = want.hidden_RH[rows[-1] : rows[-1] + 1].copy()
    # One more row, so that the last commit is written; then the caches must hold what a fresh prefill holds.
    length = caches[1].length
    _settle(pair.engine, caches[1], text[-1])
    fresh = pair.reference.new_cache(gear.slots)
    pair.reference.prefill(fresh, np.array(text[:length], np.int64))
    for i, (side, reference) in enumerate(zip(caches[1].sides, fresh.sides, strict=True)):
        name = f"layer {i // 2} {'value' if i % 2 else 'key'}"
        mine, theirs = host(side[:, :length]), host(reference[:, :length])
        yield pair.compared(gear.name, gear.graph, "cache after commit", mine, theirs, name)


def compare_prefill(pair: Pair, graph: GraphSignature, prompt: NDArray[np.int64]) -> Comparison:
    """One prefill graph, on a chunk that fills it; the prompt is repeated where it is shorter."""
    assert isinstance(pair.engine, StaticEngine)
    tokens = np.resize(prompt, min(graph.rows, graph.slots // 2))
    want = pair.reference.prefill(pair.reference.new_cache(graph.slots), tokens)
    got = pair.engine.prefill(pair.engine.new_cache(graph.slots), tokens)
    return pair.compared("", graph.name, "logits", got.logits_RV, want.logits_RV, f"{len(tokens)} tokens")


def worst(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The worst of each graph and quantity."""
    found: dict[tuple[str, str], Comparison] = {}
    for one in comparisons:
        key = (one.graph, one.quantity)
        if key not in found or one.difference > found[key].difference:
            found[key] = one
    return list(found.values())


def host(values: Any) -> NDArray[np.float32]:
    """A cache's values as fp32 in the host's memory, wherever the engine keeps them."""
    return np.asarray(values if isinstance(values, np.ndarray) else values.float().cpu().numpy())


def _quantities(got: StepResult, want: StepResult) -> Iterator[tuple[str, NDArray, NDArray]]:
    yield "logits", got.logits_RV, want.logits_RV
    yield "hidden", got.hidden_RH, want.hidden_RH
    # Logit of the token each side chose: equal unless a choice differs by more than a numeric tie.
    rows = np.arange(len(want.choice_R))
    yield "choice", want.logits_RV[rows, got.choice_R], want.logits_RV[rows, want.choice_R]


def _path(topology: Topology, step: int) -> list[int]:
    """A root path to commit: over the steps every kind occurs, from the root alone to the last deepest row.

    Which path the teacher would accept does not matter here, only that all engines commit the same one.
    """
    row = (step * 7 + topology.rows - 1) % topology.rows
    rows = [row]
    while row:
        row = topology.parents[row]
        rows.append(row)
    return rows[::-1]


def _settle(engine: Engine, cache: Cache, token: int) -> None:
    _, plain = engine.bundle.trees["plain"]
    engine.verify(cache, np.array([token], np.int64), plain)
