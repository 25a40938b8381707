"""A draft without a drafter: what followed the same tokens earlier in the text, prompt and answer alike.

A suffix automaton of the text (Blumer et al., 1985) knows every string in it. Its last state's suffix link is the
longest end of the text that stands there once before, the *match*; the ways on from there are the continuations, with
their counts. Where a tree wants more of them than there are, shorter ends of the text give the rest. Nothing here
needs a graph or a device, and nothing of one text reaches another.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from draftwood.noise import gumbels, key_of
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.trees import TreeBuffers

# T tree rows

# Counts of shorter ends that a token brings up to date at most; beyond, a text that repeats itself would take O(n).
MOST_LINKS = 8
# Classes of match lengths, by which acceptance differs most: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 and more.
MATCH_CLASSES = 6
# In place of a candidate that the text does not offer. It is accepted where it happens to be right, like any other.
NOTHING = 0


def match_class(length: int) -> int:
    """The class of a match of so many tokens."""
    return min(length.bit_length(), MATCH_CLASSES - 1)


class TextIndex:
    """The strings of one text. A token takes O(1) amortised; states and ways are at most 2n and 3n for n tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # By state; 0 is the empty string. `_size` is that of its longest string, `_seen` where that last ended.
        self._ways: list[dict[int, int]] = [{}]
        self._link, self._size, self._count, self._seen = [-1], [0], [0], [0]
        self._last = 0

    @property
    def match(self) -> int:
        """Tokens at the end of the text that stand in it once more, the most."""
        return self._size[max(self._link[self._last], 0)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens are appended."""
        for token in tokens:
            self._append(token)

    def draft(self, tree: TreeBuffers, sampling: Sampling, position: int) -> NDArray[np.int64]:
        """Tokens int64 [T] of a tree whose root is the text's last token, at ``position``.

        A node of rank r gets the continuation that is counted r-th most; of equal ones the latest goes first. In
        sampled text the teacher's own noise is added to the logarithms of the counts, as it will be to its logits.
        """
        tokens_T = np.full(len(tree.parents), NOTHING, np.int64)
        tokens_T[0] = self.tokens[-1]
        states, ranked = {0: self._link[self._last]}, dict[int, list[tuple[int, int]]]()
        parents, ranks, depths = tree.parents.tolist(), tree.ranks.tolist(), tree.depths.tolist()
        for row in range(1, len(parents)):
            parent, rank = parents[row], ranks[row]
            if parent not in states:
                continue
            if parent not in ranked:
                wanted = 1 + max(r for r, above in zip(ranks[row:], parents[row:], strict=True) if above == parent)
                ranked[parent] = self._continuations(states[parent], wanted, sampling, position + depths[row])
            if rank < len(ranked[parent]):
                tokens_T[row], states[row] = ranked[parent][rank]
        return tokens_T

    def _continuations(self, state: int, wanted: int, sampling: Sampling, position: int) -> list[tuple[int, int]]:
        """Tokens behind a state, the likeliest first, with the states that they lead to; shorter ends fill up."""
        found: dict[int, int] = {}
        while state > 0 and len(found) < wanted:
            ways = [(token, after) for token, after in self._ways[state].items() if token not in found]
            found |= self._ranked(ways, sampling, position) if len(ways) > 1 else ways
            state = self._link[state]
        return list(found.items())

    def _ranked(self, ways: list[tuple[int, int]], sampling: Sampling, position: int) -> list[tuple[int, int]]:
        counts, seen = self._count, self._seen
        if sampling.greedy:
            return sorted(ways, key=lambda way: (counts[way[1]], seen[way[1]]), reverse=True)
        noise = gumbels(np.array([token for token, _ in ways], np.int32), key_of(sampling.seed, position)).tolist()
        scored = sorted(zip(ways, noise, strict=True), key=lambda one: log(counts[one[0][1]]) + one[1], reverse=True)
        return [way for way, _ in scored]

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

    def _ended(self, state: int, token: int) -> int:
        """The state of a state's longest string with the token behind it; split from a longer one's where need be."""
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
