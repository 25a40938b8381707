"""The bodies of answers, whole and in chunks."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from draftwood.runtime.decoding import Finish
from draftwood.tools.serve.bodies import CalledFunction
from draftwood.tools.serve.messages import DraftedStep, TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


class Speculation(Struct, kw_only=True):
    """The gain of drafting for one answer. ``mean_acceptance_length`` is the tokens that a drafted step gained;
    ``acceptance_histogram[k]`` is how many steps accepted k drafted tokens. Tokens after the end count nowhere."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    acceptance_histogram: list[int]


class PromptDetails(Struct):
    """``cached_tokens`` of the prompt were known from an ended text."""

    cached_tokens: int


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    speculative_decoding: Speculation | None = None


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ToolCall(Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(ToolCall, kw_only=True):
    """A call comes whole, in one delta."""

    index: int


class AnswerMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatDelta(Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Answer(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str


class ChatAnswer(Answer, kw_only=True):
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Answer, kw_only=True):
    choices: list[ChatDelta]
    # Null in every chunk but the last one, and only if it was asked for.
    usage: Usage | UnsetType | None = UNSET
    # The steps of this chunk, if they were asked for.
    draftwood: list[DraftedStep] | UnsetType = UNSET


class TextAnswer(Answer, kw_only=True):
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    draftwood: list[DraftedStep] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True):
    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "draftwood"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ModelHealth(Struct, kw_only=True):
    ready: bool
    restarts: int
    running: int
    waiting: int
    # Share of the caches' budget that running texts need.
    cache_usage: float


class Health(Struct, kw_only=True):
    status: Literal["ok", "starting", "draining"]
    models: dict[str, ModelHealth]


class Version(Struct):
    version: str


class Tokenized(Struct):
    tokens: list[int]
    count: int
    max_model_len: int | None


def finish_reason(finish: Finish, called: bool) -> FinishReason:
    """In OpenAI's words; ``called`` says whether the text had calls of tools."""
    if finish != "stop":
        return "length"
    return "tool_calls" if called else "stop"


def chat_logprobs(drawn: list[TokenLogprob] | None) -> ChatLogprobs | None:
    return None if drawn is None else ChatLogprobs(drawn)


def text_logprobs(drawn: list[TokenLogprob] | None, offsets: list[int]) -> TextLogprobs | None:
    """``offsets``: where the text of every token begins."""
    if drawn is None:
        return None
    return TextLogprobs(
        [drawing.token for drawing in drawn],
        [drawing.logprob for drawing in drawn],
        # Parts of characters look alike; the likeliest of them stands.
        [{other.token: other.logprob for other in reversed(drawing.top_logprobs)} for drawing in drawn],
        offsets,
    )
