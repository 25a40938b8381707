"""A topology as index tables of fixed shape, in which every index is valid.

Shape suffixes: T rows of the (padded) tree, L = D + 1 places on a path from the root.

A padded row is a leaf that hangs under the root: parent 0, rank 0, depth 1, `valid` False. With depth 1 it
obeys the rules of a real row (depth = parent's depth + 1; it sees the root and itself; its path is root,
itself), so no table needs an exception. With depth 0 it would be a second root.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.topology import Topology

A = TypeVar("A", bound=np.ndarray)


@dataclass(frozen=True, slots=True, eq=False)
class TreeBuffers:
    """The buffers of a tensorized topology; read-only arrays, no entry negative.

    Args:
        parents: int64[T], the parent row; the root is its own.
        ranks: int64[T], the candidate rank; 0 for the root and for padded rows.
        depths: int64[T], the position of a row as an offset from the root's.
        valid: bool[T], False for padded rows. This, not a sentinel, decides.
        mask: bool[T, T], ``mask[v, u]`` is True where row v SEES row u: its ancestors and itself.
        ancestors: int64[D + 1, T], ``ancestors[j, v]`` is the row at depth j on the path to v; v itself
            from v's depth on.
        paths: int64[T, D + 1], the rows from the root to v, the last one repeated: `ancestors` by rows.
    """

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    depths: NDArray[np.int64]
    valid: NDArray[np.bool_]
    mask: NDArray[np.bool_]
    ancestors: NDArray[np.int64]
    paths: NDArray[np.int64]

    @property
    def rows(self) -> int:
        """T: the rows, padding counted."""
        return self.parents.shape[0]

    @property
    def depth(self) -> int:
        """D: the depth the tables have room for."""
        return self.paths.shape[1] - 1


def tensorize(topology: Topology, rows: int | None = None, depth: int | None = None) -> TreeBuffers:
    """The buffers of `topology`, padded to a budget of `rows` and to `depth`.

    Args:
        rows: T of the result; the topology's own where None.
        depth: D of the result; the topology's own where None (1 for a padded plain tree, since a padded row
            has depth 1).

    Raises:
        TreeError: the budget or the depth is smaller than the tree.

    Example:
        >>> tensorize(Topology.from_paths([(0,), (1,), (0, 0)])).paths.tolist()
        [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3]]
    """
    rows_T = _row_budget(topology, rows)
    depth_D = _depth_budget(topology, rows_T, depth)
    paths_TL = path_table(topology, rows_T, depth_D)
    return TreeBuffers(
        parents=_frozen(_padded(topology.parents, rows_T, 0)),
        ranks=_frozen(_padded(topology.ranks, rows_T, 0)),
        depths=_frozen(_padded(topology.depths, rows_T, 1)),
        valid=_frozen(np.arange(rows_T) < topology.rows),
        mask=_frozen(mask_table(paths_TL)),
        ancestors=_frozen(ancestor_table(paths_TL)),
        paths=_frozen(paths_TL),
    )


def path_table(topology: Topology, rows: int, depth: int) -> NDArray[np.int64]:
    """int64[T, D + 1]: each row's path from the root, its last row repeated to the full length."""
    paths_TL = np.zeros((rows, depth + 1), np.int64)
    depths = topology.depths
    for row in range(1, topology.rows):
        paths_TL[row] = paths_TL[topology.parents[row]]
        paths_TL[row, depths[row] :] = row
    paths_TL[topology.rows :, 1:] = np.arange(topology.rows, rows)[:, None]
    return paths_TL


def ancestor_table(paths_TL: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[D + 1, T]: the row at each depth on the path to each row."""
    return np.ascontiguousarray(paths_TL.T)


def mask_table(paths_TL: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[T, T]: True where the row sees the column, that is, where the column is on the row's path."""
    rows = paths_TL.shape[0]
    mask_TT = np.zeros((rows, rows), np.bool_)
    mask_TT[np.arange(rows)[:, None], paths_TL] = True
    return mask_TT


def tree_tokens(buffers: TreeBuffers, root: int, candidates_IK: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """int64[T], the token of every row: the root's, and for a node the candidate of its rank at its level.

    Args:
        candidates_IK: the drafter's tokens by level and rank; None for a tree that is its root alone.
    """
    tokens_T = np.full(buffers.rows, root, np.int64)
    if candidates_IK is not None:
        tokens_T[1:] = candidates_IK[buffers.depths[1:] - 1, buffers.ranks[1:]]
    return tokens_T


def _row_budget(topology: Topology, rows: int | None) -> int:
    if rows is None:
        return topology.rows
    if rows < topology.rows:
        raise TreeError(f"tensorize: the tree has {topology.rows} rows, got a budget of {rows}; raise it")
    return rows


def _depth_budget(topology: Topology, rows: int, depth: int | None) -> int:
    # Only the plain tree is shallower than a padded row.
    needed = max(topology.depth, int(rows > topology.rows))
    if depth is None:
        return needed
    if depth < needed:
        raise TreeError(f"tensorize: {rows} rows of this tree need depth {needed}, got {depth}; raise it")
    return depth


def _padded(entries: tuple[int, ...], rows: int, padding: int) -> NDArray[np.int64]:
    return np.array(entries + (padding,) * (rows - len(entries)), np.int64)


def _frozen(array: A) -> A:
    array.setflags(write=False)
    return array
