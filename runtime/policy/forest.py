"""All trees of a bundle's gears laid over each other, so that one walk tells something of every one of them.

A node is a rank path below a root. There is a root for each confidence class, whose trees share it, and one for each
budget tree: its shape is the drafter's, so all that is known of a walk is its depth, and it stands here as a chain.

What a walk can show at a node is a row of yes-or-no questions, one for each child in turn: given that it is none of
the elder ones, is it this one? The order puts first what most trees have, so that trees that contain each other ask
the same first questions.

Shape suffixes: S shapes, N nodes, roots not counted; X entries of all nodes' factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """Immutable tables. Node 0 to K - 1 are the roots, the others follow parents first.

    ``child[u]`` gives the children of node u by rank, in the order of the questions; ``drafted[s]`` the nodes of shape
    s; ``own_children[s][u]`` those of u, and whether they are the first that are asked for. The probability of reaching
    a node is the product of what ``factors_X`` points to from ``starts_N[v]`` on: column v for yes to its question,
    N + v for no, 2 N + k for being below root k.
    """

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = tuple(shapes)
        self.classes = max((len(shape) for shape in shapes if not isinstance(shape, Levels)), default=1)
        self._own_roots = {s: root for root, s in enumerate(_budgets(shapes), self.classes)}
        self.roots = self.classes + len(self._own_roots)
        self.child: list[dict[int, int]] = [{} for _ in range(self.roots)]
        self.parent = list(range(self.roots))
        self.rank = [0] * self.roots
        self.depth = [0] * self.roots
        self.root = list(range(self.roots))
        self._plant()
        self.nodes = len(self.parent) - self.roots
        self.drafted = [frozenset(self._nodes_of(s)) for s in range(len(shapes))]
        self.members_SN = np.zeros((len(shapes), self.nodes))
        for s, nodes in enumerate(self.drafted):
            self.members_SN[s, [node - self.roots for node in nodes]] = 1.0
        self.own_children = [[self._own(s, node) for node in range(len(self.parent))] for s in range(len(shapes))]
        self.factors_X, self.starts_N = self._factors()

    def root_of(self, shape: int, confidence_class: int) -> int:
        """The root that a step of a shape starts from."""
        return self._own_roots.get(shape, confidence_class if self.classes > 1 else 0)

    def walk(self, shape: int, root: int, path: RankPath) -> list[int]:
        """The nodes of an accepted path, the root first."""
        nodes, own = [root], shape in self._own_roots
        for rank in path:
            nodes.append(self.child[nodes[-1]][0 if own else rank])
        return nodes

    def path(self, node: int) -> RankPath:
        """The ranks from the root to a node."""
        return (*self.path(self.parent[node]), self.rank[node]) if node >= self.roots else ()

    def _plant(self) -> None:
        """Makes the nodes, level by level."""
        wanted: Counter[tuple[int, RankPath]] = Counter()
        for s, shape in enumerate(self.shapes):
            wanted.update(_paths(shape, self._own_roots.get(s)))
        at: dict[tuple[int, RankPath], int] = {(root, ()): root for root in range(self.roots)}
        by_level = sorted(wanted, key=lambda key: (len(key[1]), key[0], key[1][:-1], -wanted[key], key[1][-1]))
        for root, path in by_level:
            parent, node = at[root, path[:-1]], len(self.parent)
            at[root, path] = self.child[parent][path[-1]] = node
            self.parent.append(parent)
            self.rank.append(path[-1])
            self.depth.append(len(path))
            self.root.append(root)
            self.child.append({})

    def _nodes_of(self, s: int) -> Iterator[int]:
        for root, path in _paths(self.shapes[s], self._own_roots.get(s)):
            yield self.walk(s, root, path)[-1]

    def _own(self, s: int, node: int) -> tuple[tuple[int, ...], bool]:
        every = tuple(self.child[node].values())
        own = tuple(child for child in every if child in self.drafted[s])
        return own, own == every[: len(own)]

    def _factors(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which questions lead to each node, and how they are answered."""
        found: list[list[int]] = [[2 * self.nodes + root] for root in range(self.roots)]
        for node in range(self.roots, len(self.parent)):
            siblings = list(self.child[self.parent[node]].values())
            elders = siblings[: siblings.index(node)]
            no = [self.nodes + elder - self.roots for elder in elders]
            found.append([*found[self.parent[node]], *no, node - self.roots])
        rows = found[self.roots :]
        starts = np.cumsum([0, *map(len, rows)])[:-1]
        return np.array([entry for row in rows for entry in row], np.int64), starts.astype(np.int64)


def _budgets(shapes: Sequence[Shape]) -> list[int]:
    return [s for s, shape in enumerate(shapes) if isinstance(shape, Levels)]


def _paths(shape: Shape, root: int | None) -> Iterator[tuple[int, RankPath]]:
    """Every node of a shape as its root and rank path."""
    if isinstance(shape, Levels):
        assert root is not None
        yield from ((root, (0,) * (depth + 1)) for depth in range(shape.depth))
        return
    for confidence_class, tree in enumerate(shape):
        yield from ((confidence_class, path) for path in tree.paths)
