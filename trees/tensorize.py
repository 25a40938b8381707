"""A topology as index tables of fixed shape, in which every index is valid.

Shape suffixes: T rows of the tree, L = D + 1 places on a path from the root.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftwood.trees.topology import Topology

A = TypeVar("A", bound=np.ndarray)


@dataclass(frozen=True, slots=True, eq=False)
class TreeBuffers:
    """The buffers of a tensorized topology; read-only arrays, no entry negative.

    Args:
        parents: int64[T], the parent row; the root is its own.
        ranks: int64[T], the candidate rank; 0 for the root.
        depths: int64[T], the position of a row as an offset from the root's.
        mask: bool[T, T], ``mask[v, u]`` is True where row v SEES row u: its ancestors and itself.
        paths: int64[T, D + 1], ``paths[v, j]`` is the row at depth j on the path from the root to v; v itself from
            v's depth on.
    """

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    depths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    paths: NDArray[np.int64]

    @property
    def rows(self) -> int:
        """T: the rows, the root counted."""
        return self.parents.shape[0]

    @property
    def depth(self) -> int:
        """D: the depth the tables have room for."""
        return self.paths.shape[1] - 1


def tensorize(topology: Topology) -> TreeBuffers:
    """The buffers of `topology`.

    Example:
        >>> tensorize(Topology.from_paths([(0,), (1,), (0, 0)])).paths.tolist()
        [[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3]]
    """
    rows, depths = topology.rows, topology.depths
    paths_TL = np.zeros((rows, topology.depth + 1), np.int64)
    for row in range(1, rows):
        paths_TL[row] = paths_TL[topology.parents[row]]
        paths_TL[row, depths[row] :] = row
    mask_TT = np.zeros((rows, rows), np.bool_)
    mask_TT[np.arange(rows)[:, None], paths_TL] = True
    return TreeBuffers(
        parents=_frozen(np.array(topology.parents, np.int64)),
        ranks=_frozen(np.array(topology.ranks, np.int64)),
        depths=_frozen(np.array(depths, np.int64)),
        mask=_frozen(mask_TT),
        paths=_frozen(paths_TL),
    )


def tree_tokens(buffers: TreeBuffers, root: int, candidates_IK: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """int64[T], the token of every row: the root's, and for a node the candidate of its rank at its level.

    Args:
        candidates_IK: the drafter's tokens by level and rank; None for a tree that is its root alone.
    """
    tokens_T = np.full(buffers.rows, root, np.int64)
    if candidates_IK is not None:
        tokens_T[1:] = candidates_IK[buffers.depths[1:] - 1, buffers.ranks[1:]]
    return tokens_T


def _frozen(array: A) -> A:
    array.setflags(write=False)
    return array
