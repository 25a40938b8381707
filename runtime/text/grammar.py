"""Grammars that texts are held to: JSON schemas, and grammars in Lark's or GBNF's syntax, by llguidance.

llguidance (https://github.com/guidance-ai/llguidance) says which tokens may come next. It works on the tokenizer's
bytes, and bounds most grammars' time and memory. It is imported when the first grammar is asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import InvariantError, RequestError
from draftwood.runtime.text.schema import check_schema, schemas_of

# V vocabulary, W words of a bit mask of the tokenizer's tokens

# A JSON schema as an object, or a grammar's text: Lark's syntax, or GBNF's, which has ``::=``.
Grammar = str | Mapping[str, Any]

# Of a long const or enum with escapes, 1.7.0 lets shorter texts end (guidance-ai/llguidance#326).
LEAST_LLGUIDANCE = (1, 7, 2)
# Grammars that stay compiled.
_KEPT = 32
_MOST_CHARACTERS = 1 << 20
_NO_TOKEN = "grammar: no token of this bundle can go on with the text"
# A rule in GBNF's syntax.
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# White space between the parts of JSON, unless a schema says it (in ``x-guidance``): a line and its indentation, no
# more. A weak model may find no end.
_SPACE = r"\n?[ \t]{0,20}"
# White space between a thought and the text.
_AFTER_THOUGHT = r"\s{0,4}"


class Thought(NamedTuple):
    """Reasoning that may come before a text that is held to a grammar, and is not held itself.

    ``begin`` is the token of its first mark. If it is None, the prompt ended with that mark, and the reasoning has to
    end before the text. ``end`` is the token of the second mark, spelled ``mark``.
    """

    begin: int | None
    end: int
    mark: str

    def before(self, grammar: Mapping[str, Any]) -> str:
        """llguidance's grammar of the reasoning and the text after it."""
        spelled = "".join(f"\\u{{{ord(letter):x}}}" for letter in self.mark)  # a grammar gives none of it a meaning
        rest = f"REASONING <[{self.end}]> /{_AFTER_THOUGHT}/"
        start = f"{rest} @text" if self.begin is None else f"(<[{self.begin}]> {rest})? @text"
        lark = f"start: {start}\nREASONING: /(?s:.*)/ & ~/(?s:.*{spelled}.*)/"
        return json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "text", **grammar}]})


class Grammars:
    """Grammars that a tokenizer's texts can be held to.

    ``source`` is the tokenizer as ``tokenizer.json`` has it; ``ends`` are the teacher's end tokens; a grammar says when
    they may come.

    Raises:
        RequestError: llguidance is not installed, is too old, or cannot read the tokenizer; no token ends a text.
    """

    def __init__(self, source: str, vocabulary: int, ends: Sequence[int]) -> None:
        from importlib.metadata import version  # takes long, and an opening needs none

        try:
            import llguidance
        except ImportError:
            raise RequestError("grammar: needs the package llguidance, which the extra serve brings") from None
        installed = version("llguidance")
        if tuple(map(int, re.findall(r"\d+", installed)[:3])) < LEAST_LLGUIDANCE:
            least = ".".join(map(str, LEAST_LLGUIDANCE))
            raise RequestError(f"grammar: llguidance {installed} is too old for it; install {least} or later")
        if not ends:
            raise RequestError("grammar: this bundle's teacher has no end token, by which a text could end")
        self._library, self._vocabulary, self._ends = llguidance, vocabulary, frozenset(ends)
        try:
            try:
                self._tokenizer = llguidance.LLTokenizer(source, n_vocab=vocabulary, eos_token=list(ends))
            except ValueError:  # it has more tokens than the teacher, [PAD] say, or cannot be read at all
                self._tokenizer = llguidance.LLTokenizer(source, eos_token=list(ends))
        except Exception as error:  # it raises nothing narrower
            raise RequestError(f"grammar: this bundle's tokenizer cannot be used: {error}") from error
        self._compiled = lru_cache(_KEPT)(self._compile)

    def begin(self, grammar: Grammar, thought: Thought | None = None) -> TextGrammar:
        """The grammar at the beginning of a text, or of a thought before it.

        Raises:
            RequestError: it is none, or too large.
        """
        if not isinstance(grammar, str | Mapping):
            raise RequestError(f"grammar: expected a JSON schema or a grammar's text, got {type(grammar).__name__}")
        try:
            text = grammar if isinstance(grammar, str) else json.dumps(grammar, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"grammar: the schema is not JSON: {error}") from None
        if len(text) > _MOST_CHARACTERS:
            raise RequestError(f"grammar: {len(text)} characters; expected at most {_MOST_CHARACTERS}")
        compiled = self._compiled(text, not isinstance(grammar, str), thought)
        return TextGrammar(compiled.deep_copy(), self._tokenizer, self._vocabulary, self._ends)

    def _compile(self, text: str, is_schema: bool, thought: Thought | None) -> Any:
        library = self._library
        for schema in [json.loads(text)] if is_schema else schemas_of(text):
            check_schema(schema)
        if is_schema:
            held = {"json_schema": {"x-guidance": {"whitespace_pattern": _SPACE}} | json.loads(text)}
        else:
            held = {"lark_grammar": _lark(text) if re.search(_GBNF, text) else text}
        whole = json.dumps({"grammars": [held]}) if thought is None else thought.before(held)
        matcher = library.LLMatcher(self._tokenizer, whole, log_level=0)
        _check(matcher)
        return matcher


class TextGrammar:
    """A grammar's place in one text (`draftwood.runtime.speculation.constraint.Constraint`).

    After an end token anything is allowed: a walk through a tree may go on there, and nobody reads its results.
    """

    def __init__(self, matcher: Any, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._matcher, self._tokenizer, self._vocabulary, self._ends = matcher, tokenizer, vocabulary, ends
        # Of the first token that was asked for; tokens taken since; how many of them came before an end token.
        self._first: int | None = None
        self._taken = 0
        self._ended: int | None = None
        self._words_W = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)

    def copied(self) -> TextGrammar:
        """Another one for the same text, before its first token."""
        return TextGrammar(self._matcher.deep_copy(), self._tokenizer, self._vocabulary, self._ends)

    def allows(self, position: int, token: int) -> bool:
        self._go(position)
        if self._ended is not None:
            return True
        if token in self._ends:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.validate_tokens([token]) == 1)

    def allowed(self, position: int) -> NDArray[np.bool_]:
        self._go(position)
        if self._ended is not None:
            return np.ones(self._vocabulary, np.bool_)
        allowed_V = np.zeros(self._vocabulary, np.bool_)
        if not self._matcher.is_stopped():
            from llguidance.numpy import fill_next_token_bitmask

            if (forced := self._begun()) is not None:
                allowed_V[forced] = True
            else:
                fill_next_token_bitmask(self._matcher, self._words_W)
                _check(self._matcher)
                bits = np.unpackbits(self._words_W.view(np.uint8), bitorder="little")
                allowed_V[:] = bits[: self._vocabulary]
        allowed_V[list(self._ends)] = self._matcher.is_accepting()
        if not allowed_V.any():
            raise RequestError(_NO_TOKEN)
        return allowed_V

    def forced(self, position: int) -> int | None:
        self._go(position)
        if self._ended is not None:
            return None
        if self._matcher.is_stopped():
            return min(self._ends) if self._matcher.is_accepting() else None
        return self._begun()

    def take(self, position: int, token: int) -> None:
        self._go(position)
        if self._ended is None and token in self._ends:
            self._ended = self._taken
        elif self._ended is None:
            self._matcher.consume_token(token)
            _check(self._matcher)
        self._taken += 1

    def _begun(self) -> int | None:
        """The token that the only way on begins with.

        The library reads a special token, and any added one that is spelled <...>, out of its letters, and refuses it
        then. Its letters are asked for, so the first of them is given.
        """
        token = next(iter(self._matcher.compute_ff_tokens()), None)
        if token is not None and self._matcher.validate_tokens([token]) != 1:
            letters = bytes(self._matcher.compute_ff_bytes()).decode(errors="ignore")
            token = next(iter(self._tokenizer.tokenize_str(letters[:1])), None)
        return token if token is None or token < self._vocabulary else None

    def _go(self, position: int) -> None:
        """Goes back to an earlier position of the text."""
        self._first = position if self._first is None else self._first
        count = position - self._first
        if count > self._taken:
            raise InvariantError(f"a grammar that took {self._taken} tokens is asked for the one after {count}")
        if count < self._taken:
            matched = self._taken if self._ended is None else self._ended
            self._matcher.rollback(max(matched - count, 0))
            self._ended = self._ended if self._ended is not None and self._ended < count else None
            self._taken = count


def _lark(gbnf: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(gbnf))
    except Exception as error:  # it raises nothing narrower
        raise _refused(str(error)) from None


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise _refused(matcher.get_error())


def _refused(message: str) -> RequestError:
    """The library's message. It has several lines, the first of them may say nothing, and it names switches that the
    asking client cannot reach, and its own state."""
    line = re.split(r" (?:Enable '|<state>)", " ".join(message.split()))[0]
    if line == "NoExtensionBias":
        return RequestError(_NO_TOKEN)
    return RequestError(f"grammar: it cannot be followed: {line}")
