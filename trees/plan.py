"""The planner: from counted contexts and a latency table to the plan that a build takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.planned import Gear, Planning, StepTime, named_gears
from draftwood.trees.baselines import baselines
from draftwood.trees.calibration import BINS, Calibration, Contexts
from draftwood.trees.candidates import (
    GearShape,
    LengthClass,
    candidates,
    equal_rows,
    length_classes,
    step_us,
    token_us,
    tokens_per_step,
)
from draftwood.trees.choice import Choice, choose
from draftwood.trees.confidence import best_bounds, split
from draftwood.trees.latency import LatencyTable
from draftwood.trees.measure import curve, mean_of_folds, visits
from draftwood.trees.plan_file import Baseline, Cost, Limits, Plan, PlannedTree, Promise, Served, Stair
from draftwood.trees.prior import counted_prior
from draftwood.trees.search import Search, search
from draftwood.trees.topology import Topology


@dataclass(frozen=True, slots=True)
class _Parts:
    """What trees are made from and figures reported for, and the confidence bins that divide both into classes."""

    counted: Contexts
    heldout: Contexts
    bounds: tuple[int, ...]

    def of_class(self, place: int) -> tuple[Contexts, Contexts]:
        return split(self.counted, self.bounds)[place], split(self.heldout, self.bounds)[place]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The candidate gears, what each takes per token in each class of lengths, and which of them are best together."""

    lengths: list[LengthClass]
    too_long: int
    options: list[GearShape]
    us_GC: NDArray[np.float64]
    choice: Choice

    @property
    def gears(self) -> list[GearShape]:
        return [self.options[gear] for gear in self.choice.gears]

    @property
    def shares_C(self) -> NDArray[np.float64]:
        return np.array([length.share for length in self.lengths])


# Planned trees by confidence class and topology.
Trees = dict[tuple[int, Topology], PlannedTree]


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
    both = _together(calibration, sampled)
    counted, heldout = both.part("counted"), both.part("heldout")
    _check(both, counted, limits)
    best = search(counted, limits.nodes, limits.depth, limits.children)
    parts = _Parts(counted, heldout, best_bounds(counted, classes, limits.nodes, limits.depth, limits.children))
    chosen = _choose(parts, table, limits) if table else None
    found = chosen.gears if chosen else _by_size(split(counted, parts.bounds), limits)
    shapes = [equal_rows(shape) for shape in found]
    trees = _named_trees(shapes, parts)
    gears = _gears(shapes, trees) if table else ()
    every = [tree for shape in shapes for tree in shape.trees]
    return Plan(
        contexts={"counted": counted.total, "heldout": heldout.total},
        grouped=both.grouped,
        limits=limits,
        trees=tuple(trees.values()),
        gears=gears,
        planning=Planning(
            bounds=tuple(bound / BINS for bound in parts.bounds),
            greedy=counted_prior(calibration.part("counted"), every, parts.bounds),
            sampled=counted_prior(sampled.part("counted"), every, parts.bounds) if sampled else None,
            times=tuple(_times(gears, trees, table)) if table else (),
        ),
        cost=_cost(chosen, _names(shapes, gears, trees), parts, table, limits) if chosen and table else None,
        curve=_padded(best.curve(), limits.nodes),
        curve_heldout=_padded(curve(heldout, best.paths(limits.nodes)), limits.nodes) if heldout.total else (),
        baselines=tuple(_baselines(max(shape.rows for shape in shapes) - 1, best, parts, table, limits)),
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


def _padded(curve: NDArray[np.float64], nodes: int) -> tuple[float, ...]:
    """Up to `nodes` nodes; where no more nodes were ever visited, more of them gain nothing."""
    return tuple(np.pad(curve, (0, nodes + 1 - len(curve)), mode="edge").tolist())


def _by_size(classes: Sequence[Contexts], limits: Limits) -> list[GearShape]:
    """Plain decoding and the best trees of `limits.nodes` nodes, half as many, and so on; no KV length yet."""
    gears = [GearShape(1, 0, (Topology.plain(),) * len(classes))]
    found = [search(part, limits.nodes, limits.depth, limits.children) for part in classes]
    nodes = limits.nodes
    while nodes and len(gears) < limits.gears:
        trees = tuple(part.tree(nodes) for part in found)
        gears.append(GearShape(max(tree.rows for tree in trees), 0, trees))
        nodes = (gears[-1].rows - 1) // 2
    return list(dict.fromkeys(gears))


def _choose(parts: _Parts, table: LatencyTable, limits: Limits) -> _Chosen:
    lengths, too_long = length_classes(parts.counted, table, limits.nodes, parts.bounds)
    options = candidates(lengths, table, limits)
    us_GC = token_us(options, lengths, table)
    choice = choose(us_GC, np.array([length.share for length in lengths]), limits.gears)
    return _Chosen(lengths, too_long, options, us_GC, choice)


def _named_trees(shapes: Sequence[GearShape], parts: _Parts) -> Trees:
    """Every distinct tree, by confidence class and topology; plain decoding is one for all classes."""
    found: Trees = {}
    names: set[str] = set()
    for shape in shapes:
        for place, tree in enumerate(shape.trees):
            key = (place if tree.nodes else 0, tree)
            if key in found:
                continue
            name = _name(shape.rows, place, len(shape.trees), names) if tree.nodes else "plain"
            names.add(name)
            own = parts.of_class(place) if tree.nodes else (parts.counted, parts.heldout)
            found[key] = _planned_tree(name, tree, key[0], own)
    return found


def _planned_tree(name: str, tree: Topology, confidence_class: int, own: tuple[Contexts, Contexts]) -> PlannedTree:
    counted_FT, heldout_FT = (visits(contexts, tree) for contexts in own)
    return PlannedTree(
        name=name,
        confidence_class=confidence_class,
        paths=tree.paths,
        promise=_promise(counted_FT, heldout_FT),
        counted_shares=_shares(counted_FT),
        heldout_shares=_shares(heldout_FT) if heldout_FT.any() else None,
    )


def _promise(counted_FT: NDArray[np.float64], heldout_FT: NDArray[np.float64]) -> Promise:
    counted, heldout = (mean_of_folds(found.sum(1), found[:, 0]) for found in (counted_FT, heldout_FT))
    assert counted is not None, "no class is empty"
    return Promise(counted=counted, heldout=heldout)


def _shares(visits_FT: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(share), 6) for share in visits_FT.sum(0)[1:] / visits_FT[:, 0].sum())


def _name(rows: int, place: int, classes: int, taken: set[str]) -> str:
    name = f"planned-{rows}" + (f"-class-{place}" if classes > 1 else "")
    return next(option for option in (name, *(f"{name}-{i}" for i in range(2, 999))) if option not in taken)


def _tree_names(shape: GearShape, trees: Trees) -> tuple[str, ...]:
    if shape.rows == 1:
        return ("plain",)
    return tuple(trees[place if tree.nodes else 0, tree].name for place, tree in enumerate(shape.trees))


def _gears(shapes: Sequence[GearShape], trees: Trees) -> tuple[Gear, ...]:
    """Plain decoding at each KV length, then what drafts."""
    plain = [(("plain",), slots) for slots in sorted({shape.slots for shape in shapes})]
    return named_gears(plain + [(_tree_names(shape, trees), shape.slots) for shape in shapes if shape.rows > 1])


def _names(shapes: Sequence[GearShape], gears: Sequence[Gear], trees: Trees) -> list[str]:
    """The name of each shape's gear."""
    names = {(gear.trees, gear.slots): gear.name for gear in gears}
    return [names[_tree_names(shape, trees), shape.slots] for shape in shapes]


def _times(gears: Sequence[Gear], trees: Trees, table: LatencyTable) -> Iterable[StepTime]:
    """Of each gear behind texts that fill the KV lengths of the table, as far as it goes."""
    topologies = {tree.name: topology for (_, topology), tree in trees.items()} | {"plain": Topology.plain()}
    for gear in gears:
        own = tuple(topologies[name] for name in gear.trees)
        shape = GearShape(own[0].rows, gear.slots, own)
        for slots in (slots for slots in table.slots if slots <= gear.slots):
            yield StepTime(gear=gear.name, length=slots, us=round(step_us(table, shape, slots), 3))


def _cost(chosen: _Chosen, names: Sequence[str], parts: _Parts, table: LatencyTable, limits: Limits) -> Cost:
    """What the chosen gears take, whose names are ``names``."""
    chosen_GC = chosen.us_GC[list(chosen.choice.gears)]
    # Who does not speculate still picks the KV length.
    plain_C = chosen.us_GC[[gear.rows == 1 for gear in chosen.options]].min(0)
    heldout, plain_heldout = _on_heldout(chosen, plain_C, parts, table, limits)
    return Cost(
        us_per_token=chosen.choice.time,
        plain_us_per_token=float(plain_C @ chosen.shares_C),
        bound=chosen.choice.bound,
        exact=chosen.choice.exact,
        candidates=len(chosen.options),
        heldout=heldout,
        plain_heldout=plain_heldout,
        too_long=chosen.too_long,
        source=table.source,
        served=tuple(
            Served(
                slots=length.slots,
                share=length.share,
                gear=names[int(own_C.argmin())],
                us_per_token=float(own_C.min()),
                plain_us_per_token=float(plain),
            )
            for length, own_C, plain in zip(chosen.lengths, chosen_GC.T, plain_C, strict=True)
        ),
        stairs=_stairs(chosen, table),
    )


def _on_heldout(
    chosen: _Chosen, plain_C: NDArray[np.float64], parts: _Parts, table: LatencyTable, limits: Limits
) -> tuple[float | None, float | None]:
    """Mean time per token on held-out contexts: of the gears that were planned for each length, and plainly."""
    place = {length.slots: c for c, length in enumerate(chosen.lengths)}
    try:
        every, _ = length_classes(parts.heldout, table, limits.nodes, parts.bounds)
    except TreeError:  # no held-out context fits
        return None, None
    lengths = [one for one in every if one.slots in place]
    if not lengths:
        return None, None
    taken_C = chosen.us_GC[list(chosen.choice.gears)].argmin(0)
    us_GC = token_us(chosen.gears, lengths, table)
    shares_C = np.array([one.share for one in lengths])
    shares_C /= shares_C.sum()
    planned = [place[one.slots] for one in lengths]
    return float(us_GC[taken_C[planned], range(len(lengths))] @ shares_C), float(plain_C[planned] @ shares_C)


def _stairs(chosen: _Chosen, table: LatencyTable) -> tuple[Stair, ...]:
    """For each KV length and row count the gear with the least time per token over all lengths that fit it."""
    tokens_GC = tokens_per_step(chosen.options, chosen.lengths)
    best: dict[tuple[int, int], Stair] = {}
    for gear, us_C, tokens_C in zip(chosen.options, chosen.us_GC, tokens_GC, strict=True):
        fits_C = np.isfinite(us_C)
        shares_C = chosen.shares_C * fits_C
        shares_C /= shares_C.sum()
        step = sum(s * step_us(table, gear, c.slots) for s, c in zip(shares_C, chosen.lengths, strict=True) if s)
        stair = Stair(
            slots=gear.slots,
            rows=gear.rows,
            us=float(step),
            expected=float(tokens_C @ shares_C),
            us_per_token=float(np.where(fits_C, us_C, 0) @ shares_C),
        )
        key = (gear.slots, gear.rows)
        best[key] = min(best.get(key, stair), stair, key=lambda one: one.us_per_token)
    return tuple(best[key] for key in sorted(best))


def _baselines(
    nodes: int, best: Search, parts: _Parts, table: LatencyTable | None, limits: Limits
) -> Iterable[Baseline]:
    """Trees of other methods, of at most as many nodes as the largest planned one."""
    nodes = nodes or limits.nodes
    others = baselines(parts.counted, nodes, limits.depth, limits.children)
    if parts.bounds:
        others["one-tree"] = best.tree(nodes)
    for name, tree in others.items():
        yield Baseline(
            name=name,
            nodes=tree.nodes,
            depth=tree.depth,
            promise=_promise(visits(parts.counted, tree), visits(parts.heldout, tree)),
            us_per_token=_alone(tree, parts.counted, table, limits) if table else None,
        )


def _alone(tree: Topology, counted: Contexts, table: LatencyTable, limits: Limits) -> float | None:
    """Time per token of `tree` on counted contexts, each at the KV length it needs."""
    lengths, _ = length_classes(counted, table, limits.nodes)
    gears = [GearShape(tree.rows, length.slots, (tree,)) for length in lengths]
    try:
        us_GC = token_us(gears, lengths, table)
    except TreeError:  # the table has no step or draft that large
        return None
    return float(us_GC.diagonal() @ [length.share for length in lengths])
