"""A draft without a drafter: the tokens that followed the same tokens earlier in the text, prompt and answer alike.

A suffix automaton of the text (Blumer et al., 1985) knows every string in it. Its last state's suffix link is the
longest end of the text that stands there once before: the *match*. The continuations are the ways on from there, with
their counts. If a tree wants more of them than there are, shorter ends of the text give the rest. Nothing here needs a
graph or a device, and nothing of one text reaches another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from math import log
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from draftwood.noise import Key, gumbels, key_of
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import Topology
from draftwood.trees.topology import MAX_RANK

# T tree rows

# Counts of shorter ends that a token brings up to date at most; beyond, a text that repeats itself would take O(n).
MOST_LINKS = 8
# Classes of match lengths, by which acceptance differs most: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 and more.
MATCH_CLASSES = 6
# How often a text is expected to repeat itself after a match, by class, before it has shown it. It counts as so many
# answers.
GOES_ON = (0.02, 0.15, 0.3, 0.5, 0.7, 0.85)
HOPE = 4.0
# Continuations of a match among which the most frequent is looked for while a text is read. More of them count as a
# miss.
MOST_WAYS = 16
# Rank of a node that was looked up, in a tree of a drafter's, which proposes nothing of that rank.
LOOKED_UP = MAX_RANK
# In place of a candidate that the text does not offer. It is accepted if it happens to be right, like any other.
NOTHING = 0


def match_class(length: int) -> int:
    """The class of a match of that many tokens."""
    return min(length.bit_length(), MATCH_CLASSES - 1)


class Siblings(NamedTuple):
    """The children of a row: their ranks, and their width, the number of candidates that the ranks need."""

    parent: int
    ranks: tuple[int, ...]
    width: int


# A tree's families from the root down, as its rows stand: level by level, children of one row side by side.
Levels = list[list[Siblings]]
# Continuations: tokens, and the states that they lead to.
Ways = list[tuple[int, int]]


def levels(tree: Topology) -> Levels:
    """A tree as `TextIndex.draft` fills it."""
    levels: Levels = [[] for _ in range(tree.depth)]
    depths = tree.depths
    for parent in range(tree.rows):
        children = tree.children(parent)
        if children:
            ranks = tuple(tree.ranks[child] for child in children)
            levels[depths[parent]].append(Siblings(parent, ranks, 1 + max(ranks)))
    return levels


class TextIndex:
    """The strings of one text. A token takes O(1) amortised; states and ways are at most 2n and 3n for n tokens.

    ``corpus`` is another text, which many may share. If the end of this text matches longer there than in this text,
    the tokens after that match are proposed.
    """

    def __init__(self, corpus: TextIndex | None = None) -> None:
        self.tokens: list[int] = []
        # By state; 0 is the empty string. `_size` is that of its longest string, `_seen` where that last ended.
        self._ways: list[dict[int, int]] = [{}]
        self._link, self._size, self._count, self._seen = [-1], [0], [0], [0]
        self._last = 0
        # The end of the text in the corpus: the state there, and its length.
        self._corpus, self._place, self._reach = corpus, 0, 0
        # By class of match: how often a token came after one, and was the one that had followed most often.
        self._asked, self._right = [0] * MATCH_CLASSES, [0] * MATCH_CLASSES

    @property
    def match(self) -> int:
        """Tokens at the end of the text that stand in it once more, or in the corpus, the most."""
        return self._found()[2]

    def _found(self) -> tuple[TextIndex, int, int]:
        """Where the match stands: in which text, the state there, and its length."""
        linked = max(self._link[self._last], 0)
        if self._corpus is not None and self._reach > self._size[linked]:
            return self._corpus, self._place, self._reach
        return self, linked, self._size[linked]

    @classmethod
    def corpus_of(cls, tokens: Sequence[int]) -> Self:
        """A corpus; nobody asks how often it goes on as before."""
        index = cls()
        for token in tokens:
            index._append(token)
        return index

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens are appended."""
        for token in tokens:
            self._rate(token)
            self._follow(token)
            self._append(token)

    def draft(
        self,
        levels: Levels,
        sampling: Sampling,
        position: int,
        allowed: Callable[[Sequence[int], Collection[int]], set[int]] | None = None,
    ) -> NDArray[np.int64]:
        """Tokens int64 [T] of a tree, by its `levels`; its root is the text's last token, at ``position``.

        ``allowed`` says which of some tokens may stand after a path, which begins after the root.

        A node of rank r gets the continuation that is counted r-th most; of equal ones the latest goes first. In
        sampled text the teacher's own noise is added to the logarithms of the counts, as it will be to its logits.
        """
        text, state, _ = self._found()
        tokens, states, paths = [self.tokens[-1]], [state], [list[int]()]
        for depth, level in enumerate(levels, 1):
            ways = [
                text._continuations(states[above], candidates, allowed and partial(allowed, paths[above]))
                for above, _, candidates in level
            ]
            ranked = (
                text._by_count(ways)
                if sampling.greedy
                else text._by_draw(ways, key_of(sampling.seed, position + depth))
            )
            for family, best in zip(level, ranked, strict=True):
                for rank in family.ranks:
                    token, state = best[rank] if rank < len(best) else (NOTHING, 0)
                    tokens.append(token)
                    states.append(state)
                    if allowed is not None:
                        paths.append([*paths[family.parent], token])
        return np.array(tokens, np.int64)

    def ahead(self, most: int, sampling: Sampling, position: int) -> list[tuple[int, float]]:
        """At most so many tokens that the text goes on with if it repeats itself, its last token being at ``position``.
        Each has the chance that the text follows it so far, by how often it did before."""
        (text, state, size), chance = self._found(), 1.0
        ranked, draw = list[tuple[int, float]](), not sampling.greedy
        for depth in range(1, most + 1):
            ways = [text._continuations(state, 1)]
            (best,) = text._by_draw(ways, key_of(sampling.seed, position + depth)) if draw else text._by_count(ways)
            if not best:
                break
            kind = match_class(size)
            chance *= (HOPE * GOES_ON[kind] + self._right[kind]) / (HOPE + self._asked[kind])
            token, state = best[0]
            ranked.append((token, chance))
            size = min(size + 1, text._size[state])
        return ranked

    def _continuations(
        self, state: int, count: int, allowed: Callable[[Collection[int]], set[int]] | None = None
    ) -> list[Ways]:
        """Tokens after a state with the states that they lead to, then those of shorter ends until they are enough."""
        followers, known = list[Ways](), set[int]()
        while state > 0 and len(known) < count:
            ways = self._ways[state]
            if allowed is not None:
                fits = allowed(ways)
                ways = {token: after for token, after in ways.items() if token in fits}
            followers.append([way for way in ways.items() if way[0] not in known] if known else list(ways.items()))
            known.update(ways)
            state = self._link[state]
        return followers

    def _by_count(self, families: Sequence[list[Ways]]) -> list[Ways]:
        """Each family's continuations, those of longer ends first, the most frequent of an end first."""
        counts, seen = self._count, self._seen
        for ways in chain(*families):
            if len(ways) > 1:
                ways.sort(key=lambda way: (counts[way[1]], seen[way[1]]), reverse=True)
        return [list(chain(*family)) for family in families]

    def _by_draw(self, families: Sequence[list[Ways]], key: Key) -> list[Ways]:
        """Ranks tokens with the noise of one position added to the logarithms of counts."""
        several = [ways for ways in chain(*families) if len(ways) > 1]
        if several:
            ids = sorted({token for ways in several for token, _ in ways})
            noise = dict(zip(ids, gumbels(np.array(ids, np.int32), key).tolist(), strict=True))
            for ways in several:
                ways.sort(key=lambda way: log(self._count[way[1]]) + noise[way[0]], reverse=True)
        return [list(chain(*family)) for family in families]

    def _append(self, token: int) -> None:
        ways, link, size = self._ways, self._link, self._size
        self.tokens.append(token)
        end = len(self.tokens)
        new, state = self._state({}, size[self._last] + 1, 1, end), self._last
        while state >= 0 and token not in ways[state]:
            ways[state][token] = new
            state = link[state]
        link[new] = 0 if state < 0 else self._ended(state, token)
        self._last, state = new, link[new]
        for _ in range(MOST_LINKS):
            if state <= 0:
                break
            self._count[state] += 1
            self._seen[state] = end
            state = link[state]

    def _rate(self, token: int) -> None:
        """Whether the token is the one that had followed the match most often."""
        text, state, size = self._found()
        if not state:
            return
        kind, ways = match_class(size), text._ways[state]
        self._asked[kind] += 1
        if token in ways and len(ways) <= MOST_WAYS:
            counts, seen = text._count, text._seen
            self._right[kind] += token == max(ways, key=lambda one: (counts[ways[one]], seen[ways[one]]))

    def _follow(self, token: int) -> None:
        """The end of the text in the corpus, a token on."""
        corpus = self._corpus
        if corpus is None:
            return
        while self._place and token not in corpus._ways[self._place]:
            self._place = corpus._link[self._place]
            self._reach = corpus._size[self._place]
        if token in corpus._ways[self._place]:
            self._place, self._reach = corpus._ways[self._place][token], self._reach + 1

    def _ended(self, state: int, token: int) -> int:
        """The state of a state's longest string with the token after it; split from a longer one's if need be."""
        ways, link = self._ways, self._link
        whole = ways[state][token]
        if self._size[whole] == self._size[state] + 1:
            return whole
        part = self._state(dict(ways[whole]), self._size[state] + 1, self._count[whole], self._seen[whole])
        link[part], link[whole] = link[whole], part
        while state >= 0 and ways[state].get(token) == whole:
            ways[state][token] = part
            state = link[state]
        return part

    def _state(self, ways: dict[int, int], size: int, count: int, seen: int) -> int:
        self._ways.append(ways)
        self._link.append(0)
        self._size.append(size)
        self._count.append(count)
        self._seen.append(seen)
        return len(self._ways) - 1
