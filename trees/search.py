"""The best tree of every size at once: nodes in the order in which they deserve a place.

The expected accept length of a tree is 1 + the sum over its nodes of P(node), the probability that the truth
passes through the node. P never grows along a path. The n nodes with the largest P therefore form a tree, the best
one of n nodes, and the trees of all sizes are nested. With a cap on depth or on ranks the same holds among the
allowed nodes.

P is the frequency in the contexts, as it was counted.

Shape suffixes: N distinct contexts, D depth, K ranks, I nodes found (the root is node 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.calibration import Contexts
from draftwood.trees.topology import Topology


@dataclass(frozen=True, slots=True)
class Search:
    """Nodes worth having, and for each cap on depth the order to take them in.

    Args:
        parents_I: int64[I], the parent of each node; node 0 is the root and its own parent.
        ranks_I: int64[I].
        shares_I: float64[I], P of each node; 1 at the root.
        orders: for caps 0, 1, ..., D the nodes of the best tree, best first, the root not listed. Ties go to
            the shallower node, then to the smaller rank path.
    """

    parents_I: NDArray[np.int64]
    ranks_I: NDArray[np.int64]
    shares_I: NDArray[np.float64]
    orders: tuple[NDArray[np.int64], ...]

    @property
    def depth(self) -> int:
        """The deepest cap that was searched."""
        return len(self.orders) - 1

    def tree(self, nodes: int, depth: int | None = None) -> Topology:
        """The best tree of `nodes` nodes no deeper than `depth`; smaller if no more nodes have P > 0."""
        return Topology.from_paths(self.paths(nodes, depth))

    def paths(self, nodes: int, depth: int | None = None) -> list[tuple[int, ...]]:
        """Its rank paths, best first."""
        path_of_node: dict[int, tuple[int, ...]] = {0: ()}
        for node in self._order(depth)[:nodes].tolist():
            # Best first: the parent comes before its children.
            path_of_node[node] = (*path_of_node[int(self.parents_I[node])], int(self.ranks_I[node]))
        return list(path_of_node.values())[1:]

    def curve(self, depth: int | None = None) -> NDArray[np.float64]:
        """float64[n + 1]: the expected accept length of the best tree of 0, 1, ..., n nodes, bonus counted."""
        return np.cumsum(np.concatenate([[1.0], self.shares_I[self._order(depth)]]))

    def _order(self, depth: int | None) -> NDArray[np.int64]:
        return self.orders[self.depth if depth is None else min(depth, self.depth)]


def search(
    contexts: Contexts,
    nodes: int,
    max_depth: int | None = None,
    max_children: int | None = None,
) -> Search:
    """The best trees of up to `nodes` draft nodes, exact for these contexts.

    The search goes level by level, below the best `nodes` nodes so far only. A node outside them has no descendant
    among them. A level takes O(N).

    Args:
        max_depth: the greatest depth allowed.
        max_children: ranks below this are used.

    Raises:
        TreeError: no contexts, or a limit below 1.
    """
    depth, width = limits(contexts, nodes, max_depth, max_children)
    total = float(contexts.total)
    parents_I, ranks_I = np.zeros(1, np.int64), np.zeros(1, np.int64)
    # In contexts until the very end: bare counts are whole numbers, and ties stay ties.
    values_I = np.array([total])
    orders = [np.zeros(0, np.int64)]
    level, rows, at = np.zeros(1, np.int64), np.arange(len(contexts.counts_N)), np.zeros(len(contexts.counts_N), int)
    for ranks_N in contexts.ranks_ND.T[:depth]:
        ranks = ranks_N[rows]
        rows, slot = rows[ranks < width], (at * width + ranks)[ranks < width]
        values = np.bincount(slot, contexts.counts_N[rows], len(level) * width)
        new = np.flatnonzero(values)  # by parent, then rank: the canonical order of a level
        begin = len(values_I)
        parents_I, ranks_I = np.append(parents_I, level[new // width]), np.append(ranks_I, new % width)
        values_I = np.append(values_I, values[new])
        known = np.append(np.sort(orders[-1]), np.arange(begin, len(values_I)))
        orders.append(known[np.argsort(-values_I[known], kind="stable")][:nodes])
        level = np.sort(orders[-1][orders[-1] >= begin])
        index = np.full(len(values), -1)
        index[new[level - begin]] = np.arange(len(level))
        at = index[slot]
        rows, at = rows[at >= 0], at[at >= 0]
    return Search(parents_I, ranks_I, values_I / total, tuple(orders))


def level_marginals(contexts: Contexts, depth: int, width: int) -> NDArray[np.float64]:
    """float64[depth, width]: the share of each rank among the contexts that reached the level."""
    marginals_DK = np.zeros((depth, width))
    alive_N = np.ones(len(contexts.counts_N), bool)
    for level in range(min(depth, contexts.depth)):
        reached = contexts.counts_N[alive_N].sum()
        alive_N &= contexts.ranks_ND[:, level] < width
        counts_K = np.bincount(contexts.ranks_ND[alive_N, level], contexts.counts_N[alive_N], width)
        marginals_DK[level] = counts_K / max(reached, 1)
    return marginals_DK


def limits(contexts: Contexts, nodes: int, max_depth: int | None, max_children: int | None) -> tuple[int, int]:
    """Depth and ranks that a search goes through; TreeError if there are no contexts or a limit is below 1."""
    for name, limit in (("nodes", nodes), ("depth", max_depth), ("children", max_children)):
        if limit is not None and limit < 1:
            raise TreeError(f"plan: expected a limit of 1 or more {name}, got {limit}")
    if not contexts.total:
        raise TreeError("plan: no contexts have been counted; calibrate on some text first")
    return (
        contexts.depth if max_depth is None else min(max_depth, contexts.depth),
        contexts.width if max_children is None else min(max_children, contexts.width),
    )
