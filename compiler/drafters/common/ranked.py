"""Drafters that rank levels: the candidates of a level depend on the text alone, not on the nodes above.

One draft graph serves all trees; every level has as many candidates as the widest of them needs.
"""

from __future__ import annotations

from draftwood.compiler.drafters.model import Trees
from draftwood.errors import TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

# The least candidates of a level that a draft step ranks, so that a bundle can be calibrated for wider trees.
LEAST_CANDIDATES = 10


def candidates(trees: Trees, vocabulary: int) -> int:
    """Candidates a level."""
    return min(max(LEAST_CANDIDATES, *(tree.width for _, tree in trees)), vocabulary)


def check_levels(name: str, tree: Topology | Budget, levels: int, what: str, vocabulary: int) -> None:
    """Raises TreeError if a tree is deeper than there are levels, or has a rank past the vocabulary."""
    if tree.depth > levels:
        raise TreeError(
            f"tree {name}: {tree.depth} levels deep, but the drafter has {levels} {what}; choose a shallower tree"
        )
    check_rank(name, tree, vocabulary)


def check_rank(name: str, tree: Topology | Budget, vocabulary: int) -> None:
    """Raises TreeError if a tree has a rank past the vocabulary."""
    if tree.width > vocabulary:
        raise TreeError(f"tree {name}: rank {tree.width - 1} is past the drafter's vocabulary of {vocabulary}")
