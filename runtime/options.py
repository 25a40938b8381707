"""Options of one text, by the names that users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, Unpack

from draftwood.errors import RequestError
from draftwood.runtime.engines.opening import typed
from draftwood.runtime.speculation.apart import ApartGrammar
from draftwood.runtime.speculation.restriction import Wishes
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.text.grammar import Grammar

# Likeliest tokens that are kept besides a drawn one, as other servers bound them.
_MOST_LOGPROBS = 20


class Asked(TypedDict, total=False):
    """Options that decide a text besides its prompt, from Python, the command line or a request's body to here.

    Every name may be left out.
    """

    # New tokens at most, 128 if left out.
    max_new_tokens: int
    # Divides the logits; 0 decodes greedily, which is the default.
    temperature: float
    # Keep the most probable tokens: a share of their mass, a number of them, those of at least this share of the most
    # probable one's probability. 1, 0 and 0 keep all.
    top_p: float
    top_k: int
    min_p: float
    # Of all draws; a seed gives one text.
    seed: int
    # Texts before which the answer ends.
    stop: str | Sequence[str]
    # Tokens that end the answer and are not in its text, besides the teacher's end tokens.
    stop_token_ids: Sequence[int]
    # Go on past the teacher's end tokens.
    ignore_eos: bool
    # Keep log-probabilities of every token, and of that many of the likeliest besides it.
    logprobs: int | None
    # Special tokens, as the vocabulary spells them, that stand in the text; others leave nothing there.
    special_tokens: Sequence[str]
    # The form of the text: a JSON schema as an object, or a grammar in Lark's or GBNF's syntax.
    grammar: Grammar | None
    # Token ids that alone are allowed; texts that are not; the number of tokens before which no end counts; numbers
    # added to logits, by token id (`draftwood.runtime.speculation.restriction.Wishes`).
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    min_tokens: int
    logit_bias: Mapping[int, float]
    # Against repeating: subtracted from the logits of the answer's tokens, once or as often as they came. Then a factor
    # for those of prompt and answer.
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    # The text ends after a stop text and not before it.
    include_stop_str_in_output: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How one text is decoded."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    # Go on past the teacher's end tokens.
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # Of every token, and of that many of the likeliest ones besides it.
    logprobs: int | None = None
    special_tokens: tuple[str, ...] = ()
    grammar: Grammar | ApartGrammar | None = None
    wishes: Wishes = field(default_factory=Wishes)
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens: expected a whole number of at least 1, got {self.max_new_tokens!r}")
        if self.logprobs is not None and not 0 <= self.logprobs <= _MOST_LOGPROBS:
            raise RequestError(f"logprobs: expected a number from 0 to {_MOST_LOGPROBS}, got {self.logprobs}")
        if self.grammar is not None and self.ignore_eos:
            raise RequestError("grammar: says when the text ends; leave ignore_eos out")
        if self.grammar is not None and self.wishes.min_tokens:
            raise RequestError("min_tokens: the grammar says when the text ends; leave one of them out")
        if self.wishes.min_tokens > self.max_new_tokens:
            most = self.max_new_tokens
            raise RequestError(f"min_tokens: {self.wishes.min_tokens}, but the text has at most {most} tokens")

    @classmethod
    def of(cls, **options: Unpack[Asked]) -> Options:
        """Options by the names that users know; RequestError if a name is another, or a value makes no sense."""
        if strange := options.keys() - Asked.__annotations__:
            raise RequestError(f"{min(strange)}: no such option; expected one of {', '.join(Asked.__annotations__)}")
        rest: dict[str, Any] = {**typed(options, Asked)}
        sampling = Sampling(**{field.name: rest.pop(field.name) for field in fields(Sampling) if field.name in rest})
        stop = rest.pop("stop", ())
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        for name in ("special_tokens", "stop_token_ids"):
            rest[name] = tuple(rest.get(name, ()))
        wishes = {field.name: rest.pop(field.name) for field in fields(Wishes) if field.name in rest}
        if "allowed_token_ids" in wishes and not wishes["allowed_token_ids"]:
            raise RequestError("allowed_token_ids: no token would be allowed; give at least one, or leave it out")
        for name in wishes.keys() & {"allowed_token_ids", "bad_words"}:
            wishes[name] = tuple(wishes[name])
        return cls(sampling=sampling, stop_strings=stop_strings, wishes=Wishes(**wishes), **rest)
