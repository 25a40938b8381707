"""The reasoning that a model writes before its answer, told apart from it by two marks that are tokens.

Qwen3 and DeepSeek-R1 with its distilled models write between ``<think>`` and ``</think>``, Magistral between
``[THINK]`` and ``[/THINK]``, openPangu between ``[unused16]`` and ``[unused17]``, or the first two if its vocabulary
has them. Some templates end a prompt with the first mark; a model then begins with its reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from draftwood.runtime.stream import overlap
from draftwood.runtime.text.grammar import Thought
from draftwood.runtime.text.tokenizer import Tokenizer

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("[unused16]", "[unused17]"))
# Tokens of white space that a template may write after the mark.
_SPACE_TOKENS = 4


class ReasoningForm(Struct, kw_only=True):
    """How reasoning is marked; ``special`` has those marks that are special tokens, which a text does not show by
    itself."""

    begin: str
    end: str
    special: list[str] = []


def form_of(tokenizer: Tokenizer | None) -> ReasoningForm | None:
    """The form of a vocabulary; None if it has no such marks."""
    for begin, end in _MARKS:
        if tokenizer is not None and tokenizer.token_id(begin) is not None and tokenizer.token_id(end) is not None:
            special = [mark for mark in (begin, end) if tokenizer.special_id(mark) is not None]
            return ReasoningForm(begin=begin, end=end, special=special)
    return None


def begins_in(prompt: Sequence[int], form: ReasoningForm | None, tokenizer: Tokenizer | None) -> bool:
    """Whether a prompt's token ids end with a form's first mark, and nothing but white space after it."""
    return form is not None and tokenizer is not None and _ends_with(prompt, form.begin, tokenizer)


def thought_after(prompt: Sequence[int], form: ReasoningForm | None, tokenizer: Tokenizer | None) -> Thought | None:
    """The reasoning that may come after a prompt and before a text that is held to a grammar. None without a form, or
    if the prompt ends with the second mark: a template says by that that the model is not to reason."""
    if form is None or tokenizer is None or _ends_with(prompt, form.end, tokenizer):
        return None
    begin, end = tokenizer.token_id(form.begin), tokenizer.token_id(form.end)
    assert end is not None
    return Thought(None if begins_in(prompt, form, tokenizer) else begin, end, form.end)


def _ends_with(prompt: Sequence[int], mark: str, tokenizer: Tokenizer) -> bool:
    """Whether nothing but white space comes after a mark in a prompt."""
    last = list(prompt[-1 - _SPACE_TOKENS :])
    if (number := tokenizer.token_id(mark)) not in last:
        return False
    after = last[len(last) - last[::-1].index(number) :]
    return all(tokenizer.spelling(token) for token in after) and not tokenizer.decode(after).strip()


class Reasoning:
    """Divides a text that comes in pieces into reasoning and answer, without the white space around either.

    Only a text that begins with the first mark, or whose prompt ended with it, has reasoning; any other text is an
    answer, unchanged. So is every text if there is no form.
    """

    def __init__(self, form: ReasoningForm | None) -> None:
        self._begin, self._end = (form.begin, form.end) if form else ("", "")
        self._held = ""
        # The part that comes next: unknown, reasoning, the space after it, or answer.
        self._part = "unknown" if form else "answer"
        # Whether some reasoning was given already, so that white space before more of it is its own.
        self._begun = False

    def begin(self) -> None:
        """The prompt has ended with the first mark; without a form that says nothing."""
        if self._begin:
            self._part = "reasoning"

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that have become clear."""
        self._held += text
        if self._part == "unknown":
            self._look()
        reasoning = self._reasoning() if self._part == "reasoning" else ""
        return reasoning, self._answer() if self._part in ("space", "answer") else ""

    def finish(self) -> tuple[str, str]:
        """The rest, which was held back."""
        rest, self._held = self._held, ""
        if self._part == "reasoning":
            return rest.rstrip(), ""
        return "", rest if self._part == "unknown" else ""

    def _look(self) -> None:
        """Decides whether the text begins with the mark, once that is clear."""
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._held, self._part = text.removeprefix(self._begin), "reasoning"
        elif not self._begin.startswith(text):
            self._part = "answer"

    def _reasoning(self) -> str:
        """What is before the second mark; white space is held back, since the mark may follow it."""
        before, marked, after = self._held.partition(self._end)
        if not self._begun:
            before = before.lstrip()
        if marked:
            self._held, self._part = after, "space"
            return before.rstrip()
        clear = before[: len(before) - overlap(before, [self._end])].rstrip()
        self._held, self._begun = before[len(clear) :], self._begun or bool(clear)
        return clear

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._part == "space":
            text = text.lstrip()
            self._part = "answer" if text else "space"
        return text
