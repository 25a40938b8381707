"""The planner: from counted contexts and a latency table to the plan that a build takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.planned import Gear, Planning, StepTime, named_gears
from draftwood.trees.baselines import baselines
from draftwood.trees.calibration import Calibration, Contexts
from draftwood.trees.candidates import (
    GearShape,
    LengthClass,
    candidates,
    length_classes,
    step_us,
    token_us,
    tokens_per_step,
)
from draftwood.trees.choice import Choice, choose
from draftwood.trees.latency import LatencyTable
from draftwood.trees.measure import curve, mean_of_folds, visits
from draftwood.trees.occupancy import Occupancy, OccupancyCost
from draftwood.trees.plan_file import Baseline, Cost, Limits, Plan, PlannedTree, Promise, Served, Stair
from draftwood.trees.prior import counted_prior
from draftwood.trees.rivals import rivals
from draftwood.trees.search import Search, search
from draftwood.trees.spec import MAX_ROWS
from draftwood.trees.topology import Topology


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The candidate gears, the time of each per token in each class of lengths, and the best set of them."""

    lengths: list[LengthClass]
    too_long: int
    options: list[GearShape]
    us_GC: NDArray[np.float64]
    choice: Choice
    service: OccupancyCost

    @property
    def gears(self) -> list[GearShape]:
        return [self.options[gear] for gear in self.choice.gears]

    def best_C(self, gears: Iterable[int]) -> NDArray[np.float64]:
        """float64[L * B]: of the best of some gears in launches of every number of texts."""
        chosen = list(gears)
        return spread(self.us_GC[chosen], [self.options[g].texts for g in chosen], self.service.sizes).min(0)

    @property
    def shares_C(self) -> NDArray[np.float64]:
        return np.array([length.share for length in self.lengths])


# Contexts that trees are made from, and those that figures are reported for.
Parts = tuple[Contexts, Contexts]
Trees = dict[Topology, PlannedTree]


def make_plan(
    calibration: Calibration,
    limits: Limits,
    table: LatencyTable | None = None,
    sampled: Calibration | None = None,
    occupancy: Occupancy | None = None,
) -> Plan:
    """Plans gears for least time per token or, without a latency table, the best trees of given sizes.

    If ``sampled`` text was counted separately, trees are planned for both together; the priors stay separate.

    ``occupancy`` gives the share of each number of texts. The default is equal shares up to the table's largest
    launch. Plain decoding of every number of texts is always included and counts as one gear.

    Without a table the sizes are ``limits.nodes``, half of it and so on, up to `limits.gears` with plain decoding.

    Raises:
        TreeError: nothing was counted, or no gear meets the limits.
    """
    if sampled is not None and not (calibration.contexts.total and sampled.contexts.total):
        calibration, sampled = sampled if sampled.contexts.total else calibration, None
    both = _together(calibration, sampled)
    counted, heldout = both.part("counted"), both.part("heldout")
    _check(counted, limits, *((calibration, sampled) if sampled else (calibration,)))
    best = search(counted, limits.nodes, limits.depth, limits.children)
    parts = counted, heldout
    chosen = _choose(counted, table, limits, occupancy or Occupancy.even(max(table.texts))) if table else None
    # A graph is built for a tree's own rows, whatever row count of the table they were costed at.
    shapes = [replace(shape, rows=shape.tree.rows) for shape in (chosen.gears if chosen else _by_size(best, limits))]
    trees = _named_trees(shapes, parts)
    gears = _gears(shapes, trees) if table else ()
    topologies = {tree.name: topology for topology, tree in trees.items()}
    return Plan(
        contexts={"counted": counted.total, "heldout": heldout.total},
        models=both.models,
        grouped=both.grouped,
        limits=limits,
        trees=tuple(trees.values()),
        gears=gears,
        planning=Planning(
            greedy=counted_prior(calibration.part("counted"), topologies),
            sampled=counted_prior(sampled.part("counted"), topologies) if sampled else None,
            times=tuple(_times(gears, trees, table)) if table else (),
        ),
        cost=_cost(chosen, _names(shapes, gears, trees), heldout, table, limits) if chosen and table else None,
        curve=_padded(best.curve(), limits.nodes),
        curve_heldout=_padded(curve(heldout, best.paths(limits.nodes)), limits.nodes) if heldout.total else (),
        baselines=tuple(_baselines(max(shape.rows for shape in shapes) - 1, parts, table, limits)),
    )


def _check(counted: Contexts, limits: Limits, *calibrations: Calibration) -> None:
    for name, value in msgspec.structs.asdict(limits).items():
        if not isinstance(value, int | None):
            raise TreeError(f"plan: {name}: expected a whole number, got {value!r:.100}")
    if limits.gears < 1:
        raise TreeError(f"plan: expected a limit of 1 or more gears, plain decoding counted, got {limits.gears}")
    if limits.nodes >= MAX_ROWS:
        raise TreeError(
            f"plan: expected at most {MAX_ROWS - 1} nodes, since a tree has at most {MAX_ROWS} rows, got {limits.nodes}"
        )
    # A prior of nothing would say that no draft is ever accepted.
    for calibration, kind in zip(calibrations, ("greedy", "sampled"), strict=False):
        if (total := calibration.contexts.total) and not calibration.part("counted").total:
            of = f" of {kind} text" if len(calibrations) > 1 else ""
            raise TreeError(f"plan: all {total} contexts{of} are held out; calibrate on more text")
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
    """The curve up to `nodes` nodes: nodes that were never visited gain nothing."""
    return tuple(np.pad(curve, (0, nodes + 1 - len(curve)), mode="edge").tolist())


def _by_size(best: Search, limits: Limits) -> list[GearShape]:
    """Plain decoding and the best trees of `limits.nodes` nodes, of half as many and so on, without KV lengths."""
    gears, nodes = [GearShape(1, 0, Topology.plain())], limits.nodes
    while nodes and len(gears) < limits.gears:
        tree = best.tree(nodes)
        gears.append(GearShape(tree.rows, 0, tree))
        nodes = tree.nodes // 2
    return list(dict.fromkeys(gears))


def _choose(counted: Contexts, table: LatencyTable, limits: Limits, occupancy: Occupancy) -> _Chosen:
    lengths, too_long = length_classes(counted, table, limits.nodes)
    by_texts = [candidates(lengths, table, limits, texts) for texts in table.texts]
    # Plain batches come first: they are always included.
    options = [gears[0] for gears in by_texts] + [gear for gears in by_texts for gear in gears[1:]]
    us_GC = token_us(options, lengths, table)
    service = OccupancyCost(occupancy, np.array([length.share for length in lengths]), table.texts)
    times_GC = spread(us_GC, [gear.texts for gear in options], table.texts)
    choice = choose(times_GC, service.weights_C(), limits.gears, always=len(by_texts), cost=service.cost)
    return _Chosen(lengths, too_long, options, us_GC, choice, service)


def spread(us_GL: NDArray[np.float64], texts: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float64]:
    """float64[G, L * B]: each gear's times stand with its own number of texts, infinity with the others."""
    own_GB = np.array(texts)[:, None] == np.array(sizes)
    return np.where(own_GB[:, None, :], us_GL[:, :, None], np.inf).reshape(len(us_GL), -1)


def _named_trees(shapes: Sequence[GearShape], parts: Parts) -> Trees:
    """Every distinct tree."""
    planned: Trees = {}
    for tree in dict.fromkeys(shape.tree for shape in shapes):
        names = {other.name for other in planned.values()}
        planned[tree] = _planned_tree(_name(tree.rows, names) if tree.nodes else "plain", tree, parts)
    return planned


def _planned_tree(name: str, tree: Topology, parts: Parts) -> PlannedTree:
    counted_FT, heldout_FT = (visits(contexts, tree) for contexts in parts)
    return PlannedTree(
        name=name,
        paths=tree.paths,
        promise=_promise(counted_FT, heldout_FT),
        counted_shares=_shares(counted_FT),
        heldout_shares=_shares(heldout_FT) if heldout_FT.any() else None,
    )


def _promise(counted_FT: NDArray[np.float64], heldout_FT: NDArray[np.float64]) -> Promise:
    counted, heldout = (mean_of_folds(gained_FT.sum(1), gained_FT[:, 0]) for gained_FT in (counted_FT, heldout_FT))
    assert counted is not None, "something was counted"
    return Promise(counted=counted, heldout=heldout)


def _shares(visits_FT: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(share), 6) for share in visits_FT.sum(0)[1:] / visits_FT[:, 0].sum())


def _name(rows: int, names: set[str]) -> str:
    name = f"planned-{rows}"
    return next(option for option in (name, *(f"{name}-{i}" for i in range(2, 999))) if option not in names)


def _gears(shapes: Sequence[GearShape], trees: Trees) -> tuple[Gear, ...]:
    """Plain decoding at each KV length, then gears that draft; one gear serves all numbers of texts with its trees."""
    together: dict[tuple[str, int], set[int]] = {}
    every = {shape.texts for shape in shapes}
    for slots in sorted({shape.slots for shape in shapes}):
        together["plain", slots] = set(every)
    for shape in (shape for shape in shapes if shape.rows > 1):
        together.setdefault((trees[shape.tree].name, shape.slots), set()).add(shape.texts)
    return tuple(
        msgspec.structs.replace(gear, texts=tuple(sorted(texts)))
        for gear, texts in zip(named_gears(together), together.values(), strict=True)
    )


def _names(shapes: Sequence[GearShape], gears: Sequence[Gear], trees: Trees) -> list[str]:
    """The name of each shape's gear."""
    names = {(gear.tree, gear.slots): gear.name for gear in gears}
    return [names[trees[shape.tree].name, shape.slots] for shape in shapes]


def _times(gears: Sequence[Gear], trees: Trees, table: LatencyTable) -> Iterable[StepTime]:
    """The step time of each gear, by number of texts and by the length of text that each KV length of the table tells
    of."""
    topologies = {tree.name: topology for topology, tree in trees.items()}
    for gear, texts in itertools.product(gears, table.texts):
        tree = topologies[gear.tree]
        shape = GearShape(tree.rows, gear.slots, tree, texts)
        if shape.rows > max(table.rows(gear.slots, texts)):
            continue
        for slots in (slots for slots in table.slots if slots <= gear.slots):
            length, us = table.length(shape.rows, slots, texts), round(step_us(table, shape, slots), 3)
            yield StepTime(gear=gear.name, length=length, us=us, texts=texts)


def _cost(chosen: _Chosen, names: Sequence[str], heldout: Contexts, table: LatencyTable, limits: Limits) -> Cost:
    """The cost of the chosen gears, whose names are ``names``."""
    service = chosen.service
    # Plain decoding, too, picks the KV length and the launches.
    plain_C = chosen.best_C(g for g, gear in enumerate(chosen.options) if gear.rows == 1)
    served = tuple(_served(chosen, names, plain_C))
    heldout_us, plain_heldout_us = _on_heldout(chosen, served, names, plain_C, heldout, table, limits)
    return Cost(
        us_per_token=chosen.choice.time,
        plain_us_per_token=service.cost(plain_C),
        bound=chosen.choice.bound,
        exact=chosen.choice.exact,
        candidates=len(chosen.options),
        heldout=heldout_us,
        plain_heldout=plain_heldout_us,
        too_long=chosen.too_long,
        source=table.source,
        served=served,
        stairs=_stairs(chosen, table),
        rivals=rivals(chosen.lengths, chosen.options, chosen.us_GC, chosen.choice, service, table, limits),
    )


def _served(chosen: _Chosen, names: Sequence[str], plain_C: NDArray[np.float64]) -> Iterable[Served]:
    service, gears = chosen.service, list(chosen.choice.gears)
    us_GC = spread(chosen.us_GC[gears], [shape.texts for shape in chosen.gears], service.sizes)
    shape = len(chosen.lengths), len(service.sizes)
    us_LB, gear_LB = us_GC.min(0).reshape(shape), us_GC.argmin(0).reshape(shape)
    for texts, share in service.occupancy.shares.items():
        taken_L, plain_L = service.of(texts, us_LB.ravel()), service.of(texts, plain_C)
        for place, length in enumerate(chosen.lengths):
            yield Served(
                texts=texts,
                slots=length.slots,
                share=share * length.share,
                gears=tuple(names[gear_LB[place, b]] for b in service.launches(texts, us_LB[place])),
                us_per_token=float(taken_L[place]),
                plain_us_per_token=float(plain_L[place]),
            )


def _on_heldout(
    chosen: _Chosen,
    served: Sequence[Served],
    names: Sequence[str],
    plain_C: NDArray[np.float64],
    heldout: Contexts,
    table: LatencyTable,
    limits: Limits,
) -> tuple[float | None, float | None]:
    """Mean time per token on held-out contexts: of the planned launches, and of plain decoding."""
    try:
        every, _ = length_classes(heldout, table, limits.nodes)
    except TreeError:  # no held-out context fits
        return None, None
    planned = {length.slots for length in chosen.lengths}
    classes = [length for length in every if length.slots in planned]
    lengths = {length.slots: place for place, length in enumerate(classes)}
    if not lengths:
        return None, None
    shares = np.array([length.share for length in classes]) / sum(length.share for length in classes)
    us_GC = token_us(chosen.gears, classes, table)
    texts = [shape.texts for shape in chosen.gears]
    planned_us, plain_us = 0.0, 0.0
    for texts_served in (part for part in served if part.slots in lengths):
        place = lengths[texts_served.slots]
        share = chosen.service.occupancy.shares[texts_served.texts] * float(shares[place])
        rows = chosen.service.launches(texts_served.texts, _best_B(chosen, texts_served.slots))
        sizes = [chosen.service.sizes[b] for b in rows]
        gears = [
            next(g for g, name in enumerate(names) if (name, texts[g]) == (gear, size))
            for gear, size in zip(texts_served.gears, sizes, strict=True)
        ]
        planned_us += share * sum(float(us_GC[g, place]) for g in gears) / texts_served.texts
        plain_us += share * texts_served.plain_us_per_token
    return planned_us, plain_us


def _best_B(chosen: _Chosen, slots: int) -> NDArray[np.float64]:
    """float64[B] of the chosen gears in one length class."""
    place = [length.slots for length in chosen.lengths].index(slots)
    return chosen.best_C(chosen.choice.gears).reshape(len(chosen.lengths), -1)[place]


def _stairs(chosen: _Chosen, table: LatencyTable) -> tuple[Stair, ...]:
    """For each KV length and row count the gear with the least time per token over all lengths that fit it."""
    tokens_GC = tokens_per_step(chosen.options, chosen.lengths)
    best: dict[tuple[int, int, int], Stair] = {}
    for gear, us_C, tokens_C in zip(chosen.options, chosen.us_GC, tokens_GC, strict=True):
        fits_C = np.isfinite(us_C)
        shares_C = chosen.shares_C * fits_C
        shares_C /= shares_C.sum()
        step = sum(s * step_us(table, gear, c.slots) for s, c in zip(shares_C, chosen.lengths, strict=True) if s)
        stair = Stair(
            texts=gear.texts,
            slots=gear.slots,
            rows=gear.rows,
            us=float(step),
            expected=float(tokens_C @ shares_C),
            us_per_token=float(np.where(fits_C, us_C, 0) @ shares_C),
        )
        key = (gear.texts, gear.slots, gear.rows)
        best[key] = min(best.get(key, stair), stair, key=lambda other: other.us_per_token)
    return tuple(best[key] for key in sorted(best))


def _baselines(nodes: int, parts: Parts, table: LatencyTable | None, limits: Limits) -> Iterable[Baseline]:
    """Trees of other methods, of at most as many nodes as the largest planned one."""
    nodes = nodes or limits.nodes
    counted, heldout = parts
    for name, tree in baselines(counted, nodes, limits.depth, limits.children).items():
        yield Baseline(
            name=name,
            nodes=tree.nodes,
            depth=tree.depth,
            promise=_promise(visits(counted, tree), visits(heldout, tree)),
            us_per_token=_alone(tree, counted, table, limits) if table else None,
        )


def _alone(tree: Topology, counted: Contexts, table: LatencyTable, limits: Limits) -> float | None:
    """Time per token of `tree` on counted contexts, each at the KV length it needs."""
    lengths, _ = length_classes(counted, table, limits.nodes)
    gears = [GearShape(tree.rows, length.slots, tree) for length in lengths]
    try:
        us_GC = token_us(gears, lengths, table)
    except TreeError:  # the table has no step or draft that large
        return None
    return float(us_GC.diagonal() @ [length.share for length in lengths])
