"""What every shape would gain on the next step of a text, from the rank paths of the steps before.

Two things are learned of a text. Its *class* is filtered: each walk multiplies the classes' weights by how likely
they made it, and a fixed share is given back, so that no class is ever ruled out. And its own *counts* at every node
that a walk came to: hits and times asked, fading with age, beside the mixture's expectation as so many counts more.
Counts are right in the end and slow, classes quick and coarse: whichever foretold the last walks better is believed.
A question that a walk did not ask, since it ended before or the drafter had no candidate there, counts for nothing:
not for a hit and not for a miss. `docs/policy.md` derives it and states its bias.

Shape suffixes: C text classes, N nodes, S shapes, X factors.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from draftwood.runtime.policy.prior import Tables

# Counts of a step fade to 1/e in so many steps.
MEMORY = 100
FADING = 1 - 1 / MEMORY
# How likely a text is thought to change at a step, and from which probability on its counts are given up.
CHANGE = 0.02
STALE = 0.8
# Nodes one level deeper are seen less often; the mixture's expectation counts there for so much more.
DEEPER_STRENGTH = 0.5
# Share of the weight that is given back to the classes as they were at first, every step.
SHARE = 0.03
# The same of a step that shows nothing: a text that was left as a bad one is mostly believed to be one still.
IDLE_SHARE = 0.005


class Estimate:
    """The state of one text.

    Example of use: ``estimate.begin(length)``, then ``tokens()`` before every step and
    ``walked(shape, root, path, rank=None)`` behind it.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables, forest = tables, tables.forest
        self._first_C = tables.weights_C
        self.weights = list(self._first_C)
        self._confidence = list(tables.confidence)
        # Probability that the text has changed since its counts were made.
        self._stale = 0.0
        nodes, roots = forest.nodes, forest.roots
        self._roots = roots
        # Hits, and questions asked, of every node; as worth of evidence for a yes, and in all, the mixture's beside it.
        self._counts_2N, self._evidence_2N = np.zeros((2, nodes)), np.empty((2, nodes))
        self._hits_N, self._asked_N = self._counts_2N
        deeper_N = np.array(forest.depth[roots:], np.float64) - 1
        self._strength_N = tables.strength * (1 + DEEPER_STRENGTH * deeper_N)
        self._prior_2N = np.stack((self._strength_N, self._strength_N))
        # Mixture of (reach, asked), of which a node's ratio is the expected answer to its question.
        self._mixed_CM = np.concatenate((tables.reach_CM[:, roots:], tables.asked_CN), 1)
        self._mixed_M = np.empty(2 * nodes)
        self._factor = np.ones(2 * nodes + roots)
        self._log_X, self._reach_N = np.empty(len(forest.factors_X)), np.empty(nodes)
        self._tokens_S = np.empty(len(forest.shapes))
        self._known: list[float] | None = None

    def begin(self, length: int) -> None:
        """The text begins behind so many tokens."""
        self._first_C = self.tables.weights_at(length)
        self.weights, self._known = list(self._first_C), None

    def tokens(self) -> list[float]:
        """Expected accept length of every shape, bonus counted."""
        if self._known is None:
            self._reaches()
            np.dot(self.tables.forest.members_SN, self._reach_N, out=self._tokens_S)
            self._known = [1 + gained for gained in self._tokens_S.tolist()]
        return self._known

    def idle(self) -> None:
        """A step without a draft: nothing is learned, and what is known fades."""
        self._fade()
        rest = 1 - IDLE_SHARE
        self.weights = [rest * w + IDLE_SHARE * p for w, p in zip(self.weights, self._first_C, strict=True)]
        self._known = None

    def walked(self, shape: int, root: int, path: tuple[int, ...], rank: int | None = None) -> None:
        """A step of a shape from a root went down ``path``.

        ``rank`` is that of the next token where the drafter's list is known; None where it is only known to be no
        child that the shape has.
        """
        forest, tables = self.tables.forest, self.tables
        nodes = forest.walk(shape, root, path)
        end = nodes[-1]
        foretold = self._foretold(shape, root, end, rank) if self._known is not None else 0.0
        self._fade()
        if rank is None:
            likely = tables.outside_SM[shape][end] or tables.reached_M[end]
            self._count(nodes)
            self._count_outside(shape, end)
        elif (next_node := forest.child[end].get(rank)) is not None:
            likely = tables.reached_M[next_node]
            self._count([*nodes, next_node])
        else:
            likely = tables.beyond_M[end]
            self._count(nodes)
            self._ask(forest.child[end].values())
        self._filter(likely, foretold)
        self._see(root)
        self._known = None

    def _fade(self) -> None:
        self._counts_2N *= FADING

    def _foretold(self, shape: int, root: int, end: int, rank: int | None) -> float:
        """Probability of a walk's end, the root given, as it was before the walk."""
        reach_N, roots, forest = self._reach_N, self._roots, self.tables.forest
        if rank is not None and rank in forest.child[end]:
            return float(reach_N[forest.child[end][rank] - roots]) / self._confidence[root]
        missed = forest.own_children[shape][end][0] if rank is None else forest.child[end].values()
        reached = self._confidence[root] if end < roots else float(reach_N[end - roots])
        return (reached - sum([float(reach_N[node - roots]) for node in missed])) / self._confidence[root]

    def _filter(self, likely: list[float], foretold: float) -> None:
        """Bayes' rule for the class, and a fixed share back (Herbster and Warmuth, 1998); for the counts alike."""
        seen = [w * p for w, p in zip(self.weights, likely, strict=True)]
        total = sum(seen)
        if foretold > 0:
            stale = self._stale + CHANGE * (1 - self._stale)
            self._stale = stale * total / (stale * total + (1 - stale) * foretold)
            if self._stale > STALE:
                self._counts_2N *= 1 - self._stale
                self._stale = 0.0
        scale = (1 - SHARE) / total
        self.weights = [scale * w + SHARE * p for w, p in zip(seen, self._first_C, strict=True)]

    def _see(self, root: int) -> None:
        """The share of steps in each confidence class, one estimate among so many others."""
        classes = self.tables.forest.classes
        if classes > 1 and root < classes:
            for k in range(classes):
                self._confidence[k] += ((k == root) - self._confidence[k]) / MEMORY

    def _count(self, nodes: list[int]) -> None:
        """Hits on the way down, and misses of the elder siblings of each."""
        child, roots, asked_N = self.tables.forest.child, self._roots, self._asked_N
        parent = nodes[0]
        for node in nodes[1:]:
            for sibling in child[parent].values():
                asked_N[sibling - roots] += 1
                if sibling == node:
                    break
            self._hits_N[node - roots] += 1
            parent = node

    def _ask(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._asked_N[node - self._roots] += 1

    def _count_outside(self, shape: int, end: int) -> None:
        """Misses of the shape's children; those of other trees were not asked."""
        own, first = self.tables.forest.own_children[shape][end]
        if first:
            self._ask(own)
        else:
            self._split(end, frozenset(own))

    def _split(self, end: int, missed: frozenset[int]) -> None:
        """Misses where an elder sibling may have been hit: in such parts as are likely (the E step of EM)."""
        self._reaches()
        forest, roots = self.tables.forest, self._roots
        children = list(forest.child[end].values())
        at_end = self._confidence[end] if end < roots else float(self._reach_N[end - roots])
        within = {node: float(self._reach_N[node - roots]) / at_end for node in children}
        none = 1 - sum(within[node] for node in missed)
        asked, last = 1.0, max(children.index(node) for node in missed)
        for node in children[: last + 1]:
            self._asked_N[node - roots] += asked
            if node not in missed:
                share = within[node] / none
                self._hits_N[node - roots] += share
                asked -= share

    def _reaches(self) -> None:
        """Probability of reaching each node, that of its confidence class included."""
        nodes, factor, forest = len(self._reach_N), self._factor, self.tables.forest
        mixed_M, evidence_2N, yes_N = self._mixed_M, self._evidence_2N, factor[:nodes]
        np.dot(self.weights, self._mixed_CM, out=mixed_M)
        np.divide(mixed_M[:nodes], mixed_M[nodes:], out=yes_N)
        np.multiply(yes_N, self._strength_N, out=self._prior_2N[0])
        np.multiply(self._counts_2N, 1 - self._stale, out=evidence_2N)
        np.add(evidence_2N, self._prior_2N, out=evidence_2N)
        np.divide(evidence_2N[0], evidence_2N[1], out=yes_N)
        np.subtract(1.0, yes_N, out=factor[nodes : 2 * nodes])
        if len(self._confidence) > 1:
            factor[2 * nodes :] = self._confidence
        np.log(factor, out=factor)
        np.take(factor, forest.factors_X, out=self._log_X, mode="clip")  # the mode that needs no second buffer
        np.add.reduceat(self._log_X, forest.starts_N, out=self._reach_N)
        np.exp(self._reach_N, out=self._reach_N)
        factor[2 * nodes :] = 1.0
