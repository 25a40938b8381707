"""How far the teacher goes along each tree: a plan's counts or a hope, then the steps of a bundle's texts.

Every tree has a chance for each of its levels: the share of the steps that came so far and went on to the next level.
Accept length follows from these. A step counts for every tree whose nodes it asked about. Levels that it did not ask
about count neither as a hit nor as a miss (Kaplan and Meier, 1958). How one text differs from the others is one number,
its *ease*: log-odds that are added to every chance, and moved by what each step shows (Elo, 1978).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp
from typing import NamedTuple

from draftwood.planned import LEAST_SHARE, Prior
from draftwood.runtime.speculation.lookup import GOES_ON, MATCH_CLASSES

RankPath = tuple[int, ...]

# How likely every level of a tree goes on if nothing was counted, in greedy and in sampled text. This is too hopeful of
# deep trees. The first steps correct hope, while a doubt would keep a tree from ever being tried.
HOPE = {True: 0.85, False: 0.7}
# The answers a level that a plan's counts stand for, and that a mere hope stands for.
STRENGTH, WEAK_STRENGTH = 300.0, 4.0
# Counts fade to 1/e in 2000 steps, of any text.
FADES = 1 - 1 / 2000
# The log-odds by which a level that went on, or did not, moves a text's ease at most. The second is the share of its
# ease that a text keeps from one step to the next.
MOVES, KEPT = 0.15, 0.99


class Drafted(NamedTuple):
    """The tree that a gear drafts, at any KV length; plain decoding's has no level. ``nodes`` are rank paths; none if
    the drafter chooses the tree."""

    name: str
    rows: int
    depth: int
    nodes: frozenset[RankPath] = frozenset()
    looked_up: bool = False

    def shared_levels(self, other: Drafted) -> int:
        """Levels of another tree, from its root down, all of whose nodes this one has, too."""
        missing = [len(path) - 1 for path in other.nodes - self.nodes]
        return min(missing, default=max(map(len, other.nodes), default=0))

    def levels_passed(self, path: RankPath) -> int:
        """Levels that a path goes down within the tree."""
        return next((level for level in range(len(path)) if path[: level + 1] not in self.nodes), len(path))


class _Levels:
    """The answers of one tree's levels, hits and all, fading. They begin with the share of steps that ``reached`` each
    level, as if ``strength`` steps had been seen there."""

    def __init__(self, reached: Sequence[float], strength: float) -> None:
        shares = [share / max(before, LEAST_SHARE) for before, share in pairwise([1.0, *reached])]
        self._hits = [strength * min(max(share, LEAST_SHARE), 1 - LEAST_SHARE) for share in shares]
        self._asked = [strength for _ in shares]

    @classmethod
    def before(cls, tree: Drafted, prior: Prior | None, greedy: bool, match: int) -> _Levels:
        """Those before the first step after a match of a class: a plan's counts, or hope. No plan counts a tree that is
        looked up."""
        if prior is not None and tree.name in prior.reached and not tree.looked_up:
            return cls(prior.reached[tree.name], STRENGTH)
        first = GOES_ON[match] if tree.looked_up else prior.first if prior else HOPE[greedy]
        return cls([first ** (level + 1) for level in range(tree.depth)], WEAK_STRENGTH)

    @property
    def chances(self) -> list[float]:
        """Chances that a step which came to a level goes on."""
        return [hits / answers for hits, answers in zip(self._hits, self._asked, strict=True)]

    def count(self, passed: int, asked: int) -> None:
        """Enters a step that asked about the first ``asked`` levels and ``passed`` so many."""
        for level in range(min(passed + 1, asked)):
            self._hits[level] = self._hits[level] * FADES + (level < passed)
            self._asked[level] = self._asked[level] * FADES + 1


class Gains:
    """Counts of the texts of one kind: greedy or sampled, free or held to a grammar."""

    def __init__(self, trees: Mapping[str, Drafted], prior: Prior | None, greedy: bool) -> None:
        self.prior, self._trees = prior, trees
        # Of each tree, its levels by the class of the match.
        self._levels = {
            tree.name: [
                _Levels.before(tree, prior, greedy, match) for match in range(MATCH_CLASSES if tree.looked_up else 1)
            ]
            for tree in trees.values()
        }
        # Of each tree, the others that its steps tell of, and of how many of their levels.
        self._told = {
            tree.name: [
                (other, tree.shared_levels(other))
                for other in trees.values()
                if other is not tree and other.looked_up == tree.looked_up
            ]
            for tree in trees.values()
        }

    def levels(self, tree: str, match: int) -> _Levels:
        """The levels of a tree after a match of a class."""
        return self._levels[tree][match if self._trees[tree].looked_up else 0]

    def saw(self, tree: str, match: int, path: RankPath) -> None:
        """Enters a step of a tree that went down ``path``."""
        self.levels(tree, match).count(len(path), self._trees[tree].depth)
        for other, levels in self._told[tree]:
            self.levels(other.name, match).count(other.levels_passed(path), levels)


class Ease:
    """How one text differs from the others of its kind; one that begins after ``length`` tokens."""

    def __init__(self, gains: Gains, length: int = 0) -> None:
        self._gains = gains
        self._usual = self._ease = gains.prior.ease_at(length) if gains.prior else 0.0

    def tokens(self, tree: str, match: int = 0) -> float:
        """Expected accept length of a tree in this text, bonus counted."""
        tokens = reached = 1.0
        for chance in self._chances(tree, match):
            reached *= chance
            tokens += reached
        return tokens

    def saw(self, tree: str, match: int, path: RankPath) -> None:
        """A step of a tree went down ``path``: the text is easier than was thought, or harder. With every step, of
        plain decoding too, it grows more like any other."""
        self._ease = self._usual + KEPT * (self._ease - self._usual)
        answered = self._chances(tree, match)[: len(path) + 1]
        self._ease += MOVES * sum((level < len(path)) - chance for level, chance in enumerate(answered))
        self._gains.saw(tree, match, path)

    def _chances(self, tree: str, match: int) -> list[float]:
        odds = exp(self._ease)
        return [chance * odds / (1 - chance + chance * odds) for chance in self._gains.levels(tree, match).chances]
