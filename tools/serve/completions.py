"""``/v1/chat/completions`` and ``/v1/completions``: from a body to texts, and from their results to an answer."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from draftwood.manifest import UsualSampling
from draftwood.runtime.reasoning import Reasoning
from draftwood.tools.serve.answers import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatDelta,
    Delta,
    FinishReason,
    PromptDetails,
    Speculation,
    TextAnswer,
    TextChoice,
    ToolCall,
    ToolCallDelta,
    Usage,
    chat_logprobs,
    finish_reason,
    text_logprobs,
)
from draftwood.tools.serve.asks import asks, formats_of, tools
from draftwood.tools.serve.bodies import CalledFunction, ChatBody, CompletionBody
from draftwood.tools.serve.calls import Calls, WrittenCall
from draftwood.tools.serve.errors import RequestRefused, failed, unavailable
from draftwood.tools.serve.messages import (
    Begun,
    Busy,
    DraftedStep,
    Ended,
    Failed,
    Piece,
    Refused,
    TokenLogprob,
    ToServer,
)
from draftwood.tools.serve.model import Full, Mailbox, ServedModel


@dataclass
class RunningChoice:
    """One choice, as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Where the text of every token with logprobs begins, in characters.
    offsets: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish: FinishReason | None = None
    # Steps by the number of drafted tokens that they accepted.
    accepted: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    # Tokens that these steps gained.
    gained: int = 0


@dataclass
class News:
    """News of one text since the last time: the steps of one or more pieces together."""

    index: int
    begun: bool = False
    tokens: int = 0
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    offsets: list[int] = field(default_factory=list)
    steps: list[DraftedStep] = field(default_factory=list)
    finish: FinishReason | None = None


class Completion:
    """One request. ``parts`` decodes it; leaving that early, for any reason, drops its texts."""

    def __init__(self, model: ServedModel, body: ChatBody | CompletionBody, limit: int, session: str = "") -> None:
        self.model, self.body = model, body
        chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        form = model.facts.calls if model.facts else None
        offered = tools(body, form)
        usual = model.facts.sampling if model.facts else UsualSampling()
        separate = isinstance(body, ChatBody) and body.separate_reasoning is not False
        reasoning = model.facts.reasoning if model.facts and separate else None
        self._asks = asks(body, limit, form, offered, usual, reasoning)
        for ask in self._asks:
            ask.session = session
        self._choices = body.n or 1
        self.texts = [RunningChoice() for _ in self._asks]
        self._reasoning = [Reasoning(reasoning) for _ in self._asks]
        # The reader of tool calls in a text, if there are tools.
        self._calls: list[Calls] = []
        if isinstance(body, ChatBody) and form is not None and offered:
            names, most = (
                [tool["function"]["name"] for tool in offered],
                1 if body.parallel_tool_calls is False else form.most,
            )
            self._calls = [Calls(form, names, most) for _ in self._asks]

    async def parts(self) -> AsyncIterator[list[News]]:
        """News as it comes. The first waits until all texts have begun or one has come further, so that a prompt that
        is not good is refused before an answer begins.

        Raises:
            RequestRefused: the bundle cannot serve it, too many wait, or the engine failed.
        """
        box, came = Mailbox(), dict[int, News]()
        try:
            try:
                self.model.submit(self._asks, box)
            except Full:
                raise self._full() from None
            while any(text.finish is None for text in self.texts):
                letters = await box.take()
                for index, letter in letters:
                    self._read(index, letter, came)
                if len(came) == len(self.texts) or not all(isinstance(letter, Begun) for _, letter in letters):
                    yield list(came.values())
                    came = {}
        finally:
            self.model.drop(self._asks)

    def _read(self, index: int, letter: ToServer, came: dict[int, News]) -> None:
        text = self.texts[index]
        match letter:
            case Begun():
                came.setdefault(index, News(index)).begun = True
                text.prompt_tokens, text.cached_tokens = letter.prompt_tokens, letter.cached_tokens
                # A grammar that holds the whole text begins at once, whatever the prompt has begun.
                ask = self._asks[index]
                if letter.reasoning and (ask.reasons or ask.options.get("grammar") is None):
                    self._reasoning[index].begin()
            case Piece():
                part = came.setdefault(index, News(index))
                _add(part, text, letter)
                self._add_text(part, letter.text)
            case Ended():
                part = came.setdefault(index, News(index))
                self._add_text(part, "", ended=True)
                text.finish = part.finish = finish_reason(letter.finish, bool(text.calls))
            case Busy():
                raise self._full()
            case Refused():
                param, message = letter.param, letter.message
                if param in ("messages", "prompt"):
                    param = "messages" if isinstance(self.body, ChatBody) else "prompt"
                if len(self.texts) > self._choices:  # of several prompts
                    message = re.sub("^prompt:", f"prompt[{index // self._choices}]:", message)
                if param == "grammar":
                    param = next(iter(formats_of(self.body)), "tools")
                raise RequestRefused(message, param, code=letter.code)
            case Failed():
                raise failed(letter.message)

    def _add_text(self, part: News, written: str, ended: bool = False) -> None:
        """A piece's text to what came and to the whole: reasoning, answer, and the calls in it."""
        text, divided = self.texts[part.index], self._reasoning[part.index]
        reasoning, answer = divided.finish() if ended else divided.push(written)
        pieces: Sequence[str | WrittenCall] = [answer]
        if self._calls:
            calls = self._calls[part.index]
            pieces = calls.push(answer) + (calls.finish() if ended else [])
        part.reasoning += reasoning
        text.reasoning.append(reasoning)
        for piece in pieces:
            if isinstance(piece, str):
                part.text += piece
                text.pieces.append(piece)
            else:
                # Mistral's templates take an id of nine letters and digits alone, when a client sends the call back.
                call = ToolCall(uuid.uuid4().hex[:9], CalledFunction(piece.name, piece.arguments))
                part.calls.append(ToolCallDelta(call.id, call.function, index=len(text.calls)))
                text.calls.append(call)

    def _full(self) -> RequestRefused:
        self.model.metrics.rejected()
        return unavailable("as many requests as may wait do wait; try again soon", "queue_full")

    @property
    def usage(self) -> Usage:
        # Choices of one prompt share it.
        prompt = sum(text.prompt_tokens for text in self.texts[:: self._choices])
        tokens = sum(text.tokens for text in self.texts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=tokens,
            total_tokens=prompt + tokens,
            prompt_tokens_details=PromptDetails(sum(text.cached_tokens for text in self.texts[:: self._choices])),
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
        logprobs = self.body.logprobs is not None
        texts = [_text_choice(index, text, logprobs) for index, text in enumerate(self.texts)]
        return TextAnswer(object="text_completion", choices=texts, **common)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; the first one comes when the prompts are known to be good."""
        options = self.body.stream_options
        usage = bool(options and options.include_usage)
        async for parts in self.parts():
            for part in parts:
                if part.begun:
                    yield event(self._opening(part.index, usage))
                # The reason has a chunk of its own: some clients read no text next to it.
                finish, part.finish = part.finish, None
                if part != News(part.index, begun=part.begun):
                    yield event(self._chunk(part, usage))
                if finish is not None:
                    yield event(self._chunk(News(part.index, finish=finish), usage))
        if usage:
            last = self._made([], True)
            last.usage = self.usage
            yield event(last)
        yield b"data: [DONE]\n\n"

    def _opening(self, index: int, usage: bool) -> ChatChunk | TextAnswer:
        chat = isinstance(self.body, ChatBody)
        opened = ChatDelta(index=index, delta=Delta("assistant", "")) if chat else TextChoice(index=index, text="")
        return self._made([opened], usage)

    def _chunk(self, part: News, usage: bool) -> ChatChunk | TextAnswer:
        choice: ChatDelta | TextChoice
        if isinstance(self.body, ChatBody):
            other = part.finish or part.calls or part.reasoning
            delta = Delta(content=part.text) if part.text or not other else Delta()
            delta.reasoning_content, delta.tool_calls = part.reasoning or UNSET, part.calls or UNSET
            logprobs = chat_logprobs(part.logprobs)
            choice = ChatDelta(index=part.index, delta=delta, logprobs=logprobs, finish_reason=part.finish)
        else:
            choice = TextChoice(
                index=part.index,
                text=part.text,
                logprobs=text_logprobs(part.logprobs, part.offsets),
                finish_reason=part.finish,
            )
        chunk = self._made([choice], usage)
        if part.steps:
            chunk.draftwood = part.steps
        return chunk

    def _made(self, choices: list[Any], usage: bool) -> ChatChunk | TextAnswer:
        """A chunk; with ``usage`` its own is null, which the last one replaces."""
        chat = isinstance(self.body, ChatBody)
        kind: type[ChatChunk | TextAnswer] = ChatChunk if chat else TextAnswer
        return kind(
            id=self.id,
            object="chat.completion.chunk" if chat else "text_completion",
            created=self.created,
            model=self.model.name,
            choices=choices,
            usage=None if usage else UNSET,
        )


def event(content: Any) -> bytes:
    """A server-sent event."""
    data = msgspec.json.encode(content)
    for end in "\x85\u2028\u2029":  # many clients take them for the line's end, as Python's splitlines does
        data = data.replace(end.encode(), f"\\u{ord(end):04x}".encode())
    return b"data: " + data + b"\n\n"


def _add(part: News, text: RunningChoice, piece: Piece) -> None:
    """A piece but for its text, to what came and to the whole."""
    part.tokens += piece.tokens
    text.tokens += piece.tokens
    if piece.logprobs is not None:
        part.logprobs = [*(part.logprobs or ()), *piece.logprobs]
        part.offsets += piece.offsets
        text.logprobs += piece.logprobs
        text.offsets += piece.offsets
    if piece.step is not None:
        part.steps.append(piece.step)
    if piece.drafted:
        text.drafted += piece.drafted
        text.gained += piece.tokens
        text.accepted[piece.accepted] += 1


def _speculation(texts: Sequence[RunningChoice]) -> Speculation | None:
    counts = sum((text.accepted for text in texts), Counter[int]())
    steps, accepted = counts.total(), sum(counts.elements())
    if not steps:
        return None
    return Speculation(
        num_spec_steps=steps,
        num_draft_tokens=sum(text.drafted for text in texts),
        num_accepted_tokens=accepted,
        mean_acceptance_length=sum(text.gained for text in texts) / steps,
        acceptance_histogram=[counts[many] for many in range(max(counts) + 1)],
    )


def _chat_choice(index: int, text: RunningChoice, logprobs: bool) -> ChatChoice:
    assert text.finish is not None
    return ChatChoice(
        index=index,
        message=AnswerMessage(
            "".join(text.pieces) or (None if text.calls else ""),
            reasoning_content="".join(text.reasoning) or UNSET,
            tool_calls=text.calls or UNSET,
        ),
        logprobs=chat_logprobs(text.logprobs) if logprobs else None,
        finish_reason=text.finish,
    )


def _text_choice(index: int, text: RunningChoice, logprobs: bool) -> TextChoice:
    return TextChoice(
        index=index,
        text="".join(text.pieces),
        logprobs=text_logprobs(text.logprobs, text.offsets) if logprobs else None,
        finish_reason=text.finish,
    )
