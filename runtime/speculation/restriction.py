"""Restrictions of a request besides a grammar: tokens that alone may come, words that may not, and the earliest end.

A restriction is a constraint (`draftwood.runtime.speculation.constraint`): it follows the draws, so a tree changes
nothing of the text. Biases and penalties are applied in `draftwood.runtime.speculation.adjustment`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.speculation.constraint import Constraint
from draftwood.runtime.text.tokenizer import Tokenizer

# V vocabulary

# Logits are float32 and stay finite within these, whatever they were.
_MOST_ADDED = 10_000
_LEAST_FACTOR, _MOST_FACTOR = 0.01, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The restrictions and changes of a text's draws, as other servers name them; false if there are none.

    A bad word is never drawn as the tokens that the tokenizer makes of it, at the beginning of a text or after a
    space. Fewer than ``min_tokens`` end no text, by an end token or a stop string.
    """

    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    def __bool__(self) -> bool:
        return bool(self.names())

    def names(self) -> set[str]:
        """The fields that ask for something."""
        nothing = Wishes()
        return {field.name for field in fields(self) if getattr(self, field.name) != getattr(nothing, field.name)}

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a draw."""
        return bool(self.names() - {"allowed_token_ids", "bad_words", "min_tokens"})

    def check(self, vocabulary: int) -> None:
        """Raises RequestError if an id is none of the vocabulary's, or a number is none."""
        for name, ids in (("allowed_token_ids", self.allowed_token_ids), ("logit_bias", self.logit_bias)):
            check_ids(name, ids, vocabulary)
        if not all(abs(bias) <= _MOST_ADDED for bias in self.logit_bias.values()):
            raise RequestError(f"logit_bias: expected numbers between -{_MOST_ADDED} and {_MOST_ADDED}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not abs(value) <= _MOST_ADDED:
                raise RequestError(f"{name}: expected a number between -{_MOST_ADDED} and {_MOST_ADDED}, got {value}")
        if not _LEAST_FACTOR <= self.repetition_penalty <= _MOST_FACTOR:
            raise RequestError(
                f"repetition_penalty: expected a number from {_LEAST_FACTOR} to {_MOST_FACTOR}, got"
                f" {self.repetition_penalty}"
            )
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens: expected 0 or more, got {self.min_tokens}")


def check_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    """Raises RequestError, with the name of what holds them, if an id is none of the vocabulary's."""
    bad = next((token for token in ids if not 0 <= token < vocabulary), None)
    if bad is not None:
        raise RequestError(f"{name}: token id {bad} is outside the vocabulary 0 to {vocabulary - 1}")


class Restriction:
    """The restriction of one text, whose first drawn token stands at ``first``; ``grammar`` restricts it, too."""

    def __init__(
        self,
        wishes: Wishes,
        words: Collection[tuple[int, ...]],
        ends: Collection[int],
        vocabulary: int,
        first: int,
        grammar: Constraint | None,
    ) -> None:
        self._words, self._ends, self._first, self._grammar = words, sorted(ends), first, grammar
        self._earliest = first + wishes.min_tokens
        self._allowed_V = np.ones(vocabulary, np.bool_)
        if wishes.allowed_token_ids:
            self._allowed_V[:] = False
            self._allowed_V[list(wishes.allowed_token_ids)] = True
        self._tokens: list[int] = []
        given = [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(wishes, name)]
        given += ["grammar"] if grammar is not None else []
        self._names = f"{given[0]}: " + (f"with {' and '.join(given[1:])}" if given[1:] else "after this text")

    def allows(self, position: int, token: int) -> bool:
        if not self._own(position)[token]:
            return False
        return self._grammar is None or self._grammar.allows(position, token)

    def allowed(self, position: int) -> NDArray[np.bool_]:
        allowed_V = self._own(position)
        if self._grammar is not None:
            allowed_V &= self._grammar.allowed(position)
        if not allowed_V.any():
            raise RequestError(f"{self._names}, no token can go on with the text; ask for less")
        return allowed_V

    def take(self, position: int, token: int) -> None:
        del self._tokens[position - self._first :]
        self._tokens.append(token)
        if self._grammar is not None:
            self._grammar.take(position, token)

    def _own(self, position: int) -> NDArray[np.bool_]:
        """bool [V]: the tokens allowed there, the grammar aside."""
        del self._tokens[position - self._first :]
        allowed_V = self._allowed_V.copy()
        if position < self._earliest:
            allowed_V[self._ends] = False
        for *before, last in self._words:
            if not before or self._tokens[-len(before) :] == before:
                allowed_V[last] = False
        return allowed_V


def words_of(words: Sequence[str], tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    """The tokens of words, at the beginning of a text and after a space.

    Raises:
        RequestError: one is empty.
    """
    spellings: set[tuple[int, ...]] = set()
    for word in words:
        bare = word.lstrip()
        spelled = [tuple(tokenizer.encode(text, special=False)) for text in (bare, " " + bare)]
        if not bare or not all(spelled):
            raise RequestError("bad_words: expected words, got an empty one")
        # A space that is its own token begins other words, too.
        spellings |= {spelled[0]} | ({spelled[1]} if len(spelled[1]) == len(spelled[0]) else set())
    return spellings
