"""Rivals of a plan at the same costs: plain batches, chains by batch size, and the plan for one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.candidates import GearShape, LengthClass, token_us
from draftwood.trees.choice import Choice, choose
from draftwood.trees.latency import LatencyTable
from draftwood.trees.occupancy import OccupancyCost
from draftwood.trees.plan_file import Limits, Rivals
from draftwood.trees.topology import Topology


def rivals(
    lengths: Sequence[LengthClass],
    options: Sequence[GearShape],
    us_GL: NDArray[np.float64],
    choice: Choice,
    service: OccupancyCost,
    table: LatencyTable,
    limits: Limits,
) -> tuple[Rivals, ...]:
    """The rivals for every number of texts of the occupancy.

    All pick launches as the plan does; chains have no limit on gears.

    Args:
        options: the candidate gears; ``us_GL`` is a launch's time per token of each text; ``choice`` is the plan's.
    """

    def best(gears: Callable[[int, GearShape], bool]) -> NDArray[np.float64]:
        us_LB = np.full((len(lengths), len(service.sizes)), np.inf)
        for number, gear in enumerate(options):
            if gears(number, gear):
                place = service.sizes.index(gear.texts)
                us_LB[:, place] = np.minimum(us_LB[:, place], us_GL[number])
        return us_LB

    plain_LB = best(lambda _, gear: gear.rows == 1)
    chosen = set(choice.gears)
    planned_LB = best(lambda number, _: number in chosen)
    chains_LB = np.minimum(plain_LB, _chains(lengths, service, table, limits))
    single_LB = np.minimum(plain_LB, _single(lengths, options, us_GL, service, table, limits))
    by_texts = []
    for texts, share in service.occupancy.shares.items():
        us = [
            float(service.of(texts, us_LB.ravel()) @ service.shares_L)
            for us_LB in (planned_LB, plain_LB, chains_LB, single_LB)
        ]
        by_texts.append(
            Rivals(
                texts=texts,
                share=share,
                us_per_token=us[0],
                plain_us_per_token=us[1],
                chains_us_per_token=us[2],
                single_us_per_token=us[3],
            )
        )
    return tuple(by_texts)


def _chains(
    lengths: Sequence[LengthClass], service: OccupancyCost, table: LatencyTable, limits: Limits
) -> NDArray[np.float64]:
    """float64[L, B] of the best chain for each length class and number of texts."""
    deepest = min(limits.depth or limits.nodes, limits.nodes, max(length.contexts.depth for length in lengths))
    return _repeated(lengths, [Topology.chain(depth) for depth in range(1, deepest + 1)], service, table)


def _single(
    lengths: Sequence[LengthClass],
    options: Sequence[GearShape],
    us_GL: NDArray[np.float64],
    service: OccupancyCost,
    table: LatencyTable,
    limits: Limits,
) -> NDArray[np.float64]:
    """float64[L, B] of the trees that are planned for one text alone, or for the fewest that the table has."""
    alone = [g for g, gear in enumerate(options) if gear.texts == service.sizes[0]]
    choice = choose(us_GL[alone], service.shares_L, limits.gears)
    trees = [options[alone[g]].tree for g in choice.gears if options[alone[g]].rows > 1]
    return _repeated(lengths, trees, service, table)


def _repeated(
    lengths: Sequence[LengthClass], trees: Sequence[Topology], service: OccupancyCost, table: LatencyTable
) -> NDArray[np.float64]:
    """float64[L, B] of the best of some trees, for every number of texts, at the KV length that each class needs."""
    us_LB = np.full((len(lengths), len(service.sizes)), np.inf)
    for place, texts in enumerate(service.sizes):
        for tree in trees:
            gears = [GearShape(tree.rows, length.slots, tree, texts) for length in lengths]
            try:
                us_L = token_us(gears, lengths, table).diagonal()
            except TreeError:  # the table has no step or draft that large
                continue
            us_LB[:, place] = np.minimum(us_LB[:, place], us_L)
    return us_LB
