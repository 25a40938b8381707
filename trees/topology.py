"""The shape of a draft tree: which row hangs under which, and the candidate rank that names it."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from draftwood.errors import TreeError

# No vocabulary is larger, and tables of int32 hold it.
MAX_RANK = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Topology:
    """An immutable draft tree in canonical order: by depth, then by rank path.

    Row 0 is the root (the pending token) and its own parent, so no index is ever negative. One shape has
    exactly one `Topology`: equal trees compare equal, hash equal and list their rows alike.

    Args:
        parents: the parent row of each row, T entries, ``parents[0] == 0``.
        ranks: the candidate rank of each row among its parent's candidates, T entries, ``ranks[0] == 0``.

    Raises:
        TreeError: the two do not describe such a tree.

    Example:
        >>> Topology.from_paths([(0,), (1,), (0, 0)])
        Topology(parents=(0, 0, 0, 1), ranks=(0, 0, 1, 0))
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_entries(self.parents, "parents")
        _check_entries(self.ranks, "ranks")
        _check_root(self.parents, self.ranks)
        _check_rows(self.parents, self.ranks)

    @property
    def rows(self) -> int:
        """T: the rows of a verify step, the root counted."""
        return len(self.parents)

    @property
    def nodes(self) -> int:
        """M: the draft nodes, the root not counted."""
        return len(self.parents) - 1

    @property
    def depths(self) -> tuple[int, ...]:
        """The depth of each row; the root's is 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """D: the depth of the deepest row, 0 for the plain tree."""
        return self.depths[-1]

    @property
    def width(self) -> int:
        """The candidates a drafter must offer per node: the largest rank + 1, 0 for the plain tree."""
        return max(self.ranks) + 1 if self.nodes else 0

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rank paths of all rows but the root, in row order: ``paths[row - 1]`` names `row`."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths[1:])

    def children(self, row: int) -> tuple[int, ...]:
        """The child rows of `row`, by increasing rank."""
        return tuple(child for child in range(1, self.rows) if self.parents[child] == row)

    @classmethod
    def plain(cls) -> Self:
        """The root alone: plain decoding, T = 1."""
        return cls((0,), (0,))

    @classmethod
    def chain(cls, depth: int) -> Self:
        """`depth` nodes in a line, each of rank 0."""
        _require(depth >= 0, f"chain: depth must be 0 or more, got {depth}")
        return cls((0, *range(depth)), (0,) * (depth + 1))

    @classmethod
    def full(cls, widths: Sequence[int]) -> Self:
        """Every node of depth i has ``widths[i]`` children (SpecInfer's expansion configuration)."""
        parents, ranks, level = [0], [0], [0]
        for width in widths:
            _require(width >= 1, f"full tree: children per level must be 1 or more, got {tuple(widths)}")
            start = len(parents)
            parents += [parent for parent in level for _ in range(width)]
            ranks += list(range(width)) * len(level)
            level = list(range(start, len(parents)))
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def backbone(cls, depth: int, k: int) -> Self:
        """`k` candidates per level, only the best of them expanded (FastEagle, arXiv 2509.20416)."""
        _require(depth >= 0, f"backbone: depth must be 0 or more, got {depth}")
        _require(k >= 1, f"backbone: candidates per level must be 1 or more, got {k}")
        best = [0, *range(1, depth * k, k)][:depth]
        return cls((0, *(row for row in best for _ in range(k))), (0, *list(range(k)) * depth))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> Self:
        """The tree with exactly these nodes, given in any order as rank paths; the root is implied.

        Raises:
            TreeError: a path is empty, listed twice, holds something other than ranks, or lacks its parent.
        """
        rows: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [0], [0]
        for path in sorted(_distinct(paths), key=lambda path: (len(path), path)):
            _require(path[:-1] in rows, f"node {path}: its parent {path[:-1]} is missing; add it to the tree")
            parents.append(rows[path[:-1]])
            ranks.append(path[-1])
            rows[path] = len(rows)
        return cls(tuple(parents), tuple(ranks))


def rank_path(path: Sequence[int]) -> tuple[int, ...]:
    """`path` as a tuple of non-negative Python integers; TreeError if it is anything else."""
    if isinstance(path, (str, bytes)) or not isinstance(path, Iterable):
        raise TreeError(f"node {path!r}: expected a list of ranks such as (0, 2); write one rank as (0,)")
    return tuple(_rank(rank, path) for rank in path)


def _rank(rank: int, path: Sequence[int]) -> int:
    if isinstance(rank, bool) or not hasattr(rank, "__index__") or not 0 <= operator.index(rank) <= MAX_RANK:
        raise TreeError(f"node {path!r}: a rank is an integer from 0, the best, to {MAX_RANK}, got {rank!r}")
    return operator.index(rank)


def _distinct(paths: Iterable[Sequence[int]]) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()
    for path in map(rank_path, paths):
        _require(bool(path), "node (): the root is implied; leave the empty rank path out")
        _require(path not in seen, f"node {path}: listed twice; list every node once")
        seen.add(path)
    return seen


def _check_entries(entries: tuple[int, ...], name: str) -> None:
    # Lists would not hash and numpy integers would not serialise, so both are refused rather than mended.
    if not isinstance(entries, tuple) or not all(type(entry) is int for entry in entries):
        raise TreeError(f"topology {name}: expected a tuple of Python integers, got {entries!r}; use tuple()")


def _check_root(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    _require(
        len(parents) == len(ranks),
        f"topology: expected one rank per parent, got {len(parents)} parents and {len(ranks)} ranks",
    )
    _require(bool(parents), "topology: expected at least the root, got no rows; use Topology.plain()")
    _require(
        parents[0] == 0 and ranks[0] == 0,
        f"topology row 0: the root has parent 0 and rank 0, got parent {parents[0]} and rank {ranks[0]}",
    )


def _check_rows(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    seen: set[tuple[int, int]] = set()
    last = (0, -1)
    for row, here in enumerate(zip(parents[1:], ranks[1:], strict=True), 1):
        parent, rank = here
        where = f"topology row {row}"
        _require(0 <= parent < row, f"{where}: its parent must be an earlier row, 0..{row - 1}, got {parent}")
        _require(0 <= rank <= MAX_RANK, f"{where}: a rank must be 0 or more, at most {MAX_RANK}, got {rank}")
        _require(here not in seen, f"{where}: sibling ranks must differ, got rank {rank} twice under {parent}")
        # Increasing (parent, rank) is the canonical order, without a rank path in hand.
        _require(here > last, f"{where}: rows go by depth, then rank path; build with Topology.from_paths")
        seen.add(here)
        last = here


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TreeError(message)


def branches(rows: int, depth: int) -> bool:
    """Whether a tree of that many rows (the root's counted) and levels has more than one path."""
    return rows > depth + 1
