"""Invariants of tree buffers, checked from scratch: this module shares no code with `tensorize`.

Shape suffixes: T rows of the tree, L = D + 1 places on a path from the root.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from draftwood.errors import TreeError
from draftwood.trees.tensorize import TreeBuffers

NAMES = (
    "shape",
    "dtype",
    "index-range",
    "parent-order",
    "acyclic",
    "depth-step",
    "mask-row",
    "sibling-ranks",
    "path-consistent",
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: its name, the row it was found at, and what was expected and got there."""

    name: str
    row: int
    message: str


def violations(buffers: TreeBuffers) -> list[Violation]:
    """Every broken invariant of `buffers`, in a fixed order; empty if they are sound. `NAMES` lists the invariants.
    Wrong shapes or dtypes hide the rest. So does an index out of range: later checks would index through it."""
    for stage in (_layout, _index_range):
        broken = list(stage(buffers))
        if broken:
            return broken
    checks = (_parent_order, _acyclic, _depth_step, _mask_row, _sibling_ranks, _paths)
    return [violation for check in checks for violation in check(buffers)]


def is_tree(buffers: TreeBuffers) -> bool:
    """Whether parents, depths, mask and paths are those of one tree: `violations` of a drafted tree, in microseconds.

    Each row is compared with its parent's, so a property of all of them holds up to the root.
    """
    parents_T, depths_T, paths_TL = buffers.parents, buffers.depths, buffers.paths
    rows_T, places_L = np.arange(len(parents_T)), np.arange(paths_TL.shape[1])
    if parents_T[0] != 0 or depths_T[0] != 0 or (parents_T[1:] < 0).any() or (parents_T[1:] >= rows_T[1:]).any():
        return False
    above_TT = buffers.mask[parents_T] | np.eye(len(rows_T), dtype=np.bool_)
    above_TT[0] = rows_T == 0
    held_TL = np.where(places_L < depths_T[:, None], paths_TL[parents_T], rows_T[:, None])
    deeper = (depths_T[1:] == depths_T[parents_T[1:]] + 1).all() and depths_T.max() < len(places_L)
    return bool(deeper and (buffers.mask == above_TT).all() and (paths_TL == held_TL).all())


def require(buffers: TreeBuffers, where: str) -> None:
    """Do nothing if `buffers` are sound.

    Raises:
        TreeError: they are not; the message gives `where`, the first violation and how many more there are.
    """
    broken = violations(buffers)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        first = broken[0]
        raise TreeError(f"{where}: {first.name} at row {first.row}: {first.message}{more}; rebuild the tree")


def _layout(buffers: TreeBuffers) -> Iterator[Violation]:
    rows = max(np.size(buffers.parents), 1)
    places = max(np.size(buffers.paths) // rows, 1)
    shapes = {"parents": (rows,), "ranks": (rows,), "depths": (rows,), "mask": (rows, rows)}
    shapes |= {"paths": (rows, places)}
    for name, shape in shapes.items():
        array = getattr(buffers, name)
        dtype = np.bool_ if name == "mask" else np.int64
        if array.shape != shape:
            yield Violation("shape", 0, f"{name}: expected shape {shape}, got {array.shape}")
        if array.dtype != dtype:
            yield Violation("dtype", 0, f"{name}: expected dtype {np.dtype(dtype)}, got {array.dtype}")


def _index_range(buffers: TreeBuffers) -> Iterator[Violation]:
    rows, places = buffers.paths.shape
    # A rank indexes a drafter's candidates, whose number is not known here.
    limits = {"parents": rows, "ranks": None, "depths": places, "paths": rows}
    for name, limit in limits.items():
        array = getattr(buffers, name)
        bad = array < 0 if limit is None else (array < 0) | (array >= limit)
        for place in np.argwhere(bad):
            bound = "0 or more" if limit is None else f"0..{limit - 1}"
            yield Violation("index-range", int(place[0]), f"{name}: expected {bound}, got {array[tuple(place)]}")


def _parent_order(buffers: TreeBuffers) -> Iterator[Violation]:
    if buffers.parents[0] != 0:
        yield Violation("parent-order", 0, f"expected the root's parent 0, got {buffers.parents[0]}")
    for row in range(1, buffers.rows):
        if buffers.parents[row] >= row:
            got = buffers.parents[row]
            yield Violation("parent-order", row, f"expected a parent before the row, got parent {got}")


def _acyclic(buffers: TreeBuffers) -> Iterator[Violation]:
    for row in range(buffers.rows):
        if _climb(buffers, row) is None:
            got = buffers.parents[row]
            yield Violation("acyclic", row, f"expected a way up to the root, got a cycle from parent {got}")


def _depth_step(buffers: TreeBuffers) -> Iterator[Violation]:
    for row in range(buffers.rows):
        expected = 0 if row == 0 else buffers.depths[buffers.parents[row]] + 1
        if buffers.depths[row] != expected:
            yield Violation("depth-step", row, f"expected depth {expected}, got {buffers.depths[row]}")


def _mask_row(buffers: TreeBuffers) -> Iterator[Violation]:
    for row in range(buffers.rows):
        trail = _climb(buffers, row)
        seen = np.flatnonzero(buffers.mask[row]).tolist()
        if trail is not None and seen != sorted(trail):
            yield Violation("mask-row", row, f"expected it to see rows {sorted(trail)}, got {seen}")


def _sibling_ranks(buffers: TreeBuffers) -> Iterator[Violation]:
    first: dict[tuple[int, int], int] = {}
    for row in range(1, buffers.rows):
        key = (int(buffers.parents[row]), int(buffers.ranks[row]))
        if first.setdefault(key, row) != row:
            message = f"expected a rank of its own under row {key[0]}, got rank {key[1]} of row {first[key]}"
            yield Violation("sibling-ranks", row, message)


def _paths(buffers: TreeBuffers) -> Iterator[Violation]:
    for row in range(buffers.rows):
        expected, got = _stretched(buffers, row), buffers.paths[row].tolist()
        if expected is not None and got != expected:
            yield Violation("path-consistent", row, f"expected path {expected}, got {got}")


def _climb(buffers: TreeBuffers, row: int) -> list[int] | None:
    """The rows from the root down to `row`, by following parents; None if they never reach the root."""
    trail = [row]
    while trail[-1] != 0:
        if len(trail) > buffers.rows:
            return None
        trail.append(int(buffers.parents[trail[-1]]))
    return trail[::-1]


def _stretched(buffers: TreeBuffers, row: int) -> list[int] | None:
    """The path to `row`, padded to the tables' length; if the tables are too short it is longer and equals none."""
    trail = _climb(buffers, row)
    return None if trail is None else trail + [row] * (buffers.paths.shape[1] - len(trail))
