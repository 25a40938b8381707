"""Long prompts made of short ones: a question behind documents, both from one prompt file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.prompts import Prompt


def behind_documents(prompts: Sequence[Prompt], at: int, tokens: int, tokenizer: Tokenizer) -> Prompt | None:
    """The prompt at a place behind the others, of about so many tokens in all; None where it alone has more."""
    question = prompts[at]
    chat = [{"role": "user", "content": question.text}]
    room = tokens - len(tokenizer.chat(chat) if tokenizer.has_chat else tokenizer.encode(question.text))
    if room < 0:
        return None
    others, before = [*prompts[at + 1 :], *prompts[:at]], list[int]()
    while len(before) < room:  # a short file is read again
        for other in others or prompts:
            before += tokenizer.encode(other.text + "\n\n")
    return replace(question, text=tokenizer.decode(before[:room]) + "\n\n" + question.text)


def behind_in_turn(prompts: Sequence[Prompt], lengths: Sequence[int], tokenizer: Tokenizer) -> list[Prompt]:
    """Conversations that begin behind documents of one length after the other; as they are where that is 0."""
    begun: dict[str, int] = {}
    found = list(prompts)
    for at, prompt in enumerate(prompts):
        if prompt.conversation not in begun:
            tokens = lengths[len(begun) % len(lengths)]
            begun[prompt.conversation] = tokens
            found[at] = behind_documents(prompts, at, tokens, tokenizer) or prompt
    return found
