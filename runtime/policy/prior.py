"""What is believed of a text before its first step: kinds of text, each with tables over the nodes of a forest.

Where a plan was built, its counts say it. Trees that were given by hand come without any: then a text has an
accuracy, the probability that the drafter's best candidate is the teacher's token, and the next candidates take their
share of what is left, alike at every level. Drafters grow worse with depth, so this is too hopeful of deep trees;
hope is put right by the first walks, where a doubt would keep them from ever being tried.

Shape suffixes: C text classes, N nodes of the forest (roots not counted), M all nodes, S shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftwood.planned import Prior, TextClass
from draftwood.runtime.policy.forest import Forest, Levels

# Accuracy of the weak prior's classes. Sampled text is less predictable; the weights are of no measurement.
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.96)
WEAK_WEIGHTS = {True: (0.1, 0.2, 0.25, 0.2, 0.15, 0.1), False: (0.25, 0.35, 0.2, 0.1, 0.06, 0.04)}
# As how many questions the mixture's expectation counts at a root, of a plan's counts and of the weak prior.
STRENGTH, WEAK_STRENGTH = 8.0, 3.0
# A later candidate's share of what is left, relative to the first's of all.
LATER = 0.35
# No table says never or always, so that any walk is possible for every class.
LEAST = 2e-3


@dataclass(frozen=True, eq=False)
class Tables:
    """Immutable tables of one sampling class over a forest.

    Args:
        weights_C: of the text classes, where nothing is known of a text's length.
        lengths: weights of the classes in texts that begin behind so many tokens and more, ascending.
        strength: how many observed answers outweigh the mixture's expectation at a root.
        confidence: share of steps in each root; budget trees' roots have 1.
        reach_CM: probability that a step's walk comes to a node, its root given.
        asked_CN: that it comes to the node's parent and is none of the elder siblings.
        tokens_CS: accept length of each shape, bonus counted.
        outside_SM: for each shape and node the probability by class that a walk ends there, the next token being
            none of the shape's children; None where the shape has none there.
        beyond_M: the same for the children of all trees together.
    """

    forest: Forest
    weights_C: tuple[float, ...]
    lengths: tuple[tuple[int, tuple[float, ...]], ...]
    strength: float
    confidence: tuple[float, ...]
    reach_CM: NDArray[np.float64]
    asked_CN: NDArray[np.float64]
    tokens_CS: NDArray[np.float64]
    reached_M: list[list[float]]
    outside_SM: list[list[list[float] | None]]
    beyond_M: list[list[float]]

    def weights_at(self, length: int) -> tuple[float, ...]:
        """Of the text classes, in a text that begins behind ``length`` tokens."""
        return next((weights for tokens, weights in reversed(self.lengths) if length >= tokens), self.weights_C)

    def tokens_at(self, length: int) -> list[float]:
        """Accept length that is expected of each shape in a text that begins behind ``length`` tokens."""
        found: list[float] = np.dot(self.weights_at(length), self.tokens_CS).tolist()
        return found


def tables(forest: Forest, prior: Prior | None, greedy: bool) -> Tables:
    """The tables of a plan's counts, or of the weak prior."""
    hazards = _counted(forest, prior) if prior is not None else _weak(forest)
    weights = tuple(one.weight for one in prior.classes) if prior is not None else WEAK_WEIGHTS[greedy]
    confidence = prior.confidence if prior is not None else (1 / forest.classes,) * forest.classes
    hazard_CM = _smoothed(forest, hazards)
    reach_CM = np.ones((len(weights), len(forest.parent)))
    for node in range(forest.roots, len(forest.parent)):
        reach_CM[:, node] = reach_CM[:, forest.parent[node]] * hazard_CM[:, node]
    own = (1.0,) * (forest.roots - forest.classes)
    return Tables(
        forest=forest,
        weights_C=_normalised(weights),
        lengths=tuple((one.tokens, _normalised(one.weights)) for one in prior.lengths) if prior is not None else (),
        strength=STRENGTH if prior is not None else WEAK_STRENGTH,
        confidence=(*confidence, *own),
        reach_CM=reach_CM,
        asked_CN=_asked(forest, reach_CM),
        tokens_CS=_tokens(forest, reach_CM, np.array((*confidence, *own))),
        reached_M=reach_CM.T.tolist(),
        outside_SM=[_outside(forest, reach_CM, s) for s in range(len(forest.shapes))],
        beyond_M=[(reach_CM[:, u] - reach_CM[:, list(c.values())].sum(1)).tolist() for u, c in enumerate(forest.child)],
    )


def _normalised(weights: tuple[float, ...]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _weak(forest: Forest) -> NDArray[np.float64]:
    return np.array([[_product(forest, node, a) for node in range(len(forest.parent))] for a in ACCURACIES])


def _product(forest: Forest, node: int, accuracy: float) -> float:
    """The weak prior's hazard of a node."""
    if node < forest.roots:
        return 1.0
    left = 1 - accuracy
    if forest.root[node] >= forest.classes:  # of a budget tree, in which a level is passed by any of its candidates
        return 1 - left * (1 - LATER * accuracy) ** (_width(forest, node) - 1)
    rank = forest.rank[node]
    return accuracy if rank == 0 else left * (1 - LATER * accuracy) ** (rank - 1) * LATER * accuracy


def _width(forest: Forest, node: int) -> int:
    budgets = [shape for shape in forest.shapes if isinstance(shape, Levels)]
    return budgets[forest.root[node] - forest.classes].width


def _counted(forest: Forest, prior: Prior) -> NDArray[np.float64]:
    """The plan's hazards by class and node; the weak prior's for nodes that the plan has not."""
    place = {path: i for i, path in enumerate(prior.paths)}

    def hazard(one: TextClass, node: int) -> float:
        root, at = forest.root[node], place.get(forest.path(node))
        if at is not None and root < len(one.hazards):
            return one.hazards[root][at]
        first = place.get((0,))
        return _product(forest, node, one.hazards[0][first] if first is not None else 0.5)

    nodes = range(len(forest.parent))
    return np.array([[hazard(one, node) for node in nodes] for one in prior.classes])


def _smoothed(forest: Forest, hazard_CM: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hazards that leave `LEAST` for each of a node's children and for none of them."""
    hazard_CM = np.array(hazard_CM)
    for children in forest.child:
        if children:
            own = list(children.values())
            room = 1 - LEAST * (len(own) + 1)
            total_C1 = np.maximum(hazard_CM[:, own].sum(1, keepdims=True), 1.0)
            hazard_CM[:, own] = LEAST + room * hazard_CM[:, own] / total_C1
    return hazard_CM


def _asked(forest: Forest, reach_CM: NDArray[np.float64]) -> NDArray[np.float64]:
    asked_CN = np.empty((len(reach_CM), forest.nodes))
    for parent, children in enumerate(forest.child):
        left_C = reach_CM[:, parent].copy()
        for node in children.values():
            asked_CN[:, node - forest.roots] = left_C
            left_C -= reach_CM[:, node]
    return asked_CN


def _tokens(forest: Forest, reach_CM: NDArray[np.float64], share_K: NDArray[np.float64]) -> NDArray[np.float64]:
    weighed_CN = reach_CM[:, forest.roots :] * share_K[forest.root[forest.roots :]]
    return 1 + weighed_CN @ forest.members_SN.T


def _outside(forest: Forest, reach_CM: NDArray[np.float64], s: int) -> list[list[float] | None]:
    found: list[list[float] | None] = []
    for node in range(len(forest.parent)):
        own, _ = forest.own_children[s][node]
        found.append((reach_CM[:, node] - reach_CM[:, list(own)].sum(1)).tolist() if own else None)
    return found
