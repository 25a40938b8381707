"""``/v1/chat/completions`` and ``/v1/completions``: from a body to texts, and from what they give to an answer."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from draftwood.tools.serve.answers import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    Delta,
    FinishReason,
    Speculation,
    TextAnswer,
    TextChoice,
    Usage,
    chat_logprobs,
    finish_reason,
    text_logprobs,
)
from draftwood.tools.serve.bodies import ChatBody, CompletionBody, Extra, chat_messages, prompts
from draftwood.tools.serve.errors import RequestRefused, failed, unavailable
from draftwood.tools.serve.messages import Ask, Begun, Drawn, Ended, Failed, Piece, Refused, Step, ToServer
from draftwood.tools.serve.model import Full, Mailbox, ServedModel

DEFAULT_COMPLETION_TOKENS = 16
# Texts of one request: prompts times choices.
MOST_TEXTS = 64


@dataclass
class Text:
    """One choice, as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[Drawn] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    finish: FinishReason | None = None
    # By how many drafted tokens a step accepted: steps.
    accepted: dict[int, int] = field(default_factory=dict)
    drafted: int = 0


@dataclass
class Part:
    """What one text got since the last time: the steps of one or more pieces together."""

    index: int
    text: str = ""
    logprobs: list[Drawn] | None = None
    steps: list[Step] = field(default_factory=list)
    finish: FinishReason | None = None


class Completion:
    """One request. ``parts`` decodes it; leaving that early, for whatever reason, drops its texts."""

    def __init__(self, model: ServedModel, body: ChatBody | CompletionBody, limit: int) -> None:
        self.model, self.body = model, body
        chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._asks = asks(body, limit)
        self._choices = body.n or 1
        self.texts = [Text() for _ in self._asks]

    async def parts(self) -> AsyncIterator[list[Part]]:
        """What came, as it comes; first an empty list, once the prompts are known to be good.

        Raises:
            RequestRefused: the bundle cannot serve it, no place is free, or the engine failed.
        """
        box, begun = Mailbox(), 0
        try:
            self.model.submit(self._asks, box)
        except Full:
            raise unavailable("as many requests as may wait do wait; try again soon", "queue_full") from None
        try:
            while any(text.finish is None for text in self.texts):
                letters = await box.take()
                came: dict[int, Part] = {}
                for index, letter in letters:
                    begun += isinstance(letter, Begun)
                    self._read(index, letter, came)
                if begun == len(self.texts):
                    begun = 0  # told once
                    yield []
                if came:
                    yield list(came.values())
        finally:
            self.model.drop(self._asks)

    def _read(self, index: int, letter: ToServer, came: dict[int, Part]) -> None:
        text = self.texts[index]
        match letter:
            case Begun():
                text.prompt_tokens = letter.prompt_tokens
            case Piece():
                _add(came.setdefault(index, Part(index)), text, letter)
            case Ended():
                text.finish = finish_reason(letter.finish)
                came.setdefault(index, Part(index)).finish = text.finish
            case Refused():
                param = letter.param
                if param == "messages" and isinstance(self.body, CompletionBody):
                    param = "prompt"
                raise RequestRefused(letter.message, param, code=letter.code)
            case Failed():
                raise failed(letter.message)

    @property
    def usage(self) -> Usage:
        # Choices of one prompt share it.
        prompt = sum(text.prompt_tokens for text in self.texts[:: self._choices])
        tokens = sum(text.tokens for text in self.texts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=tokens,
            total_tokens=prompt + tokens,
            speculative_decoding=_speculation(self.texts),
        )

    async def whole(self) -> ChatAnswer | TextAnswer:
        """The answer that is not streamed."""
        async for _ in self.parts():
            pass
        common: dict[str, Any] = {"id": self.id, "created": self.created, "model": self.model.name, "usage": self.usage}
        if isinstance(self.body, ChatBody):
            chats = [_chat_choice(index, text, bool(self.body.logprobs)) for index, text in enumerate(self.texts)]
            return ChatAnswer(object="chat.completion", choices=chats, **common)
        asked = self.body.logprobs is not None
        texts = [_text_choice(index, text, asked) for index, text in enumerate(self.texts)]
        return TextAnswer(object="text_completion", choices=texts, **common)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events; the first one comes when the prompts are known to be good."""
        options = self.body.stream_options
        usage = bool(options and options.include_usage)
        offsets = [0] * len(self.texts)
        async for parts in self.parts():
            if not parts:
                for index in range(len(self.texts)):
                    yield _event(self._opening(index, usage))
            for part in parts:
                yield _event(self._chunk(part, offsets[part.index], usage))
                offsets[part.index] += len(part.text)
        if usage:
            yield _event(self._last())
        yield b"data: [DONE]\n\n"

    def _opening(self, index: int, usage: bool) -> ChatChunk | TextAnswer:
        if isinstance(self.body, ChatBody):
            return self._chat_chunk(ChatDelta(index=index, delta=Delta("assistant", "")), usage)
        return self._text_chunk(TextChoice(index=index, text=""), usage)

    def _chunk(self, part: Part, offset: int, usage: bool) -> ChatChunk | TextAnswer:
        made: ChatChunk | TextAnswer
        if isinstance(self.body, ChatBody):
            delta = Delta(content=part.text) if part.text or not part.finish else Delta()
            choice = ChatDelta(
                index=part.index,
                delta=delta,
                logprobs=chat_logprobs(part.logprobs),
                finish_reason=part.finish,
            )
            made = self._chat_chunk(choice, usage)
        else:
            made = self._text_chunk(
                TextChoice(
                    index=part.index,
                    text=part.text,
                    logprobs=text_logprobs(part.logprobs, offset),
                    finish_reason=part.finish,
                ),
                usage,
            )
        if part.steps:
            made.draftwood = part.steps
        return made

    def _chat_chunk(self, choice: ChatDelta | None, usage: bool) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model.name,
            choices=[choice] if choice is not None else [],
            usage=None if usage else msgspec.UNSET,
        )

    def _text_chunk(self, choice: TextChoice | None, usage: bool) -> TextAnswer:
        return TextAnswer(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model.name,
            choices=[choice] if choice is not None else [],
            usage=None if usage else msgspec.UNSET,
        )

    def _last(self) -> ChatChunk | TextAnswer:
        chat = isinstance(self.body, ChatBody)
        made = self._chat_chunk(None, True) if chat else self._text_chunk(None, True)
        made.usage = self.usage
        return made


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def error_event(error: RequestRefused) -> bytes:
    """An error in the middle of a stream; nothing follows it."""
    return _event(error.body)


def _add(part: Part, text: Text, piece: Piece) -> None:
    """A piece, to what came and to the whole."""
    part.text += piece.text
    text.pieces.append(piece.text)
    text.tokens += piece.tokens
    if piece.logprobs is not None:
        part.logprobs = [*(part.logprobs or ()), *piece.logprobs]
        text.logprobs += piece.logprobs
    if piece.step is not None:
        part.steps.append(piece.step)
    if piece.drafted:
        text.drafted += piece.drafted
        text.accepted[piece.accepted] = text.accepted.get(piece.accepted, 0) + 1


def _speculation(texts: Sequence[Text]) -> Speculation | None:
    counts: dict[int, int] = {}
    for text in texts:
        for accepted, steps in text.accepted.items():
            counts[accepted] = counts.get(accepted, 0) + steps
    steps, accepted = sum(counts.values()), sum(many * times for many, times in counts.items())
    if not steps:
        return None
    return Speculation(
        num_spec_steps=steps,
        num_draft_tokens=sum(text.drafted for text in texts),
        num_accepted_tokens=accepted,
        mean_acceptance_length=1 + accepted / steps,
        acceptance_histogram=[counts.get(many, 0) for many in range(max(counts) + 1)],
    )


def _chat_choice(index: int, text: Text, logprobs: bool) -> ChatChoice:
    assert text.finish is not None
    return ChatChoice(
        index=index,
        message=AnswerMessage("".join(text.pieces)),
        logprobs=chat_logprobs(text.logprobs) if logprobs else None,
        finish_reason=text.finish,
    )


def _text_choice(index: int, text: Text, logprobs: bool) -> TextChoice:
    return TextChoice(
        index=index,
        text="".join(text.pieces),
        logprobs=text_logprobs(text.logprobs, 0) if logprobs else None,
        finish_reason=text.finish,
    )


def asks(body: ChatBody | CompletionBody, limit: int) -> list[Ask]:
    """The texts of a request, prompt by prompt, each ``n`` times with seeds that follow each other.

    Raises:
        RequestRefused: too many, or more tokens than an answer may have.
    """
    given: Sequence[str | list[int] | dict[str, Any]]
    if isinstance(body, ChatBody):
        chat: dict[str, Any] = {"messages": chat_messages(body.messages)}
        given = [chat | {"chat_template_kwargs": body.chat_template_kwargs or {}}]
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        tokens = getattr(body, name)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestRefused("top_logprobs: needs logprobs to be true", "top_logprobs")
    else:
        given, name, logprobs = prompts(body.prompt), "max_tokens", body.logprobs
        tokens = min(DEFAULT_COMPLETION_TOKENS, limit) if body.max_tokens is None else body.max_tokens
    if tokens is not None and tokens > limit:
        raise RequestRefused(f"{name}: this server answers with at most {limit} tokens, got {tokens}", name)
    if len(given) * (body.n or 1) > MOST_TEXTS:
        raise RequestRefused(f"n: at most {MOST_TEXTS} texts a request, prompts times n", "n")
    seed = random.getrandbits(63) if body.seed is None else body.seed
    extra = body.draftwood or Extra()
    return [
        Ask(
            id=0,
            prompt=prompt,
            max_new_tokens=tokens,
            limit=limit,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            seed=(seed + number) % 2**64,
            stop=[body.stop] if isinstance(body.stop, str) else list(body.stop or ()),
            ignore_eos=bool(body.ignore_eos),
            policy=extra.policy,
            logprobs=logprobs,
            steps=extra.steps and bool(body.stream),
        )
        for prompt in given
        for number in range(body.n or 1)
    ]
