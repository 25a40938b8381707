"""A plan: which trees and gears to build, and the figures that say why.

Trees are made from counted contexts, settings are chosen on tuning contexts, and what is promised is reported
for held-out contexts, which neither has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.baselines import baselines
from draftwood.trees.calibration import BINS, Calibration, Contexts
from draftwood.trees.choice import choose
from draftwood.trees.confidence import best_bounds, split
from draftwood.trees.gears import (
    GearShape,
    LengthClass,
    Limits,
    candidates,
    equal_rows,
    length_classes,
    step_seconds,
    token_seconds,
    tokens_per_step,
)
from draftwood.trees.latency import LatencyTable
from draftwood.trees.measure import Expected, curve, expected_accept_length, mean_of_folds, visits
from draftwood.trees.prior import CountedPrior, counted_prior
from draftwood.trees.search import search
from draftwood.trees.shrinkage import Shrinkage, shrink
from draftwood.trees.topology import Topology


@dataclass(frozen=True, slots=True)
class Promise:
    """What is expected of a tree or gear, bonus counted; `heldout` is None where nothing was held out."""

    counted: Expected
    heldout: Expected | None


@dataclass(frozen=True, slots=True)
class PlannedTree:
    """A tree, the confidence class it is for, and the share of contexts that pass through each row."""

    name: str
    topology: Topology
    confidence_class: int
    promise: Promise
    counted_T: NDArray[np.float64]
    heldout_T: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class PlannedGear:
    """A gear by the names of its trees, and what it gains and costs; `seconds` is None without a latency table.

    `times` are seconds of its step behind texts of some lengths, by length.
    """

    trees: tuple[str, ...]
    rows: int
    slots: int | None
    promise: Promise
    seconds: float | None
    times: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """A class of context lengths, its share of the contexts, and the gear (by index) that serves it fastest."""

    slots: int
    share: float
    gear: int
    seconds_per_token: float
    plain_seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Step:
    """A stair of the cost: what a step of so many rows takes and the best it can gain, over all lengths."""

    slots: int
    rows: int
    seconds: float
    expected: float
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Expected time per token of the chosen gears.

    Args:
        bound: what no set of candidate gears within the limits can beat on the counted contexts.
        heldout: the same gears, each class served as planned, on held-out contexts; None without any.
        too_long: contexts that the table's largest KV length does not hold; left out.
    """

    seconds_per_token: float
    plain_seconds_per_token: float
    bound: float
    exact: bool
    candidates: int
    heldout: float | None
    plain_heldout: float | None
    graph_bytes: int
    too_long: int
    source: str
    served: tuple[Served, ...]
    stairs: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A tree by another method; its time per token if each context took it at the KV length it needs.

    `seconds_per_token` is None without a latency table, or where the table has no such step or draft.
    """

    name: str
    topology: Topology
    promise: Promise
    seconds_per_token: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it. `bounds` are the confidences at which classes begin, but the first.

    Args:
        contexts: counted, tuning and held-out ones, by part.
        greedy: what to believe of a greedy text, or of any where nothing else was counted.
        sampled: what to believe of a sampled one.
        plain: seconds of plain decoding at each KV length of the gears, by length of the text.
        curve: the best expected accept length on counted contexts of 0, 1, ..., n draft nodes.
        curve_heldout: that of the planned nested trees on held-out contexts; empty without any.
    """

    contexts: dict[str, int]
    grouped: bool
    limits: Limits
    shrinkage: Shrinkage
    bounds: tuple[float, ...]
    trees: tuple[PlannedTree, ...]
    gears: tuple[PlannedGear, ...]
    cost: Cost | None
    curve: tuple[float, ...]
    curve_heldout: tuple[float, ...]
    baselines: tuple[Baseline, ...]
    greedy: CountedPrior
    sampled: CountedPrior | None
    plain: dict[int, tuple[tuple[int, float], ...]]


def make_plan(
    calibration: Calibration,
    limits: Limits,
    table: LatencyTable | None = None,
    classes: int = 1,
    sampled: Calibration | None = None,
) -> Plan:
    """Plans gears for least time per token or, without a latency table, the best trees of given sizes.

    Where ``sampled`` text was counted apart, trees are planned for both together, and what is believed of a text is
    kept apart.

    Without a table sizes are ``limits.nodes`` and its halves, as many as `limits.gears` leaves beside plain
    decoding.

    Raises:
        TreeError: nothing was counted, or limits that nothing meets.
    """
    greedy, calibration = calibration, _together(calibration, sampled)
    counted, tuning, heldout = (calibration.part(part) for part in ("counted", "tuning", "heldout"))
    _check(calibration, counted, limits)
    shrinkage = shrink(counted, tuning, limits.nodes, limits.depth, limits.children)
    bounds = best_bounds(counted, classes, limits.nodes, limits.depth, limits.children)
    parts = (counted, heldout)
    if table is None:
        gears, cost = _by_size(split(counted, bounds), limits, shrinkage.strength), None
    else:
        gears, cost = _by_cost(parts, table, limits, bounds, shrinkage.strength)
    gears = [equal_rows(gear) for gear in gears]
    every = [tree for gear in gears for tree in gear.trees]
    trees = _named_trees(gears, parts, bounds)
    largest = max(gear.rows for gear in gears) - 1 or limits.nodes
    others = baselines(counted, largest, limits.depth, limits.children)
    if bounds:
        others["one-tree"] = shrinkage.search.tree(largest)
    return Plan(
        contexts={"counted": counted.total, "tuning": tuning.total, "heldout": heldout.total},
        grouped=calibration.grouped,
        limits=limits,
        shrinkage=shrinkage,
        bounds=tuple(bound / BINS for bound in bounds),
        trees=tuple(trees.values()),
        gears=tuple(_planned_gear(gear, trees, parts, bounds, table) for gear in gears),
        cost=cost,
        curve=_padded(search(counted, limits.nodes, limits.depth, limits.children).curve(), limits.nodes),
        curve_heldout=_padded(curve(heldout, shrinkage.search.paths(limits.nodes)), limits.nodes)
        if heldout.total
        else (),
        baselines=tuple(
            Baseline(name, tree, _promise((tree,), parts, ()), _alone(tree, counted, table, limits))
            for name, tree in others.items()
        ),
        greedy=counted_prior(greedy.part("counted"), every, bounds),
        sampled=counted_prior(sampled.part("counted"), every, bounds) if sampled else None,
        plain={slots: _times(GearShape(1, slots, (Topology.plain(),)), table) for slots in _lengths(gears)}
        if table
        else {},
    )


def _check(calibration: Calibration, counted: Contexts, limits: Limits) -> None:
    if limits.gears < 1:
        raise TreeError(f"plan: expected a limit of 1 or more gears, plain decoding counted, got {limits.gears}")
    if calibration.contexts.total and not counted.total:
        raise TreeError(f"plan: all {calibration.contexts.total} contexts are held out; calibrate on more text")
    if counted.total and not counted.width:
        raise TreeError("plan: in no counted context was the truth a candidate; there is no tree to plan")


def _together(greedy: Calibration, sampled: Calibration | None) -> Calibration:
    if sampled is None:
        return greedy
    both = Calibration()
    both.merge(greedy)
    both.merge(sampled)
    return both


def _lengths(gears: Sequence[GearShape]) -> list[int]:
    return sorted({gear.slots for gear in gears})


def _times(gear: GearShape, table: LatencyTable) -> tuple[tuple[int, float], ...]:
    """Seconds of a step of the gear behind texts that fill the KV lengths of the table, as far as it goes."""
    return tuple((slots, step_seconds(table, gear, slots)) for slots in table.slots if slots <= gear.slots)


def _alone(tree: Topology, counted: Contexts, table: LatencyTable | None, limits: Limits) -> float | None:
    """Seconds per token of `tree` on counted contexts, each at the KV length it needs."""
    if table is None:
        return None
    lengths, _ = length_classes(counted, table, limits.nodes)
    gears = [GearShape(tree.rows, length.slots, (tree,)) for length in lengths]
    try:
        seconds_GC = token_seconds(gears, lengths, table)
    except TreeError:  # the table has no step or draft that large
        return None
    return float(seconds_GC.diagonal() @ [length.share for length in lengths])


def _padded(curve: NDArray[np.float64], nodes: int) -> tuple[float, ...]:
    """Up to `nodes` nodes; where no more nodes were ever visited, more of them gain nothing."""
    return tuple(np.pad(curve, (0, nodes + 1 - len(curve)), mode="edge").tolist())


def _by_size(classes: Sequence[Contexts], limits: Limits, strength: float) -> list[GearShape]:
    """Plain decoding and the best trees of `limits.nodes` nodes, half as many, and so on; no KV length yet."""
    gears = [GearShape(1, 0, (Topology.plain(),) * len(classes))]
    found = [search(part, limits.nodes, limits.depth, limits.children, strength) for part in classes]
    nodes = limits.nodes
    while nodes and len(gears) < limits.gears:
        trees = tuple(part.tree(nodes) for part in found)
        gears.append(GearShape(max(tree.rows for tree in trees), 0, trees))
        nodes = (gears[-1].rows - 1) // 2
    return list(dict.fromkeys(gears))


def _by_cost(
    parts: tuple[Contexts, Contexts],
    table: LatencyTable,
    limits: Limits,
    bounds: tuple[int, ...],
    strength: float,
) -> tuple[list[GearShape], Cost]:
    lengths, too_long = length_classes(parts[0], table, limits.nodes, bounds)
    options = candidates(lengths, table, limits, strength)
    seconds_GC, shares_C = token_seconds(options, lengths, table), np.array([length.share for length in lengths])
    graphs = [(gear.rows, gear.slots) for gear in options]
    sizes = [table.graph_bytes(*graph) for graph in graphs]
    choice = choose(seconds_GC, shares_C, limits.gears, graphs, sizes, limits.graph_bytes)
    gears = [options[gear] for gear in choice.gears]
    chosen_GC = seconds_GC[list(choice.gears)]
    # Who does not speculate still picks the KV length.
    plain_C = seconds_GC[[gear.rows == 1 for gear in options]].min(0)
    served = tuple(
        Served(length.slots, length.share, int(chosen_C.argmin()), float(chosen_C.min()), float(plain))
        for length, chosen_C, plain in zip(lengths, chosen_GC.T, plain_C, strict=True)
    )
    heldout, plain_heldout = _on_heldout(gears, served, parts[1], table, limits, bounds)
    return gears, Cost(
        seconds_per_token=choice.seconds,
        plain_seconds_per_token=float(plain_C @ shares_C),
        bound=choice.bound,
        exact=choice.exact,
        candidates=len(options),
        heldout=heldout,
        plain_heldout=plain_heldout,
        graph_bytes=sum({graphs[gear]: sizes[gear] for gear in choice.gears}.values()),
        too_long=too_long,
        source=table.source,
        served=served,
        stairs=_stairs(options, lengths, table),
    )


def _on_heldout(
    gears: list[GearShape],
    served: Sequence[Served],
    heldout: Contexts,
    table: LatencyTable,
    limits: Limits,
    bounds: tuple[int, ...],
) -> tuple[float | None, float | None]:
    """Mean seconds per token on held-out contexts: of the gears that were planned for each length, and plainly."""
    planned = {one.slots: one for one in served}
    try:
        lengths = [one for one in length_classes(heldout, table, limits.nodes, bounds)[0] if one.slots in planned]
    except TreeError:  # no held-out context fits
        return None, None
    if not lengths:
        return None, None
    seconds_GC = token_seconds(gears, lengths, table)
    shares_C = np.array([one.share for one in lengths])
    shares_C /= shares_C.sum()
    taken_C = seconds_GC[[planned[one.slots].gear for one in lengths], range(len(lengths))]
    plain_C = np.array([planned[one.slots].plain_seconds_per_token for one in lengths])
    return float(taken_C @ shares_C), float(plain_C @ shares_C)


def _stairs(options: Sequence[GearShape], lengths: Sequence[LengthClass], table: LatencyTable) -> tuple[Step, ...]:
    """For each KV length and row count the gear with the least time per token over all lengths that fit it."""
    seconds_GC, tokens_GC = token_seconds(options, lengths, table), tokens_per_step(options, lengths)
    best: dict[tuple[int, int], Step] = {}
    for gear, seconds_C, tokens_C in zip(options, seconds_GC, tokens_GC, strict=True):
        fits_C = np.isfinite(seconds_C)
        shares_C = np.array([one.share for one in lengths]) * fits_C
        shares_C /= shares_C.sum()
        step = sum(s * step_seconds(table, gear, c.slots) for s, c in zip(shares_C, lengths, strict=True) if s)
        per_token = float(np.where(fits_C, seconds_C, 0) @ shares_C)
        stair = Step(gear.slots, gear.rows, float(step), float(tokens_C @ shares_C), per_token)
        key = (gear.slots, gear.rows)
        best[key] = min(best.get(key, stair), stair, key=lambda one: one.seconds_per_token)
    return tuple(best[key] for key in sorted(best))


def _named_trees(
    gears: Sequence[GearShape], parts: tuple[Contexts, Contexts], bounds: tuple[int, ...]
) -> dict[tuple[int, Topology], PlannedTree]:
    """Every distinct tree, by confidence class and topology; plain decoding is one for all classes."""
    classes = [split(part, bounds) for part in parts]
    found: dict[tuple[int, Topology], PlannedTree] = {}
    names: set[str] = set()
    for gear in gears:
        for place, tree in enumerate(gear.trees):
            key = (place if tree.nodes else 0, tree)
            if key in found:
                continue
            counted, heldout = (classes[0][place], classes[1][place]) if tree.nodes else parts
            name = _name(gear.rows, place, len(gear.trees), names) if tree.nodes else "plain"
            names.add(name)
            found[key] = _planned_tree(name, tree, key[0], visits(counted, tree), visits(heldout, tree))
    return found


def _planned_tree(
    name: str,
    tree: Topology,
    confidence_class: int,
    counted_FT: NDArray[np.float64],
    heldout_FT: NDArray[np.float64],
) -> PlannedTree:
    counted, heldout = (mean_of_folds(found.sum(1), found[:, 0]) for found in (counted_FT, heldout_FT))
    assert counted is not None, "no class is empty"
    shares = [found.sum(0) / found[:, 0].sum() if found.any() else None for found in (counted_FT, heldout_FT)]
    assert shares[0] is not None
    return PlannedTree(name, tree, confidence_class, Promise(counted, heldout), shares[0], shares[1])


def _name(rows: int, place: int, classes: int, taken: set[str]) -> str:
    name = f"planned-{rows}" + (f"-class-{place}" if classes > 1 else "")
    return next(option for option in (name, *(f"{name}-{i}" for i in range(2, 999))) if option not in taken)


def _planned_gear(
    gear: GearShape,
    trees: dict[tuple[int, Topology], PlannedTree],
    parts: tuple[Contexts, Contexts],
    bounds: tuple[int, ...],
    table: LatencyTable | None,
) -> PlannedGear:
    planned = [trees[place if tree.nodes else 0, tree] for place, tree in enumerate(gear.trees)]
    names = tuple(tree.name for tree in planned)
    promise = planned[0].promise if len(planned) == 1 else _promise(gear.trees, parts, bounds)
    if table is None:
        return PlannedGear(names, gear.rows, None, promise, None)
    seconds, times = step_seconds(table, gear, gear.slots), _times(gear, table)
    return PlannedGear(names, gear.rows, gear.slots, promise, seconds, times)


def _promise(trees: tuple[Topology, ...], parts: tuple[Contexts, Contexts], bounds: tuple[int, ...]) -> Promise:
    counted, heldout = (_expected(trees, part, bounds) for part in parts)
    if counted is None:
        raise TreeError("plan: no contexts have been counted; calibrate on some text first")
    return Promise(counted, heldout)


def _expected(trees: tuple[Topology, ...], contexts: Contexts, bounds: tuple[int, ...]) -> Expected | None:
    if len(trees) == 1:
        return expected_accept_length(contexts, trees[0])
    found = [visits(part, tree) for part, tree in zip(split(contexts, bounds), trees, strict=True)]
    return mean_of_folds(np.sum([v.sum(1) for v in found], 0), np.sum([v[:, 0] for v in found], 0))
