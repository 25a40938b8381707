"""Classes of contexts by the drafter's confidence at the root, each with its own tree.

All trees of a gear have equally many rows, so one verify graph serves every class. A device computes the index of the
tree from its own probabilities, with no round trip to the host.

Shape suffix: N distinct contexts.
"""

import itertools

import numpy as np

from draftwood.errors import TreeError
from draftwood.trees.calibration import BINS, UNKNOWN_BIN, Contexts
from draftwood.trees.search import search

# Bins are first joined into this many groups of about equal weight; classes begin where a group does.
_GROUPS = 8


def split(contexts: Contexts, bounds: tuple[int, ...]) -> tuple[Contexts, ...]:
    """The contexts of each class; class i has the confidence bins from ``bounds[i - 1]`` to below ``bounds[i]``.

    Without bounds there is one class, and a context need not have a confidence.
    """
    if not bounds:
        return (contexts,)
    classes_N = np.searchsorted(np.array(bounds), contexts.bins_N, side="right")
    known_N = contexts.bins_N != UNKNOWN_BIN
    return tuple(contexts.where(known_N & (classes_N == i)) for i in range(len(bounds) + 1))


def best_bounds(
    contexts: Contexts, classes: int, nodes: int, max_depth: int | None = None, max_children: int | None = None
) -> tuple[int, ...]:
    """The bounds that split the confidence bins into `classes` classes with the greatest expected accept length.

    The length is averaged over trees of 1 to `nodes` nodes. Dynamic programming makes it exact among eight boundaries.

    Raises:
        TreeError: more classes than contexts can fill, or contexts without a confidence.
    """
    if classes == 1:
        return ()
    if (contexts.bins_N == UNKNOWN_BIN).any():
        raise TreeError("plan: --classes needs the confidence of every context; calibrate with it, or ask for 1 class")
    edges = _edges(contexts)
    if not 1 <= classes < len(edges):
        raise TreeError(
            f"plan: expected 1 to {len(edges) - 1} classes, as these contexts differ in confidence; got {classes}"
        )
    gains = {
        (low, high): _gain(contexts, low, high, nodes, max_depth, max_children)
        for low, high in itertools.combinations(edges, 2)
    }
    # best[high] = (gain, bounds) of the bins below `high` in as many classes as rounds have passed.
    best: dict[int, tuple[float, tuple[int, ...]]] = {high: (gains[edges[0], high], ()) for high in edges[1:]}
    for _ in range(classes - 1):
        best = {
            high: max((best[middle][0] + gains[middle, high], (*best[middle][1], middle)) for middle in below)
            for high in edges
            if (below := [middle for middle in edges if middle < high and middle in best])
        }
    return best[edges[-1]][1]


def _edges(contexts: Contexts) -> list[int]:
    """Bins at which a group begins, and `BINS`; no group is empty."""
    weight = np.bincount(contexts.bins_N, contexts.counts_N, BINS)
    below = np.cumsum(weight) - weight
    groups = np.floor(below / max(contexts.total, 1) * _GROUPS)
    first = [int(np.flatnonzero((groups >= group) & (weight > 0))[0]) for group in np.unique(groups[weight > 0])]
    return [0, *first[1:], BINS]


def _gain(
    contexts: Contexts, low: int, high: int, nodes: int, max_depth: int | None, max_children: int | None
) -> float:
    """Tokens of all contexts in the bins, the mean over tree sizes, with the best trees of their own."""
    chosen = contexts.where((contexts.bins_N >= low) & (contexts.bins_N < high))
    curve = search(chosen, nodes, max_depth, max_children).curve()
    sizes = np.minimum(np.arange(1, nodes + 1), len(curve) - 1)
    return chosen.total * float(curve[sizes].mean())
