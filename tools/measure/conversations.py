"""Conversations: prompts by conversation, the token ids of every turn, and long prompts made of documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from draftwood.errors import RequestError
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools.documents import behind_documents
from draftwood.tools.prompts import Prompt, chat_ids

# Long texts begin with every seventh prompt, so that few texts are of many kinds.
STRIDE = 7


class Conversation:
    """Questions and answers so far, and the ids that a model reads of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._messages = tokenizer, list[dict[str, str]]()

    def ask(self, prompt: Prompt) -> list[int]:
        """The ids of the next turn, after all turns before it and their answers."""
        self._messages.append({"role": "user", "content": prompt.text})
        return chat_ids(self._tokenizer, self._messages)

    def answer(self, token_ids: Sequence[int]) -> None:
        """Adds the model's answer to the last turn."""
        self._messages.append({"role": "assistant", "content": self._tokenizer.decode(token_ids)})


def turn_prompts(
    engine: Engine, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[Prompt, list[int]]]:
    """Token ids of every turn; the answer to a conversation's last turn is looked up by the conversation's name.

    A turn that the context has no room for is said and left out, and so are the later ones of its conversation.

    Raises:
        RequestError: no turn is left.
    """
    begun, ended, some = dict[str, Conversation](), set[str](), False
    context = engine.bundle.manifest.dims.context
    for prompt in prompts:
        if prompt.conversation in ended:
            continue
        conversation = begun.setdefault(prompt.conversation, Conversation(tokenizer_of(engine)))
        if prompt.conversation in answers:
            conversation.answer(answers[prompt.conversation])
        if len(ids := conversation.ask(prompt)) < context:
            some = True
            yield prompt, ids
            continue
        ended.add(prompt.conversation)
        too_long = f"{len(ids)} tokens, but the bundle's context is {context} with the answer"
        print(f"prompt {prompt.id}: left out with what follows it: {too_long}", file=sys.stderr)
    if ended and not some:
        raise RequestError(f"no prompt is left: {too_long}; shorten the prompts or build with a larger --kv")


def tokenizer_of(engine: Engine) -> Tokenizer:
    """The bundle's; callers with text prompts have checked that it is there."""
    assert engine.bundle.tokenizer is not None, "text prompts need a tokenizer"
    return engine.bundle.tokenizer


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text that tokens add to a prompt's: decoded alone, the first one may lose its space, and code its depth."""
    return tokenizer.decode([*prompt, *token_ids])[len(tokenizer.decode(prompt)) :]


def by_conversation(prompts: Sequence[Prompt], limit: int | None = None) -> list[list[Prompt]]:
    """Turns by conversation; with a limit, conversations are taken from the sources in turn, evenly over each."""
    whole: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        whole.setdefault(prompt.conversation, []).append(prompt)
    if limit is None or limit >= len(whole):
        return list(whole.values())
    sources: dict[str, list[list[Prompt]]] = {}
    for turns in whole.values():
        sources.setdefault(turns[0].source, []).append(turns)
    counts, left = dict[str, int](), limit
    for number, source in enumerate(sorted(sources, key=lambda name: len(sources[name]))):
        # What a small source does not have falls to the larger ones.
        counts[source] = min(-(-left // (len(sources) - number)), len(sources[source]))
        left -= counts[source]
    return [
        conversations[at * len(conversations) // counts[source]]
        for source, conversations in sources.items()
        for at in range(counts[source])
    ]


def long_texts(engine: Engine, prompts: Sequence[Prompt], length: int) -> Iterator[tuple[str, list[int]]]:
    """Names and ids of prompts of about ``length`` tokens: documents before a question, both of the prompts."""
    tokenizer = tokenizer_of(engine)
    for at in (at for first in range(STRIDE) for at in range(first, len(prompts), STRIDE)):
        if text := behind_documents(prompts, at, length, tokenizer):
            yield text.id, Conversation(tokenizer).ask(text)
