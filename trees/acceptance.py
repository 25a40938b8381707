"""Which drafted rows the teacher confirms: at every node it draws one token, and a child may carry it.

That is exact sampling on a deterministic tree. Trying the children one by one with residuals, and drawing one token up
front, give the same distribution. Greedy decoding is the case in which the draw is the argmax.

Shape suffixes: T rows of the tree, L = D + 1 places on a path from the root.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import TreeError
from draftwood.trees.tensorize import TreeBuffers


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


def walk(tree: TreeBuffers, tokens_T: NDArray[np.int64], draw: Callable[[int, int], int]) -> Accepted:
    """Follow the teacher's tokens down the tree. Graphs give the same result (`compiler/steps/accept.py`).

    Args:
        tree: a tree by its buffers, as planned or as a drafter chose it.
        tokens_T: int64[T], a token a row; the root's is not looked at. Of siblings with equal tokens the first in
            row order is taken.
        draw: gives the teacher's one token at a row of some depth; called once for each accepted row and no other.

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
        below = (row for row in range(at + 1, len(parents)) if parents[row] == at)
        child = next((row for row in below if tokens[row] == token), None)
        if child is None:
            return Accepted(tuple(rows), int(token), tuple(int(tree.ranks[row]) for row in rows[1:]))
        rows.append(child)
