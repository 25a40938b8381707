"""How far the teacher goes along each tree: what a plan counted or a hope, then what the texts of a bundle have shown.

Every tree has a chance for each of its levels: of the steps that came so far, the share that went on to the next level.
Accept length follows from these. A step counts for every tree of whose nodes it asked; what it did not ask counts
neither as a hit nor as a miss (Kaplan and Meier, 1958). How one text differs from the others is one number, its *ease*:
log-odds that are added to every chance (Rasch, 1960).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import exp
from typing import NamedTuple

from draftwood.planned import LEAST_SHARE, Prior
from draftwood.runtime.speculation.lookup import GOES_ON, MATCH_CLASSES
from draftwood.trees import Topology

RankPath = tuple[int, ...]

# How likely the best candidate of a level is to be taken where nothing was counted, in greedy and in sampled text; and
# a later candidate's share of what is left, relative to the first's of all. This is too hopeful of deep trees: hope is
# put right by the first steps, while a doubt would keep a tree from ever being tried.
HOPE = {True: 0.7, False: 0.5}
LATER = 0.35
# The answers a level that a plan's counts stand for, and that a mere hope stands for.
STRENGTH, WEAK_STRENGTH = 300.0, 4.0
# Counts fade to 1/e in so many steps, of whatever text.
MEMORY = 2000
FADES = 1 - 1 / MEMORY
# Standard deviation of the eases of texts, in log-odds, and the share of its ease that a text keeps from one step to
# the next.
SPREAD, KEPT = 0.4, 0.99


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


class Drafted(NamedTuple):
    """A shape, and the names of its trees: by confidence class, or one."""

    shape: Shape
    names: tuple[str, ...]


def reached(drafted: Drafted, prior: Prior | None, greedy: bool, match: int = 0) -> list[float]:
    """The share of steps that come to each level, by the counts of a plan, or by hope where there are none.

    ``match`` is the class of the match, for a tree that is looked up, which no plan has counted.
    """
    shape, names = drafted
    if isinstance(shape, Matched):
        return _hoped(shape.tree, GOES_ON[match])
    first = prior.first if prior else HOPE[greedy]
    trees: tuple[Topology | Levels, ...] = shape if isinstance(shape, tuple) else (shape,)
    shares = prior.confidence if prior else (1.0,) * len(trees)
    if len(shares) != len(trees):  # one tree whatever the class
        trees, names = trees[:1] * len(shares), names[:1] * len(shares)
    counted = prior.reached if prior else {}
    levels = [
        counted[name][place] if name in counted else _hoped(tree, first)
        for place, (name, tree) in enumerate(zip(names, trees, strict=True))
    ]
    each = zip_longest(*levels, fillvalue=0.0)
    return [sum(share * one for share, one in zip(shares, level, strict=True)) / sum(shares) for level in each]


def _hoped(tree: Topology | Levels, first: float) -> list[float]:
    """The share of walks that come to each level where the best candidate of every level is taken so often."""
    if isinstance(tree, Levels):  # a level is passed by any of its candidates
        passed = 1 - (1 - first) * (1 - LATER * first) ** (tree.width - 1)
        return [passed ** (depth + 1) for depth in range(tree.depth)]
    chances: dict[RankPath, float] = {(): 1.0}
    levels = [0.0] * tree.depth
    for path in tree.paths:  # parents first
        rank = path[-1]
        taken = first if rank == 0 else (1 - first) * (1 - LATER * first) ** (rank - 1) * LATER * first
        chances[path] = chances[path[:-1]] * taken
        levels[len(path) - 1] += chances[path]
    return levels


def _inside(share: float) -> float:
    return min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)


class _Tree:
    """One tree after a match of one class: the chance of each of its levels."""

    def __init__(self, reached: Sequence[float], strength: float) -> None:
        shares = [one / max(before, LEAST_SHARE) for before, one in pairwise([1.0, *reached])]
        self._strength, self._expected = strength, [_inside(share) for share in shares]
        self._hits, self._asked = [0.0] * len(reached), [0.0] * len(reached)
        self.chances = self._expected[:]

    def count(self, went: Sequence[bool]) -> None:
        """A step answered at the first levels whether it went on."""
        for level, hit in enumerate(went):
            self._hits[level] = self._hits[level] * FADES + hit
            self._asked[level] = self._asked[level] * FADES + 1
            hits = self._strength * self._expected[level] + self._hits[level]
            self.chances[level] = _inside(hits / (self._strength + self._asked[level]))


class Gains:
    """What the texts of one kind have shown: greedy or sampled ones, free or held to a grammar."""

    def __init__(self, drafted: Sequence[Drafted], prior: Prior | None, greedy: bool) -> None:
        shapes = [one.shape for one in drafted]
        self._prior = prior
        self._trees = [_trees(one, prior, greedy) for one in drafted]
        self._nodes = [_nodes(shape) for shape in shapes]
        looked_up = [isinstance(shape, Matched) for shape in shapes]
        # Of each tree, the others of its kind that its steps tell of, and of how many of their levels.
        self._told = [
            [(t, _shared(own, other)) for t, other in enumerate(self._nodes) if t != s and looked_up[t] == looked_up[s]]
            for s, own in enumerate(self._nodes)
        ]

    def chances(self, shape: int, match: int) -> list[float]:
        """Of each level of a tree, that a step which came so far goes on."""
        return self._tree(shape, match).chances

    def saw(self, shape: int, match: int, path: RankPath) -> list[bool]:
        """A step of a tree went down ``path``; returns at each level that it asked whether it went on."""
        tree = self._tree(shape, match)
        went = [level < len(path) for level in range(min(len(path) + 1, len(tree.chances)))]
        tree.count(went)
        for other, levels in self._told[shape]:
            inside = [
                depth < len(path) and path[: depth + 1] in self._nodes[other]
                for depth in range(min(levels, len(path) + 1))
            ]
            self._tree(other, match).count(inside[: inside.index(False) + 1] if False in inside else inside)
        return went

    def ease_at(self, length: int) -> float:
        """The ease of a text that begins after ``length`` tokens, before its first step."""
        return self._prior.ease_at(length) if self._prior else 0.0

    def _tree(self, shape: int, match: int) -> _Tree:
        own = self._trees[shape]
        return own[match if len(own) > 1 else 0]


def _trees(drafted: Drafted, prior: Prior | None, greedy: bool) -> list[_Tree]:
    """A tree for each class of match."""
    looked_up = isinstance(drafted.shape, Matched)
    counted = prior is not None and not prior.reached.keys().isdisjoint(drafted.names)
    matches = range(MATCH_CLASSES if looked_up else 1)
    return [_Tree(reached(drafted, prior, greedy, match), STRENGTH if counted else WEAK_STRENGTH) for match in matches]


def _nodes(shape: Shape) -> frozenset[RankPath]:
    """The rank paths of a fixed tree; none where the tree depends on the drafter's confidence or scores."""
    trees = (shape.tree,) if isinstance(shape, Matched) else shape if isinstance(shape, tuple) else ()
    return frozenset(trees[0].paths) if len(trees) == 1 else frozenset()


def _shared(nodes: frozenset[RankPath], others: frozenset[RankPath]) -> int:
    """Levels of another tree, from its root down, all of whose nodes a tree has, too."""
    missing = [len(path) - 1 for path in others - nodes]
    return min(missing, default=max(map(len, others), default=0))


class Ease:
    """How one text differs from the others of its kind, and how little of that is known."""

    def __init__(self, gains: Gains) -> None:
        self._gains = gains
        self._usual = self._ease = 0.0
        self._variance = SPREAD**2

    def begin(self, length: int) -> None:
        """The text begins after so many tokens."""
        self._usual = self._ease = self._gains.ease_at(length)

    def tokens(self, shape: int, match: int = 0) -> float:
        """Expected accept length of a tree in this text, bonus counted."""
        tokens = reached = 1.0
        for chance in self._eased(shape, match):
            reached *= chance
            tokens += reached
        return tokens

    def idle(self) -> None:
        """A step that shows nothing: the text grows more like any other."""
        self._ease = self._usual + KEPT * (self._ease - self._usual)
        self._variance = SPREAD**2 + KEPT**2 * (self._variance - SPREAD**2)

    def saw(self, shape: int, match: int, path: RankPath) -> None:
        """A step of a tree went down ``path``: one step of Newton's method towards the ease that makes it likely."""
        self.idle()
        chances = self._eased(shape, match)
        went = self._gains.saw(shape, match, path)
        self._variance = 1 / (1 / self._variance + sum(c * (1 - c) for c, _ in zip(chances, went, strict=False)))
        self._ease += self._variance * sum(hit - chance for chance, hit in zip(chances, went, strict=False))

    def _eased(self, shape: int, match: int) -> list[float]:
        odds = exp(self._ease)
        return [chance * odds / (1 - chance + chance * odds) for chance in self._gains.chances(shape, match)]
