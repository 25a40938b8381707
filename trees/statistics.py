"""Counts of the rank paths that the teacher's text took through a drafter's candidates.

Every context (a position in the teacher's text) yields one path: at each level the rank of the true token among the
candidates. The path ends when the true token is not among them. A node of a draft tree is accepted exactly in the
contexts whose path passes through it. So the expected accept length of a tree is a sum of counts over its nodes. The
best tree of M nodes is the M most visited nodes of the trie.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from draftwood.errors import TreeError
from draftwood.trees.topology import Topology, rank_path


class RankPaths:
    """How often each rank path was taken, one path per context.

    Example:
        >>> counts = RankPaths()
        >>> counts.add((0, 1), 3)
        >>> counts.add(())
        >>> counts.contexts, counts.visits((0,)), counts.expected_accept_length(Topology.chain(1))
        (4, 3, 1.75)
    """

    def __init__(self) -> None:
        self._ends: Counter[tuple[int, ...]] = Counter()
        self._trie: Counter[tuple[int, ...]] | None = None

    def __eq__(self, other: object) -> bool:
        return self._ends == other._ends if isinstance(other, RankPaths) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def contexts(self) -> int:
        """The contexts counted, those with an empty path among them."""
        return self._ends.total()

    def add(self, path: Sequence[int], count: int = 1) -> None:
        """Count `count` (1 or more) contexts that took `path`; it may be empty."""
        if count < 1:
            raise TreeError(f"rank path {path!r}: expected a count of 1 or more, got {count}")
        self._ends[rank_path(path)] += count
        self._trie = None

    def items(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Each path that a context ended on, and how many did, sorted by path."""
        yield from sorted(self._ends.items())

    def visits(self, path: Sequence[int]) -> int:
        """The contexts whose path passes through the node `path`; all of them for the root ``()``."""
        return self._visits()[tuple(path)]

    def expected_accept_length(self, topology: Topology) -> float:
        """Tokens gained per verify step with `topology` on these contexts, the bonus token counted.

        Raises:
            TreeError: nothing has been counted.
        """
        self._require_contexts()
        visits = self._visits()
        return 1 + sum(visits[path] for path in topology.paths) / self.contexts

    def best_tree(self, nodes: int, max_depth: int | None = None, max_children: int | None = None) -> Topology:
        """The tree of `nodes` draft nodes with the greatest expected accept length: exact.

        Ties go to the shallower node, then to the smaller rank path. A parent is visited at least as often as its
        child, so every result is a tree and contains all smaller ones. The tree has fewer nodes if fewer were visited.

        Args:
            max_depth: the greatest depth allowed.
            max_children: the candidates that the drafter offers per node: ranks below this are used. (A cap on the
                number of children of any rank would be neither nested nor a matter of sorting.)

        Raises:
            TreeError: nothing has been counted, or a limit is negative.
        """
        self._require_contexts()
        for name, limit in (("nodes", nodes), ("max_depth", max_depth), ("max_children", max_children)):
            if limit is not None and limit < 0:
                raise TreeError(f"best tree: expected {name} of 0 or more, got {limit}")
        allowed = (
            (path, count)
            for path, count in self._visits().items()
            if path
            and (max_depth is None or len(path) <= max_depth)
            and (max_children is None or max(path) < max_children)
        )
        ordered = sorted(allowed, key=lambda item: (-item[1], len(item[0]), item[0]))
        return Topology.from_paths(path for path, _ in ordered[:nodes])

    def _visits(self) -> Counter[tuple[int, ...]]:
        if self._trie is None:
            trie: Counter[tuple[int, ...]] = Counter()
            for path, count in self._ends.items():
                for depth in range(len(path) + 1):
                    trie[path[:depth]] += count
            self._trie = trie
        return self._trie

    def _require_contexts(self) -> None:
        if not self.contexts:
            raise TreeError("rank paths: no contexts have been counted; calibrate on some text first")
