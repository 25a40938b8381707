"""Candidate gears: each has the least expected time per token for some class of contexts on one machine.

A gear is a KV length and a tree. Its step takes::

    teacher step of T rows at KV length C + draft of the tree's depth and width + host and commit

and gains F tokens, so it costs step / F a token. The cost depends on a tree only by T, its depth and its width.
`search` knows the tree of greatest F for each such triple, so enumerating the triples minimises the ratio exactly.
T is a row count of the latency table: padding up to the next one costs nothing.

Calibration contexts are positions at which steps begin. A class's share of them is taken for its share of tokens,
though there are fewer where steps gain much. Time per token is the mean over classes of cost / F.

Shape suffixes: G candidate gears, C length classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.calibration import LENGTH_STEP, Contexts
from draftwood.trees.latency import LatencyTable
from draftwood.trees.measure import tokens
from draftwood.trees.plan_file import Limits
from draftwood.trees.search import Search, search
from draftwood.trees.topology import Topology


@dataclass(frozen=True, slots=True)
class GearShape:
    """One static shape: T rows at a KV length, with a tree of at most as many rows."""

    rows: int
    slots: int
    tree: Topology
    # In one launch.
    texts: int = 1


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Contexts that fit the KV length `slots` but no smaller one; ``share`` is theirs of all planned contexts."""

    slots: int
    share: float
    contexts: Contexts


def step_us(table: LatencyTable, gear: GearShape, length_slots: int) -> float:
    """Microseconds of a step of `gear`, all its texts together, for contexts of the length class `length_slots`."""
    tree = gear.tree
    draft = 1e6 * table.draft_s(tree.depth, tree.width, gear.texts) if tree.depth else 0.0
    return _without_draft(table, gear.rows, gear.slots, length_slots, gear.texts) + draft


def _without_draft(table: LatencyTable, rows: int, slots: int, length_slots: int, texts: int) -> float:
    # A static graph reads its whole cache. If only the filled part is read, the contexts' length decides.
    read = length_slots if table.kv_read == "filled" else slots
    return 1e6 * (table.step_s(rows, read, texts) + table.host_s(texts))


def length_classes(contexts: Contexts, table: LatencyTable, nodes: int) -> tuple[list[LengthClass], int]:
    """The contexts by the KV length they need, and the number that are too long for the table.

    A context needs a slot for each of its tokens and for each row of the largest tree, and the spare slot. A context
    of unknown length counts as needing the largest KV length.

    Raises:
        TreeError: none fits.
    """
    reserve = min(nodes + 1, max(rows for slots in table.slots for rows in table.rows(slots))) + 1
    tokens_N = contexts.steps_N.astype(np.int64) * LENGTH_STEP
    room = np.array(table.slots) - reserve
    tokens_N[contexts.steps_N == 0] = max(int(room[-1]), 1)
    place_N = np.searchsorted(room, tokens_N)
    fitting = int(contexts.counts_N[place_N < len(room)].sum())
    if not fitting:
        raise TreeError(
            f"plan: no context fits the latency table: it goes up to KV length {table.slots[-1]} and a tree takes"
            f" {reserve} slots of it; profile with a larger --kv"
        )
    classes = []
    for place, slots in enumerate(table.slots):
        part = contexts.where(place_N == place)
        if part.total:
            classes.append(LengthClass(slots, part.total / fitting, part))
    return classes, contexts.total - fitting


def candidates(lengths: Sequence[LengthClass], table: LatencyTable, limits: Limits, texts: int = 1) -> list[GearShape]:
    """Gears for launches of ``texts`` texts; plain decoding at the largest KV length comes first.

    For each KV length there is plain decoding. For each row count there is the tree of least time per token: for each
    length class, and for all contexts up to each class.
    """
    largest = lengths[-1].slots
    gears = [GearShape(1, largest, Topology.plain(), texts)]
    drafts = _drafts(table, lengths, limits, texts)
    for part in [*lengths, *(_together(lengths[: i + 1]) for i in range(1, len(lengths)))]:
        searches = {
            width: search(part.contexts, limits.nodes, limits.depth, width) for width in {width for _, width in drafts}
        }
        for slots in (slots for slots in table.slots if part.slots <= slots <= largest):
            gears.append(GearShape(1, slots, Topology.plain(), texts))
            for fewer, rows in pairwise((0, *table.rows(slots, texts))):
                if rows > 1 and fewer <= limits.nodes:
                    gears += _best_gear(part, searches, drafts, (fewer, rows), slots, table, texts)
    return list(dict.fromkeys(gears))


def _best_gear(
    part: LengthClass,
    searches: dict[int, Search],
    drafts: dict[tuple[int, int], float],
    stair: tuple[int, int],
    slots: int,
    table: LatencyTable,
    texts: int,
) -> Iterator[GearShape]:
    """The tree of least cost / F for `part` among those of more rows than the lower end of a stair and at most its
    upper one, by enumerating depth and width. A smaller tree has a graph of its own rows, which may take longer."""
    fewer, rows = stair
    fixed = _without_draft(table, rows, slots, part.slots, texts)

    def per_token(shape: tuple[int, int]) -> float:
        depth, width = shape
        tokens_M = searches[width].curve(depth)[:rows]
        # Without a node worth having there is nothing to draft, and plain decoding has its own gear.
        return (fixed + drafts[shape]) / float(tokens_M[-1]) if len(tokens_M) > max(fewer, 1) else math.inf

    depth, width = min(drafts, key=per_token, default=(0, 0))
    if depth and per_token((depth, width)) < math.inf:
        yield GearShape(rows, slots, searches[width].tree(rows - 1, depth), texts)


def _drafts(
    table: LatencyTable, lengths: Sequence[LengthClass], limits: Limits, texts: int
) -> dict[tuple[int, int], float]:
    """Microseconds of a draft by depth and width, of the depths and widths worth looking at."""
    deepest = min(max(length.contexts.depth for length in lengths), limits.depth or 255)
    widest = min(max(length.contexts.width for length in lengths), limits.children or 255)
    us_of_shape: dict[tuple[int, int], float] = {}
    refused: TreeError | None = None
    for depth in range(1, deepest + 1):
        for width in range(1, widest + 1):
            try:
                us_of_shape[depth, width] = 1e6 * table.draft_s(depth, width, texts)
            except TreeError as error:
                refused = error
    if refused and not us_of_shape:
        raise refused
    # A wider tree at the same price in every depth is at least as good.
    widths = {width for _, width in us_of_shape}
    same = {
        width
        for width in widths
        if all(
            (d, width + 1) in us_of_shape and us_of_shape[d, width + 1] == us_of_shape[d, w]
            for d, w in us_of_shape
            if w == width
        )
    }
    return {shape: us for shape, us in us_of_shape.items() if shape[1] not in same}


def _together(lengths: Sequence[LengthClass]) -> LengthClass:
    """Several length classes as one."""
    columns = (
        np.concatenate([getattr(length.contexts, name) for length in lengths]) for name in Contexts.__dataclass_fields__
    )
    return LengthClass(lengths[-1].slots, 1.0, Contexts(*columns))


def tokens_per_step(gears: Sequence[GearShape], lengths: Sequence[LengthClass]) -> NDArray[np.float64]:
    """float64[G, C]: the expected accept length of each gear in each length class, bonus counted."""
    trees = [gear.tree for gear in gears]
    return np.stack([tokens(length.contexts, trees) / length.contexts.total for length in lengths], 1)


def token_us(gears: Sequence[GearShape], lengths: Sequence[LengthClass], table: LatencyTable) -> NDArray[np.float64]:
    """float64[G, C]: microseconds of a launch per token of each text; infinite if the KV length is too small."""
    tokens_GC = tokens_per_step(gears, lengths)
    us_GC = [[step_us(table, gear, c.slots) if gear.slots >= c.slots else math.inf for c in lengths] for gear in gears]
    return np.array(us_GC) / tokens_GC
