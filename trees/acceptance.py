"""Which drafted rows the teacher confirms: at every node it draws one token, and a child may carry it.

That is exact sampling on a deterministic tree: trying the children one by one with residuals and drawing one
token up front are the same law. Greedy decoding is the case in which the draw is the argmax.

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
        rows: the accepted rows from the root on, the root counted; ``len(rows)`` tokens are gained, for the
            root was pending and the bonus now is.
        bonus: the teacher's token at the last of them, the next root.
        path: the rank path of the last of them, empty if no draft was accepted.
    """

    rows: tuple[int, ...]
    bonus: int
    path: tuple[int, ...]


def walk(tree: TreeBuffers, tokens_T: NDArray[np.int64], draw: Callable[[int, int], int]) -> Accepted:
    """Follow the teacher's tokens down the tree; the reference that `accept` is tested against.

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
    parents, tokens, valid = tree.parents.tolist(), tokens_T.tolist(), tree.valid.tolist()
    rows = [0]
    while True:
        at = rows[-1]
        token = draw(at, len(rows) - 1)
        below = (row for row in range(at + 1, len(parents)) if parents[row] == at and valid[row])
        child = next((row for row in below if tokens[row] == token), None)
        if child is None:
            return Accepted(tuple(rows), int(token), tuple(int(tree.ranks[row]) for row in rows[1:]))
        rows.append(child)


def accept(
    buffers: TreeBuffers, tokens_T: NDArray[np.int64], drawn_T: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int, int]:
    """The same in index arithmetic that has no loop and no negative index, so that a graph can hold it.

    Args:
        tokens_T: int64[T], the drafted token of each row; any id in a padded row.
        drawn_T: int64[T], the teacher's one token at each row.

    Returns:
        The accepted path, int64[D + 1], its last row repeated; its length, the root not counted, so that
        ``path[: length + 1]`` are the accepted rows; and the bonus token.
    """
    best = int(best_row(buffers, np.asarray(tokens_T), np.asarray(drawn_T)))
    return buffers.paths[best], int(buffers.depths[best]), int(drawn_T[best])


def best_row(buffers: TreeBuffers, tokens_T: NDArray[np.int64], drawn_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last accepted row, int64[...], for tokens and draws int64[..., T] with any axes in front."""
    missed_T = 1 - _matches(buffers, tokens_T, drawn_T).astype(np.int64)
    # Accepted is what has no miss between the root and itself: a sum, since NPU graphs have no cumprod.
    reached_T = missed_T @ buffers.mask.T.astype(np.int64) == 0
    # The reached rows form one path, so the deepest is unique.
    return np.argmax(reached_T * (buffers.depths + 1), axis=-1)


def _matches(buffers: TreeBuffers, tokens_T: NDArray[np.int64], drawn_T: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[..., T]: the row carries the token drawn at its parent; the root always matches."""
    carries_T = buffers.valid & (tokens_T == drawn_T[..., buffers.parents])
    # Of siblings that carry it the first alone counts, as in `walk`; the root is no sibling of its children.
    elder_TT = np.tri(buffers.rows, k=-1, dtype=np.int64) * (buffers.parents[:, None] == buffers.parents)
    elder_TT[:, 0] = 0
    first_T = carries_T.astype(np.int64) @ elder_TT.T == 0
    return (carries_T & first_T) | (np.arange(buffers.rows) == 0)
