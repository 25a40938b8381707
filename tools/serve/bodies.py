"""The bodies of requests: the fields that clients send, checked, and fields that would change the answer but are not
supported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from draftwood.manifest import DAMAGED
from draftwood.tools.serve.errors import RequestRefused

_Body = TypeVar("_Body", bound=Struct)
# Likeness from which an unknown name counts as a known one that is misspelled.
_NEAR = 0.75

Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1 keep every token")]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, Meta(ge=1, le=16)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
FunctionName = Annotated[str, Meta(pattern=r"^[\w.-]{1,128}$")]
TokenId = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Regex = Annotated[str, Meta(min_length=1)]
Ids = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(min_length=1)]


# The one type of a message's parts that is understood.
TEXT = "text"


class ContentPart(Struct):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class CalledFunction(Struct):
    """``arguments`` are JSON's text."""

    name: str
    arguments: str = "{}"


class AssistantCall(Struct):
    """A call that an answer had, handed back; ``index`` is that of a stream's call."""

    function: CalledFunction
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"


class Function(Struct, omit_defaults=True):
    """A tool as its model knows it; ``strict`` says nothing here."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class Message(Struct):
    """One message of a chat. Its reasoning goes by two names."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = False


class JsonSchema(Struct, rename={"schema_": "schema"}):
    """``strict`` is always the case."""

    schema_: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """The form of the answer: any text, any JSON object, or one of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, rename={"json_": "json"}):
    """The form of the answer as vLLM has it; one of the fields is given."""

    # A schema, or its text.
    json_: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=10000)] | None = None
    grammar: str | None = None


class Extra(Struct):
    """Draftwood's own: ``policy`` is adaptive, plain or a gear's name; ``steps`` sends the tree of every step."""

    policy: str = "adaptive"
    steps: bool = False


class Common(Struct, kw_only=True):
    """The fields of both kinds of completion. Without ``seed`` every answer has one of its own."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # A factor, for the tokens of prompt and answer.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    n: Choices | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # Tokens that end the answer and are not in its text.
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=1000)] | None = None
    ignore_eos: bool | None = False
    user: str | None = None
    response_format: ResponseFormat | None = None
    # Of Lark's or GBNF's syntax.
    grammar: str | None = None
    # That the whole answer matches.
    regex: Regex | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1000)]], Meta(max_length=1000)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=10000)] | None = None
    include_stop_str_in_output: bool | None = False
    draftwood: Extra | None = None


class ChatBody(Common, kw_only=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # False: the prompt ends with the last message; or, with the other one, inside of it.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    # False: the answer's text keeps the model's reasoning, without marks that are special tokens.
    separate_reasoning: bool | None = True
    tools: list[Tool] | None = None
    # With ``required`` or a tool's name the answer is one call, and nothing else.
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True


class CompletionBody(Common, kw_only=True):
    """The body of ``/v1/completions``; without ``max_tokens`` 16, as elsewhere."""

    prompt: str | list[str | int | Ids]
    max_tokens: Tokens | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # As many as ``n``, which OpenAI's server asks for.
    best_of: Choices | None = None


class TokenizeBody(Struct, kw_only=True):
    """The body of ``/tokenize``: a text, or a chat with the fields of a request that its prompt is made of."""

    model: str | None = None
    prompt: str | None = None
    # Of a prompt, and left out the case; a chat's template writes its own.
    add_special_tokens: bool | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None


# Its fields that say nothing of a prompt.
OF_CHATS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "tools", "tool_choice")
# Unsupported fields that would change an answer, with the values that change nothing.
MISSING: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "repeat_penalty": (1,),
    "mirostat": (0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "stream_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "modalities": (["text"],),
    "audio": (),
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}
# Fields that pass, since they change no answer: the asking user, a provider's storage, its charges, and its drafts.
PASS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "request_id",
        "priority",
        "cache_prompt",
    )
)
# Nested ones that pass: clients hand an answer back with what they have made of it.
PASS_NESTED = frozenset(("cache_control", "annotations", "provider_specific_fields", "parsed", "parsed_arguments"))


def parse(content: bytes, kind: type[_Body]) -> _Body:
    """A body of its kind.

    Raises:
        RequestRefused: no JSON, of another form, or something is asked for that is not there; the field is named.
    """
    try:
        fields = msgspec.json.decode(content)
    except DAMAGED as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestRefused(f"the body: expected a JSON object, got {type(fields).__name__}")
    for name, value in fields.items():
        refuse_unsendable(name, value)
    _refuse_unknown(fields, kind)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        where = "".join(re.findall(r"`\$\.(.*)`$", where))  # next to it a key may be named
        param = where or (re.findall(r"required field `(\w+)`", what) or [None])[0]
        raise RequestRefused(f"{param}: {what}" if where else what, param=param) from None


def _refuse_unknown(value: Any, kind: Any, where: str = "") -> None:
    """Refuses fields, at any depth, that a type has not and that would change the answer, and words that are none of a
    field's; ``where`` leads to them."""
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Struct):
        known = _known(kind)
        types = (TEXT,) if kind is ContentPart else get_args(known.get("type"))
        if types and (got := value.get("type", types[0])) not in types:  # it says more than the fields
            _refuse_unknown(got, known["type"], f"{where}type.")
            return
        for name, inner in value.items():
            if name in known:
                _refuse_unknown(inner, known[name], f"{where}{name}.")
            else:
                _refuse_missing(where, name, inner, known)
    elif isinstance(value, list) and get_origin(kind) is list:
        for at, inner in enumerate(value):
            _refuse_unknown(inner, get_args(kind)[0], f"{where.removesuffix('.')}[{at}].")
    elif get_origin(kind) is Literal:
        if isinstance(value, str) and value not in get_args(kind):
            param = where.removesuffix(".")
            raise RequestRefused(f"{param}: expected {' or '.join(get_args(kind))}, got {value:.40}", param)
    else:
        for part in get_args(kind):  # of a union, or of a type with bounds
            _refuse_unknown(value, part, where)


@cache
def _known(kind: type[Struct]) -> dict[str, Any]:
    """The types of a type's fields, by name."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _refuse_missing(where: str, name: str, value: Any, known: Iterable[str]) -> None:
    """Refuses a field that would change the answer and is not there, or that nobody knows."""
    if value is None or name in (PASS_NESTED if where else PASS):
        return
    param = f"{where}{name[:80]}"
    if name not in MISSING:
        near = get_close_matches(name[:80], [*known, *([] if where else MISSING)], 1, _NEAR)
        way_out = f"is {near[0]} meant? if not, leave it out" if near else "leave it out"
        raise RequestRefused(f"{param!a}: no such field; {way_out}", param=param)
    if not any((type(value) is not bool and value == neutral) or value is neutral for neutral in MISSING[name]):
        raise RequestRefused(f"{param}: is not supported here; leave it out", param=param)


def refuse_unsendable(name: str, value: Any) -> None:
    """Refuses values that an engine cannot be sent: whole numbers of more than 64 bits, at any depth, and endless
    depth."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise RequestRefused(f"{name[:80]}: holds a whole number of more than 64 bits", param=name[:80]) from None
    except RecursionError:
        raise RequestRefused(f"{name[:80]}: is nested too deep", param=name[:80]) from None
