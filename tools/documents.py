"""Long prompts made of short ones: a question after documents, both from one prompt file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.prompts import Prompt, chat_ids


def behind_documents(prompts: Sequence[Prompt], at: int, tokens: int, tokenizer: Tokenizer) -> Prompt | None:
    """The prompt at a place after the others, of about so many tokens in all; None if it alone has more."""
    question = prompts[at]
    room = tokens - _tokens(question, tokenizer)
    if room < 0:
        return None
    others, before = [*prompts[at + 1 :], *prompts[:at]], list[int]()
    while len(before) < room:  # a short file is read again
        for other in others or prompts:
            before += tokenizer.encode(other.text + "\n\n")
    return replace(question, text=tokenizer.decode(before[:room]) + "\n\n" + question.text)


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> int:
    return len(chat_ids(tokenizer, [{"role": "user", "content": prompt.text}]))
