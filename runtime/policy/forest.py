"""All trees of a bundle's gears laid over each other, so that one walk tells something of every one of them.

A node is a rank path below a root. There is a root for each confidence class, whose trees share it, and one for each
budget tree: its shape is the drafter's, so all that is known of a walk is its depth, and it stands here as a chain.

Shape suffixes: S shapes, M nodes, roots counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.trees import Topology

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Levels:
    """A budget tree as far as it is known beforehand: how deep, and how many candidates a node has."""

    depth: int
    width: int


# What a gear drafts: a tree for each confidence class, or a budget tree whatever the confidence.
Shape = tuple[Topology, ...] | Levels


class Forest:
    """Immutable tables. Node 0 to K - 1 are the roots, the others follow level by level.

    ``child[u]`` gives the children of node u by rank, ``own_children[s][u]`` those that shape s has. ``above_MM[v, u]``
    is 1 where u is v or lies on the path to it; ``members_SM[s, v]`` is 1 where shape s has node v, roots left out.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = tuple(shapes)
        self.classes = max((len(shape) for shape in shapes if not isinstance(shape, Levels)), default=1)
        self.budgets = [s for s, shape in enumerate(shapes) if isinstance(shape, Levels)]
        self.roots = self.classes + len(self.budgets)
        self.child: list[dict[int, int]] = [{} for _ in range(self.roots)]
        self.parent, self.root = list(range(self.roots)), list(range(self.roots))
        self.path: list[RankPath] = [()] * self.roots
        owned = [set(self._paths(s)) for s in range(len(shapes))]
        for root, path in sorted(set().union(*owned), key=lambda key: (len(key[1]), key)):
            self._plant(root, path)
        nodes = range(self.roots, len(self.path))
        self.members_SM = np.zeros((len(shapes), len(self.path)))
        self.above_MM = np.eye(len(self.path))
        for node in nodes:
            self.members_SM[[s for s, own in enumerate(owned) if (self.root[node], self.path[node]) in own], node] = 1.0
            self.above_MM[node] += self.above_MM[self.parent[node]]
        self.own_children = [[self._own(s, node) for node in range(len(self.path))] for s in range(len(shapes))]

    def root_of(self, shape: int, confidence_class: int) -> int:
        """The root that a step of a shape starts from."""
        if shape in self.budgets:
            return self.classes + self.budgets.index(shape)
        return confidence_class if self.classes > 1 else 0

    def walk(self, shape: int, root: int, path: RankPath) -> list[int]:
        """The nodes of an accepted path, the root first."""
        nodes = [root]
        for rank in path:
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

    def _own(self, s: int, node: int) -> tuple[int, ...]:
        return tuple(child for child in self.child[node].values() if self.members_SM[s, child])

    def _paths(self, s: int) -> Iterator[tuple[int, RankPath]]:
        """Every node of a shape as its root and rank path."""
        shape = self.shapes[s]
        if isinstance(shape, Levels):
            yield from ((self.root_of(s, 0), (0,) * (depth + 1)) for depth in range(shape.depth))
            return
        for confidence_class, tree in enumerate(shape):
            yield from ((confidence_class, path) for path in tree.paths)
