"""Which drafted rows the teacher confirms: at every node it draws one token, and a child may carry it.

That is exact sampling on a deterministic tree. Trying the children one by one with residuals, and drawing one token up
front, give the same distribution. Greedy decoding is the case in which the draw is the argmax.

Shape suffixes: T rows of the tree, L = D + 1 places on a path from the root.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.tensorize import TreeBuffers

# What a row loses in `WalkTables` for each row on which it depends and that is not as it must be: more than any depth.
LAPSE = 1 << 10
# Trees whose tables are remembered: those of a bundle's gears.
_REMEMBERED = 64


class WalkTables(NamedTuple):
    """A tree for graphs, which walk it without steps.

    ``right`` is 1 for the rows that carry the teacher's token at their parent. A row is reached if all rows of its
    path are right, and none of their older siblings. The last reached row is the first of the greatest ``start +
    demands @ right``, and its path is its row of ``paths``.

    Args:
        demands_TT: float32[T, T], how much a right column takes from a row's loss or adds to it.
        start_T: float32[T], a row's depth without the loss of a path on which no row is right.
        paths_TP: int64[T, P], as the tree's, its last row repeated.
    """

    demands_TT: NDArray[np.float32]
    start_T: NDArray[np.float32]
    paths_TP: NDArray[np.int64]


@lru_cache(_REMEMBERED)
def walk_tables(tree: TreeBuffers, rows: int, places: int) -> WalkTables:
    """The tables of a tree for a graph of so many rows and places of a path. Padded rows are never reached."""
    order_T = np.arange(tree.rows)
    older_TT = (tree.parents[:, None] == tree.parents) & (order_T < order_T[:, None]) & (order_T > 0)
    needed_TT = (tree.mask & (order_T > 0)).astype(np.float32)
    demands_TT, start_T = np.zeros((rows, rows), np.float32), np.full(rows, -LAPSE, np.float32)
    demands_TT[: tree.rows, : tree.rows] = LAPSE * (needed_TT - needed_TT @ older_TT)
    start_T[: tree.rows] = tree.depths - LAPSE * needed_TT.sum(1)
    paths_TP = np.zeros((rows, places), np.int64)
    paths_TP[: tree.rows] = tree.paths[:, np.minimum(np.arange(places), tree.depth)]
    return WalkTables(demands_TT, start_T, paths_TP)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of one verify step.

    Args:
        rows: the accepted rows, root first. ``len(rows)`` tokens are gained: the root was pending, the bonus is now.
        bonus: the teacher's token at the last accepted row, the next root.
        path: the rank path of the last accepted row, empty if no draft was accepted.
    """

    rows: tuple[int, ...]
    bonus: int
    path: tuple[int, ...]


def walk(tree: TreeBuffers, tokens_T: NDArray[np.int64], draw: Callable[[int, int], int | None]) -> Accepted:
    """Follow the teacher's tokens down the tree. Graphs give the same result (`compiler/steps/accept.py`).

    Args:
        tree: a tree by its buffers, as planned or as a drafter chose it.
        tokens_T: int64[T], a token a row; the root's is not looked at. Of siblings with equal tokens the first in
            row order is taken.
        draw: gives the teacher's one token at a row of some depth; called once for each accepted row and no other. If
            it gives None below the root, the row is not accepted, and its token is the bonus.

    Raises:
        TreeError: `tokens_T` has not one entry per row.

    Example:
        >>> from draftwood.trees import Topology, tensorize
        >>> walk(tensorize(Topology.chain(2)), np.array([7, 8, 9]), lambda row, depth: [8, 5][row])
        Accepted(rows=(0, 1), bonus=5, path=(0,))
    """
    if len(tokens_T) != tree.rows:
        raise TreeError(f"walk: expected {tree.rows} tokens, one per row of the tree, got {len(tokens_T)}")
    parents, tokens = tree.parents.tolist(), tokens_T.tolist()
    rows = [0]
    while True:
        at = rows[-1]
        token = draw(at, len(rows) - 1)
        if token is None:
            return _accepted(tree, rows[:-1], tokens[at])
        below = (row for row in range(at + 1, len(parents)) if parents[row] == at)
        child = next((row for row in below if tokens[row] == token), None)
        if child is None:
            return _accepted(tree, rows, int(token))
        rows.append(child)


def _accepted(tree: TreeBuffers, rows: Sequence[int], bonus: int) -> Accepted:
    return Accepted(tuple(rows), bonus, tuple(int(tree.ranks[row]) for row in rows[1:]))
