"""All trees of a bundle's gears laid over each other, so that one walk tells something of every one of them.

A node is a rank path below a root. There is a root for each confidence class, whose trees share it, and one for each
budget tree: its shape is the drafter's, so all that is known of a walk is its depth, and it stands here as a chain.
Trees that are looked up in the text share a root for each class of matches, which is known before a step is chosen.

Shape suffixes: S shapes, M nodes, roots counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.speculation.lookup import LOOKED_UP, MATCH_CLASSES
from draftwood.trees import Topology

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Levels:
    """A budget tree as far as it is known beforehand: how deep, and how many candidates a node has."""

    depth: int
    width: int


@dataclass(frozen=True, slots=True)
class Matched:
    """A tree whose tokens are looked up in the text."""

    tree: Topology


# What a gear drafts: a tree for each confidence class, or a budget tree whatever the confidence, or one looked up.
Shape = tuple[Topology, ...] | Levels | Matched


class Forest:
    """Immutable tables. Node 0 to K - 1 are the roots, the others follow level by level.

    ``child[u]`` gives the children of node u by rank, ``own_children[s][u]`` those that shape s has. ``above_MM[v, u]``
    is 1 where u is v or lies on the path to it; ``members_KSM[k, s, v]`` is 1 where shape s has node v behind a match
    of class k, roots left out: the same for all k but in shapes that are looked up.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = tuple(shapes)
        self.classes = max((len(shape) for shape in shapes if isinstance(shape, tuple)), default=1)
        self.budgets = [s for s, shape in enumerate(shapes) if isinstance(shape, Levels)]
        self.matched = [s for s, shape in enumerate(shapes) if isinstance(shape, Matched)]
        # The first root of a match, of `MATCH_CLASSES`.
        self.matches = self.classes + len(self.budgets)
        self.roots = self.matches + (MATCH_CLASSES if self.matched else 0)
        self.child: list[dict[int, int]] = [{} for _ in range(self.roots)]
        self.parent, self.root = list(range(self.roots)), list(range(self.roots))
        self.path: list[RankPath] = [()] * self.roots
        owned = [set(self._paths(s)) for s in range(len(shapes))]
        for root, path in sorted(set().union(*owned), key=lambda key: (len(key[1]), key)):
            self._plant(root, path)
        nodes = range(self.roots, len(self.path))
        members_SM = np.zeros((len(shapes), len(self.path)))
        self.above_MM = np.eye(len(self.path))
        for node in nodes:
            members_SM[[s for s, own in enumerate(owned) if (self.root[node], self.path[node]) in own], node] = 1.0
            self.above_MM[node] += self.above_MM[self.parent[node]]
        match_M = np.array(self.root) - self.matches
        self.members_KSM = np.stack([members_SM * ((match_M < 0) | (match_M == k)) for k in range(MATCH_CLASSES)])
        self.own_children = [[self._own(own_M, node) for node in range(len(self.path))] for own_M in members_SM]

    def root_of(self, shape: int, confidence_class: int, match: int = 0) -> int:
        """The root that a step of a shape starts from."""
        if shape in self.matched:
            return self.matches + match
        if shape in self.budgets:
            return self.classes + self.budgets.index(shape)
        return confidence_class if self.classes > 1 else 0

    def walk(self, shape: int, root: int, path: RankPath) -> list[int]:
        """The nodes of an accepted path, the root first, as far as it is the drafter's own."""
        nodes = [root]
        for rank in takewhile(lambda rank: rank != LOOKED_UP, path):
            nodes.append(self.child[nodes[-1]][0 if shape in self.budgets else rank])
        return nodes

    def _plant(self, root: int, path: RankPath) -> None:
        parent = root
        for rank in path[:-1]:
            parent = self.child[parent][rank]
        self.child[parent][path[-1]] = len(self.path)
        self.parent.append(parent)
        self.root.append(root)
        self.path.append(path)
        self.child.append({})

    def _own(self, members_M: NDArray[np.float64], node: int) -> tuple[int, ...]:
        return tuple(child for child in self.child[node].values() if members_M[child])

    def _paths(self, s: int) -> Iterator[tuple[int, RankPath]]:
        """Every node of a shape as its root and rank path."""
        shape = self.shapes[s]
        if isinstance(shape, Levels):
            yield from ((self.root_of(s, 0), (0,) * (depth + 1)) for depth in range(shape.depth))
            return
        if isinstance(shape, Matched):
            yield from ((self.root_of(s, 0, match), p) for match in range(MATCH_CLASSES) for p in shape.tree.paths)
            return
        for confidence_class, tree in enumerate(shape):
            yield from ((confidence_class, path) for path in tree.paths)
