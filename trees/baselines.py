"""Trees by the methods that were published, so that a plan can be compared with them on the same contexts.

Each is written from its description, and sees only what its method sees: a marginal table, or a vector of positional
acceptance, of calibration contexts. The budget tree of EAGLE-2 and EAGLE-3 has another shape at every step; it is
measured in a run, not computed here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from draftwood.trees.calibration import Contexts
from draftwood.trees.measure import tokens
from draftwood.trees.search import level_marginals
from draftwood.trees.topology import Topology


def baselines(
    contexts: Contexts, nodes: int, max_depth: int | None = None, max_children: int | None = None
) -> dict[str, Topology]:
    """A tree of at most `nodes` nodes by each method, made from `contexts`.

    If a method leaves a choice (depth, children), the one that gains most on `contexts` is taken.
    """
    depth = contexts.depth if max_depth is None else min(max_depth, contexts.depth)
    width = contexts.width if max_children is None else min(max_children, contexts.width)
    if not depth or not width:
        return {}
    backbones = (Topology.backbone(d, min(width, nodes // d)) for d in range(1, min(depth, nodes) + 1))
    return {
        "medusa-greedy": medusa_greedy(level_marginals(contexts, depth, width), nodes),
        "sequoia": sequoia(positional_acceptance(contexts, depth, width), nodes, depth),
        "backbone": _best(contexts, backbones),
        "chain": Topology.chain(min(nodes, depth)),
        "uniform": _best(contexts, _uniform(nodes, depth, width)),
    }


def medusa_greedy(marginals_DK: NDArray[np.float64], nodes: int) -> Topology:
    """Medusa's search (arXiv 2401.10774, section 2.3.3): the best neighbour, over and over.

    A path is worth the product of its marginals; a neighbour is a chosen node's first child or next sibling.
    Ties go as in `search`. The marginals are those of a level's truth among contexts that reached the level.
    """
    depth, width = marginals_DK.shape
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-float(marginals_DK[0, 0]), 1, (0,))]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < nodes:
        value, level, path = heapq.heappop(heap)
        chosen.append(path)
        if level < depth:
            heapq.heappush(heap, (value * float(marginals_DK[level, 0]), level + 1, (*path, 0)))
        rank = path[-1]
        if rank + 1 < width:
            parent = _product(marginals_DK, path[:-1])
            sibling = (-parent * float(marginals_DK[level - 1, rank + 1]), level, (*path[:-1], rank + 1))
            heapq.heappush(heap, sibling)
    return Topology.from_paths(chosen)


def _product(marginals_DK: NDArray[np.float64], path: tuple[int, ...]) -> float:
    return float(np.prod([marginals_DK[level, rank] for level, rank in enumerate(path)]))


def positional_acceptance(contexts: Contexts, depth: int, width: int) -> NDArray[np.float64]:
    """float64[width]: how often a node's truth is its b-th candidate, over all nodes and levels."""
    taken_K, reached = np.zeros(width), 0
    alive_N = np.ones(len(contexts.counts_N), bool)
    for level in range(min(depth, contexts.depth)):
        reached += int(contexts.counts_N[alive_N].sum())
        alive_N &= contexts.ranks_ND[:, level] < width
        taken_K += np.bincount(contexts.ranks_ND[alive_N, level], contexts.counts_N[alive_N], width)
    return taken_K / max(reached, 1)


def sequoia(acceptance_K: NDArray[np.float64], nodes: int, depth: int) -> Topology:
    """Sequoia's dynamic programme (arXiv 2402.12374, section 3.1) on positional acceptance.

    best[l][m] is the most tokens that a tree of at most m rows and l levels below its root can gain. The b-th child
    takes y of the rows, its own included::

        with_b[l][m] = max over y of with_(b-1)[l][m - y] + acceptance[b] * best[l - 1][y]
    """
    rows = nodes + 1
    best_LM = np.ones((depth + 1, rows + 1))  # the root alone
    rows_of_child: dict[tuple[int, int], NDArray[np.int64]] = {}  # rows of child b, by level and b
    children_LM = np.zeros((depth + 1, rows + 1), np.int64)
    for level in range(1, depth + 1):
        with_M = best_LM[level].copy()
        for b, acceptance in enumerate(acceptance_K):
            # sums_MY[m, y]: m - y rows for the children before b, y rows for child b.
            m, y = np.arange(rows + 1)[:, None], np.arange(rows + 1)
            sums_MY = np.where(m > y, with_M[np.maximum(m - y, 0)], -np.inf) + acceptance * best_LM[level - 1]
            sums_MY[:, 0] = -np.inf
            rows_of_child[level, b] = sums_MY.argmax(1)
            with_M = sums_MY.max(1)
            children_LM[level][with_M > best_LM[level]] = b + 1
            best_LM[level] = np.maximum(best_LM[level], with_M)
    size = int(best_LM[depth].argmax())
    return Topology.from_paths(_unfold((), depth, size, children_LM, rows_of_child))


def _unfold(
    path: tuple[int, ...],
    level: int,
    size: int,
    children_LM: NDArray[np.int64],
    rows_of_child: dict[tuple[int, int], NDArray[np.int64]],
) -> list[tuple[int, ...]]:
    """The nodes below `path` when it has `level` levels and, itself counted, `size` rows."""
    paths: list[tuple[int, ...]] = []
    for b in reversed(range(int(children_LM[level, size]))):
        below = int(rows_of_child[level, b][size])
        paths += [(*path, b), *_unfold((*path, b), level - 1, below, children_LM, rows_of_child)]
        size -= below
    return paths


def _uniform(nodes: int, depth: int, width: int) -> Iterable[Topology]:
    """Full trees of k children everywhere, k = 1, 2, ..., each as deep as `nodes` allows."""
    for k in range(1, min(width, nodes) + 1):
        levels = max(d for d in range(1, depth + 1) if d == 1 or sum(k**i for i in range(1, d + 1)) <= nodes)
        yield Topology.full((k,) * levels)


def _best(contexts: Contexts, trees: Iterable[Topology]) -> Topology:
    options = list(trees)
    return options[int(tokens(contexts, options).argmax())]
