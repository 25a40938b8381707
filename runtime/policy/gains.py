"""How far the teacher goes along each tree: a plan's counts or a hope, then the steps of a bundle's texts.

Every tree has a chance for each of its levels: the share of the steps that came so far and went on to the next level.
Accept length follows from these. A step counts for every tree whose nodes it asked about. Levels that it did not ask
about count neither as a hit nor as a miss (Kaplan and Meier, 1958). How one text differs from the others is one number,
its *ease*: log-odds that are added to every chance, and moved by what each step shows (Elo, 1978).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp
from typing import NamedTuple

from draftwood.planned import LEAST_SHARE, Prior
from draftwood.runtime.speculation.lookup import GOES_ON, MATCH_CLASSES
from draftwood.trees import Topology

RankPath = tuple[int, ...]

# How likely every level of a tree goes on if nothing was counted, in greedy and in sampled text. This is too hopeful of
# deep trees. The first steps correct hope, while a doubt would keep a tree from ever being tried.
HOPE = {True: 0.85, False: 0.7}
# The answers a level that a plan's counts stand for, and that a mere hope stands for.
STRENGTH, WEAK_STRENGTH = 300.0, 4.0
# Counts fade to 1/e in 2000 steps, of any text.
FADES = 1 - 1 / 2000
# The log-odds by which a level that went on, or did not, moves a text's ease at most, and the share of its ease that a
# text keeps from one step to the next.
MOVES, KEPT = 0.15, 0.99


class Drafted(NamedTuple):
    """The tree that a gear drafts, at any KV length. ``nodes`` are rank paths; none if the drafter chooses the tree."""

    name: str
    depth: int
    nodes: frozenset[RankPath] = frozenset()
    looked_up: bool = False

    @classmethod
    def of(cls, tree: Topology, name: str, looked_up: bool = False) -> Drafted:
        return cls(name, tree.depth, frozenset(tree.paths), looked_up)

    def counted(self, prior: Prior | None) -> bool:
        """Whether a plan has counted it; no plan counts a tree that is looked up."""
        return prior is not None and not self.looked_up and self.name in prior.reached

    def told(self, path: RankPath, levels: int) -> list[bool]:
        """At each of its first levels, down to the one at which ``path`` has left it, whether the path goes on."""
        inside = [depth < len(path) and path[: depth + 1] in self.nodes for depth in range(min(levels, len(path) + 1))]
        return inside[: inside.index(False) + 1] if False in inside else inside


def reached(drafted: Drafted, prior: Prior | None, greedy: bool, match: int = 0) -> Sequence[float]:
    """The share of steps that come to each level, by the counts of a plan, or by hope if there are none.

    ``match`` is the class of the match, for a tree that is looked up.
    """
    if prior is not None and drafted.counted(prior):
        return prior.reached[drafted.name]
    first = GOES_ON[match] if drafted.looked_up else prior.first if prior else HOPE[greedy]
    return [first ** (level + 1) for level in range(drafted.depth)]


class _Levels:
    """The answers of one tree's levels after a match of one class, hits and all, fading."""

    def __init__(self, reached: Sequence[float], strength: float) -> None:
        shares = [share / max(before, LEAST_SHARE) for before, share in pairwise([1.0, *reached])]
        self._hits = [strength * min(max(share, LEAST_SHARE), 1 - LEAST_SHARE) for share in shares]
        self._asked = [strength for _ in shares]

    @property
    def chances(self) -> list[float]:
        """Chances that a step which came to a level goes on."""
        return [hits / asked for hits, asked in zip(self._hits, self._asked, strict=True)]

    def count(self, went: Sequence[bool]) -> None:
        """Enters a step that answered at the first levels whether it went on."""
        for level, hit in enumerate(went):
            self._hits[level] = self._hits[level] * FADES + hit
            self._asked[level] = self._asked[level] * FADES + 1


class Gains:
    """Counts of the texts of one kind: greedy or sampled, free or held to a grammar."""

    def __init__(self, drafted: Sequence[Drafted], prior: Prior | None, greedy: bool) -> None:
        self._prior, self._drafted = prior, drafted
        # Of each shape, its levels by the class of the match.
        self._levels = [
            [
                _Levels(reached(tree, prior, greedy, match), STRENGTH if tree.counted(prior) else WEAK_STRENGTH)
                for match in range(MATCH_CLASSES if tree.looked_up else 1)
            ]
            for tree in drafted
        ]
        # Of each shape, the others that its steps tell of, and of how many of their levels.
        self._told = [
            [
                (number, _shared(tree.nodes, other.nodes))
                for number, other in enumerate(drafted)
                if other is not tree and other.looked_up == tree.looked_up
            ]
            for tree in drafted
        ]

    def levels(self, shape: int, match: int) -> _Levels:
        """The levels of a tree after a match of a class."""
        return self._levels[shape][match if self._drafted[shape].looked_up else 0]

    def saw(self, shape: int, match: int, path: RankPath) -> list[bool]:
        """Enters a step that went down ``path``; returns at each level that it asked whether it went on."""
        went = [level < len(path) for level in range(min(len(path) + 1, self._drafted[shape].depth))]
        self.levels(shape, match).count(went)
        for number, levels in self._told[shape]:
            self.levels(number, match).count(self._drafted[number].told(path, levels))
        return went

    def ease_at(self, length: int) -> float:
        """The ease of a text that begins after ``length`` tokens, before its first step."""
        return self._prior.ease_at(length) if self._prior else 0.0


def _shared(nodes: frozenset[RankPath], others: frozenset[RankPath]) -> int:
    """Levels of another tree, from its root down, all of whose nodes a tree has, too."""
    missing = [len(path) - 1 for path in others - nodes]
    return min(missing, default=max(map(len, others), default=0))


class Ease:
    """How one text differs from the others of its kind; one that begins after ``length`` tokens."""

    def __init__(self, gains: Gains, length: int = 0) -> None:
        self._gains = gains
        self._usual = self._ease = gains.ease_at(length)

    def tokens(self, shape: int, match: int = 0) -> float:
        """Expected accept length of a tree in this text, bonus counted."""
        tokens = reached = 1.0
        for chance in self._chances(shape, match):
            reached *= chance
            tokens += reached
        return tokens

    def idle(self) -> None:
        """A step that shows nothing: the text grows more like any other."""
        self._ease = self._usual + KEPT * (self._ease - self._usual)

    def saw(self, shape: int, match: int, path: RankPath) -> None:
        """A step of a tree went down ``path``: the text is easier than was thought, or harder."""
        self.idle()
        chances, went = self._chances(shape, match), self._gains.saw(shape, match, path)
        self._ease += MOVES * sum(hit - chance for chance, hit in zip(chances, went, strict=False))

    def _chances(self, shape: int, match: int) -> list[float]:
        odds = exp(self._ease)
        return [chance * odds / (1 - chance + chance * odds) for chance in self._gains.levels(shape, match).chances]
