"""Drafts of a text that is held to a grammar: they propose the tokens that it allows, and those that it forces.

A draft graph adds its noise to the logits before it chooses. For a forbidden token the noise is a number that no logit
makes up for. The forbidden tokens are known at the level after the root, and at the next levels as long as a single
token may come. Further down the allowed tokens depend on the path, so a drafted tree is gone through from its root. If
levels are ranked, the children of a row are the best candidates that are allowed after it. Otherwise a draft that
proposes a forbidden token is made again, its levels held to the tokens allowed after its best path. Forbidden tokens
still make room for forced ones.

A guide follows the text with its own matcher. If a guide fails, the draws stay the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.speculation.constraint import Foreseeing
from draftwood.trees import TreeBuffers

# T tree rows, V vocabulary, I levels, K candidates

# More tokens than this are not asked for one by one: the mask of all is made as fast.
MANY = 32
# A draft is made again for a forbidden node below one whose path has at least this log-probability.
LIKELY = float(np.log(0.25))


class Shape(Protocol):
    """The parts of a tree that are read: its rows' parents and ranks."""

    @property
    def parents(self) -> NDArray[np.int64]: ...

    @property
    def ranks(self) -> NDArray[np.int64]: ...


class Guiding(Protocol):
    """The questions of drafts to a guide, in this process or in another."""

    def follow(self, tokens: Sequence[int], root: int) -> bool:
        """Goes on to a root after committed tokens, the prompt included; False if the grammar's bounds end that."""

    def first_levels(self, count: int) -> list[NDArray[np.bool_]]:
        """bool [V] of at most so many levels after the root: the allowed tokens, as far as they are known."""

    def allowed(self, path: Sequence[int], tokens: Collection[int]) -> set[int]:
        """The tokens among some that may stand after a path, which begins after the root."""

    def levels(
        self, tree: TreeBuffers, tokens_T: NDArray[np.int64], scores_M: NDArray[np.float32]
    ) -> list[NDArray[np.bool_]]:
        """bool [V] of every level as far as it is known: the tokens allowed after the best allowed path.

        No levels if the best child of every likely row of that path is allowed. ``scores`` are the nodes', as a draft
        has them.
        """

    def filled(
        self, tree: TreeBuffers, tokens_T: NDArray[np.int64], candidates_IK: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """A tree's tokens int64 [T]: forbidden ones are exchanged for allowed ones that are known.

        ``candidates`` are those of every level, best first, if levels are ranked.
        """


class Guide:
    """The guide of one text, held to its grammar from the token at ``position`` on; see `Guiding`."""

    def __init__(self, grammar: Foreseeing, position: int) -> None:
        self._grammar, self._known, self._next = grammar, position, position
        self._lost = False

    def follow(self, tokens: Sequence[int], root: int) -> bool:
        known = min(self._known, len(tokens))
        return self.follow_on(known, tokens[known:], root)

    def follow_on(self, position: int, tokens: Sequence[int], root: int) -> bool:
        """`follow`, given the committed tokens from a position on."""
        root_at = position + len(tokens)
        try:
            for at, token in enumerate((*tokens, root), position):
                self._grammar.take(at, token)
        except RequestError:
            self._lost = True
        self._known, self._next = root_at, root_at + 1
        return not self._lost

    def first_levels(self, count: int) -> list[NDArray[np.bool_]]:
        levels = list[NDArray[np.bool_]]()
        try:
            for level in range(count):
                allowed_V = self._grammar.allowed(self._next + level)
                levels.append(allowed_V)
                if np.count_nonzero(allowed_V) > 1:
                    break
                self._grammar.take(self._next + level, int(allowed_V.argmax()))
        except RequestError:
            self._lost = True
        return levels

    def allowed(self, path: Sequence[int], tokens: Collection[int]) -> set[int]:
        at = self._next + len(path)
        try:
            if self._lost or not self._goes(path):
                return set()
            if len(tokens) > MANY:
                allowed_V = self._grammar.allowed(at)
                return {token for token in tokens if allowed_V[token]}
            return {token for token in tokens if self._grammar.allows(at, token)}
        except RequestError:
            self._lost = True
            return set()

    def levels(
        self, tree: Shape, tokens_T: NDArray[np.int64], scores_M: NDArray[np.float32]
    ) -> list[NDArray[np.bool_]]:
        tokens, scores = tokens_T.tolist(), [0.0, *scores_M.tolist()]
        try:
            if self._lost or all(
                scores[row] < LIKELY or self._grammar.allows(at, tokens[children[0]])
                for row, at, children in self._best_path(tree, tokens)
            ):
                return []
            return [self._grammar.allowed(at) for _, at, _ in self._best_path(tree, tokens)]
        except RequestError:
            self._lost = True
            return []

    def filled(
        self, tree: Shape, tokens_T: NDArray[np.int64], candidates_IK: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        if self._lost:
            return tokens_T
        tokens, ranks = tokens_T.tolist(), tree.ranks.tolist()
        try:
            for at, children in self._rows(tree, tokens):
                if candidates_IK is None:
                    self._exchange(tokens, children, at)
                else:
                    best = self._best(candidates_IK[at - self._next].tolist(), 1 + max(ranks[c] for c in children), at)
                    for child in children:
                        if ranks[child] < len(best):
                            tokens[child] = best[ranks[child]]
        except RequestError:
            self._lost = True
            return tokens_T
        return np.array(tokens, np.int64)

    def _rows(self, tree: Shape, tokens: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """The rows that have children, depth first, along allowed tokens: the children's places, and the children.

        The grammar has taken the row. The caller may still exchange its children's ``tokens``.
        """
        below = _children(tree)

        def from_(row: int, at: int) -> Iterator[tuple[int, list[int]]]:
            if row not in below:
                return
            yield at, below[row]
            for child in below[row]:
                if self._grammar.allows(at, tokens[child]):
                    self._grammar.take(at, tokens[child])
                    yield from from_(child, at + 1)

        return from_(0, self._next)

    def _best_path(self, tree: Shape, tokens: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """The rows that have children, each the best one allowed after the last: a row, the places of its children, and
        those. The grammar has taken the row."""
        below, at = _children(tree), self._next
        row: int | None = 0
        while row is not None and row in below:
            yield row, at, below[row]
            row = next((child for child in below[row] if self._grammar.allows(at, tokens[child])), None)
            if row is not None:
                self._grammar.take(at, tokens[row])
            at += 1

    def _best(self, candidates: Sequence[int], count: int, at: int) -> list[int]:
        """So many tokens at most for a place: forced ones, then allowed candidates."""
        forced = self._grammar.forced(at)
        best = [] if forced is None else [forced]
        for token in candidates:
            if len(best) == count:
                break
            if token != forced and self._grammar.allows(at, token):
                best.append(token)
        return best

    def _exchange(self, tokens: list[int], children: Sequence[int], at: int) -> None:
        """The forced token, instead of the first one that is forbidden."""
        wrong = next((child for child in children if not self._grammar.allows(at, tokens[child])), None)
        forced = None if wrong is None else self._grammar.forced(at)
        if wrong is not None and forced is not None and forced not in [tokens[child] for child in children]:
            tokens[wrong] = forced

    def _goes(self, path: Sequence[int]) -> bool:
        """Whether the text may go on with a path; it is taken."""
        for position, token in enumerate(path, self._next):
            if not self._grammar.allows(position, token):
                return False
            self._grammar.take(position, token)
        return True


def _children(tree: Shape) -> dict[int, list[int]]:
    """The rows below every row that has any, by rank."""
    rows: dict[int, list[int]] = {}
    for row, parent in enumerate(tree.parents.tolist()[1:], 1):
        rows.setdefault(parent, []).append(row)
    return rows
