"""From a request's body to the texts that it asks for."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from draftwood.manifest import DAMAGED, UsualSampling
from draftwood.runtime.options import Asked
from draftwood.runtime.reasoning import ReasoningForm
from draftwood.tools.serve.bodies import (
    TEXT,
    AssistantCall,
    ChatBody,
    Common,
    CompletionBody,
    Extra,
    Ids,
    Message,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    TokenizeBody,
    refuse_unsendable,
)
from draftwood.tools.serve.calls import CallForm, forced
from draftwood.tools.serve.errors import RequestRefused
from draftwood.tools.serve.messages import Ask, WrittenChat

DEFAULT_COMPLETION_TOKENS = 16
# Texts of one request: prompts times choices.
MOST_TEXTS = 64


_Number = TypeVar("_Number", int, float)
# Tools as chat templates are given them.
Tools = list[dict[str, Any]]


def asks(
    body: ChatBody | CompletionBody,
    limit: int,
    form: CallForm | None,
    tools: Tools,
    usual: UsualSampling,
    reasoning: ReasoningForm | None = None,
) -> list[Ask]:
    """The texts of a request, prompt by prompt, each ``n`` times with seeds that follow each other.

    Args:
        limit: tokens that an answer may have.
        form: how the model writes calls of tools; None if it takes none.
        tools: those that it knows of.
        usual: the sampling if the body says nothing.
        reasoning: how the answers' reasoning is marked, if it is to be separated.

    Raises:
        RequestRefused: too many, more tokens than an answer may have, or what the model cannot be asked for.
    """
    texts: Sequence[str | list[int] | WrittenChat]
    if isinstance(body, ChatBody):
        texts = [chat_of(body, tools)]
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        tokens = getattr(body, name)
        if body.max_tokens not in (None, tokens):
            text = f"max_tokens: {body.max_tokens}, but max_completion_tokens is {tokens} and means the same"
            raise RequestRefused(f"{text}; leave one out", "max_tokens")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs and not body.logprobs:
            raise RequestRefused("top_logprobs: needs logprobs to be true", "top_logprobs")
    else:
        texts, name, logprobs = prompts(body.prompt), "max_tokens", body.logprobs
        tokens = min(DEFAULT_COMPLETION_TOKENS, limit) if body.max_tokens is None else body.max_tokens
        if body.best_of not in (None, 1, body.n or 1):
            raise RequestRefused(f"best_of: expected n, since all texts are given, got {body.best_of}", "best_of")
    if tokens is not None and tokens > limit:
        raise RequestRefused(f"{name}: this server answers with at most {limit} tokens, got {tokens}", name)
    if len(texts) * (body.n or 1) > MOST_TEXTS:
        raise RequestRefused(f"n: at most {MOST_TEXTS} texts a request, prompts times n", "n")
    extra, options = body.draftwood or Extra(), _options(body, usual)
    options |= {"max_new_tokens": limit if tokens is None else tokens, "logprobs": logprobs}
    special = [*form.tokens] if form is not None and tools else []
    special += reasoning.special if reasoning else []
    options |= {"grammar": grammar(body, form, tools), "special_tokens": special}
    # A grammar that the client wrote is one of the whole text.
    whole = body.grammar or (body.structured_outputs and body.structured_outputs.grammar)
    seed = random.getrandbits(63) if body.seed is None else body.seed
    return [
        Ask(
            id=0,
            prompt=prompt,
            options={**options, "seed": (seed + number) % 2**64},
            policy=extra.policy,
            steps=extra.steps and bool(body.stream),
            reasons=reasoning is not None and not whole,
        )
        for prompt in texts
        for number in range(body.n or 1)
    ]


def _options(body: Common, usual: UsualSampling) -> Asked:
    """The options that a body has under their own names; OpenAI's usual temperature is 1."""
    options: Asked = {
        "temperature": _first(body.temperature, usual.temperature, 1.0),
        "top_p": _first(body.top_p, usual.top_p, 1.0),
        "top_k": max(_first(body.top_k, usual.top_k, 0), 0),
        "min_p": _first(body.min_p, usual.min_p, 0.0),
        "repetition_penalty": _first(body.repetition_penalty, usual.repetition_penalty, 1.0),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "stop": body.stop or [],
        "stop_token_ids": body.stop_token_ids or [],
        "ignore_eos": bool(body.ignore_eos),
        "bad_words": body.bad_words or [],
        "min_tokens": body.min_tokens or 0,
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
    }
    return options if body.allowed_token_ids is None else {**options, "allowed_token_ids": body.allowed_token_ids}


def _first(*values: _Number | None) -> _Number:
    """The first that is there."""
    return next(value for value in values if value is not None)


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates know them: content as one string, OpenAI's ``developer`` as ``system``."""
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        for at, part in enumerate(content):
            if part.type != TEXT or part.text is None:
                where = f"messages[{number}].content[{at}]"
                raise RequestRefused(f"{where}: only parts of type text are understood, got {part.type:.40}", where)
        content = "\n".join(part.text or "" for part in content)
    fields = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    more = {
        "name": message.name,
        "reasoning_content": message.reasoning_content if message.reasoning is None else message.reasoning,
        "tool_calls": [_called(call) for call in message.tool_calls or []] or None,
        "tool_call_id": message.tool_call_id,
    }
    return fields | {name: value for name, value in more.items() if value is not None}


def _called(call: AssistantCall) -> dict[str, Any]:
    """A call as templates know it, its arguments an object; arguments that are no JSON stay text."""
    arguments: Any = call.function.arguments
    with contextlib.suppress(*DAMAGED):
        arguments = msgspec.json.decode(arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def chat_of(body: ChatBody | TokenizeBody, tools: Tools) -> WrittenChat:
    """The chat of a request, as `draftwood.runtime.text.messages.Chat` has it; RequestRefused as ``chat_messages``, or
    if the arguments of a call are nested too deep."""
    chat = {
        "messages": chat_messages(body.messages or []),
        "tools": tools or None,
        "chat_template_kwargs": body.chat_template_kwargs or {},
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": bool(body.continue_final_message),
    }
    try:
        return WrittenChat(msgspec.json.encode(chat))
    except RecursionError:
        raise RequestRefused("messages: arguments of a call are nested too deep", "messages") from None


def tools(body: Common | TokenizeBody, form: CallForm | None) -> Tools:
    """The tools that the model knows of; none if it may call none.

    Raises:
        RequestRefused: the model takes none, a choice that names none of them, or a name twice.
    """
    if not isinstance(body, ChatBody | TokenizeBody) or body.tool_choice == "none":
        return []
    offered: Tools = msgspec.to_builtins(body.tools or [])
    if offered and form is None:
        text = "tools: this bundle's chat template takes none, or has calls written in a form that is not known here"
        raise RequestRefused(text, "tools")
    names = [tool["function"]["name"] for tool in offered]
    if len(set(names)) < len(names):
        raise RequestRefused("tools: two of them have one name", "tools")
    chosen = body.tool_choice
    if isinstance(chosen, NamedTool) and chosen.function.name not in names:
        raise RequestRefused(f"tool_choice: {chosen.function.name:.80} is none of the tools", "tool_choice")
    if chosen == "required" and not offered:
        raise RequestRefused("tool_choice: required, but there are no tools", "tool_choice")
    return offered


def grammar(body: Common, form: CallForm | None, tools: Tools) -> str | dict[str, Any] | None:
    """The form that the answer is held to: a JSON schema, a grammar's text, or nothing.

    Raises:
        RequestRefused: two things at once, or a format without its schema.
    """
    formats = formats_of(body)
    name = next(iter(formats), "")
    if len(formats) > 1:
        raise RequestRefused(f"{name}: expected one of {' and '.join(formats)}", name)
    if tools and formats:
        raise RequestRefused(f"{name}: not together with tools, whose calls have a form of their own", name)
    if tools and isinstance(body, ChatBody) and form is not None and body.tool_choice not in (None, "auto"):
        chosen = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
        return forced(form, [tool for tool in tools if chosen in (None, tool["function"]["name"])])
    return formats.get(name)


def formats_of(body: Common) -> dict[str, str | dict[str, Any]]:
    """The grammars and schemas that a body gives, by the fields that give them."""
    written = {
        "grammar": body.grammar or None,
        "regex": _lark(body.regex) if body.regex else None,
        "response_format": None if body.response_format is None else _schema(body.response_format),
        "structured_outputs": None if body.structured_outputs is None else _structured(body.structured_outputs),
    }
    # Compared with None: the schema {} stands for any JSON.
    return {name: form for name, form in written.items() if form is not None}


def _structured(asked: StructuredOutputs) -> str | dict[str, Any]:
    """The grammar or schema of vLLM's field."""
    where = "structured_outputs"
    fields = {name: value for name, value in msgspec.to_builtins(asked).items() if value not in (None, "", False)}
    if len(fields) != 1:
        kinds = ", ".join(field.encode_name for field in msgspec.structs.fields(StructuredOutputs))
        raise RequestRefused(f"{where}: expected one of {kinds}, got {' and '.join(fields) or 'none'}", where)
    match fields:
        case {"regex": str(pattern)}:
            return _lark(pattern)
        case {"choice": list(texts)}:
            # Lark's literals take DEL by its number alone.
            return "start: " + " | ".join(json.dumps(t, ensure_ascii=False).replace("\x7f", "\\u007f") for t in texts)
        case {"json": str(text)}:
            return _decoded(f"{where}.json", text)
        case {"json": dict(schema)}:
            return schema
        case {"grammar": str(text)}:
            return text
    return {"type": "object"}


def _decoded(where: str, text: str) -> dict[str, Any]:
    """A schema that came as text."""
    try:
        schema = msgspec.json.decode(text)
    except DAMAGED as error:
        raise RequestRefused(f"{where}: no JSON ({error})", where) from None
    refuse_unsendable(where, schema)
    if not isinstance(schema, dict):
        raise RequestRefused(f"{where}: expected a schema, an object", where)
    return schema


def _schema(response: ResponseFormat) -> dict[str, Any] | None:
    """The schema of a response's format; None if that is any text."""
    where = "response_format.json_schema"
    if response.type != "json_schema":
        if response.json_schema is not None:
            raise RequestRefused(f"{where}: needs the type json_schema, got {response.type}", where)
        return None if response.type == "text" else {"type": "object"}
    if response.json_schema is None:
        raise RequestRefused(f"{where}: is missing", where)
    return response.json_schema.schema_


def _lark(pattern: str) -> str:
    """A grammar, in Lark's syntax, of the texts that a regular expression matches whole."""
    written = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
    escaped = re.sub(r"\\.|[/\n\r]", lambda one: written.get(one[0], one[0]), pattern, flags=re.DOTALL)
    return f"start: /{escaped}/"


def prompts(given: str | list[str | int | Ids]) -> list[str | list[int]]:
    """The prompts of a completion: a text, token ids, or a list of either.

    Raises:
        RequestRefused: an empty list, or a mixture.
    """
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(part, int) for part in given):
        return [[part for part in given if isinstance(part, int)]]
    separate = [part for part in given if not isinstance(part, int)]
    if not separate or len(separate) < len(given):
        raise RequestRefused("prompt: expected a text, token ids, or a list of either", "prompt")
    return separate
