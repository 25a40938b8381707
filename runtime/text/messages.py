"""Input of a chat template: messages, tools, documents and switches, checked to be JSON's own values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwood.errors import RequestError

# A tool's JSON schema is some ten levels deep.
_DEEPEST = 64
# Names that a message's reasoning goes by; a template that knows one of them gets it by that one.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Stands at the end of a text that is to be continued while a template renders it, as in transformers. Its space shows
# whether the template cuts the text.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat, its fields named as in the chat requests of vLLM and SGLang.

    ``chat_template_kwargs`` are the template's own switches, such as ``{"enable_thinking": False}`` for Qwen3. Without
    ``add_generation_prompt`` the prompt ends with the last message; with ``continue_final_message`` inside of it, and
    the answer goes on with its text.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def of(cls, given: Any) -> Chat:
        """From a list of messages, or an object of the fields above.

        Raises:
            RequestError: it is neither, or holds fields that a template cannot use; field and index are named.
        """
        if not isinstance(given, Mapping):
            return cls(_messages(given))
        if unknown := [name for name in given if name not in cls.__slots__]:
            raise RequestError(f"chat: no field {unknown[0]!r} is known; expected {', '.join(cls.__slots__)}")
        switches = given.get("chat_template_kwargs") or {}
        if not isinstance(switches, Mapping):
            raise RequestError(f"chat: chat_template_kwargs: expected an object, got {type(switches).__name__}")
        if fields := [name for name in cls.__slots__ if name in switches and name != "documents"]:
            raise RequestError(
                f"chat: chat_template_kwargs: {fields[0]} is a field of its own; give it next to this one"
            )
        continued = _switch(given, "continue_final_message", False)
        chat = cls(
            _messages(given.get("messages")),
            _objects(given.get("tools"), "tools"),
            # A server's requests have no such field; theirs stand among the switches.
            _objects(given.get("documents") or switches.get("documents"), "documents"),
            _json(switches, "chat_template_kwargs"),
            _switch(given, "add_generation_prompt", not continued),
            continued,
        )
        if continued and chat.add_generation_prompt:
            raise RequestError("chat: continue_final_message: goes on with a message; leave add_generation_prompt out")
        if continued and not _final(chat.messages[-1]):
            raise RequestError("chat: continue_final_message: the last message has no text to go on with")
        return chat

    @property
    def marked(self) -> list[dict[str, Any]]:
        """The messages for `continued`: the last one's text ends with a mark. The text alone may occur again after it,
        as "<" does in an end token."""
        *before, final = self.messages
        content = final["content"]
        if isinstance(content, str):
            return [*before, final | {"content": content + _MARK}]
        last = max(i for i, part in enumerate(content) if _has_text(part))
        parts = [part | {"text": part["text"] + _MARK} if i == last else part for i, part in enumerate(content)]
        return [*before, final | {"content": parts}]

    def continued(self, rendered: str) -> str:
        """A template's text of the messages in ``marked``, up to the end of the last one's own text.

        Raises:
            RequestError: the template did not write that text.
        """
        at = rendered.rfind(_MARK.rstrip())
        if at < 0 or _final(self.messages[-1]).strip() not in rendered:
            raise RequestError("chat: continue_final_message: the template does not write the last message as it is")
        return rendered[:at] if rendered.startswith(_MARK, at) else rendered[:at].rstrip()


def _final(message: dict[str, Any]) -> str:
    """A message's text, which may be the last of its parts; "" if there is none but white space."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _has_text(part)]
        content = texts[-1] if texts else ""
    return content if isinstance(content, str) and content.strip() else ""


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _switch(chat: Mapping[str, Any], name: str, default: bool) -> bool:
    value = chat.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"chat: {name}: expected true or false, got {value!r:.40}")
    return default if value is None else value


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if isinstance(messages, list) else type(messages).__name__
        raise RequestError(f"chat: expected a list of messages, got {got}")
    return [_message(f"message {index}", message) for index, message in enumerate(messages)]


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"chat: {where}: expected an object, got {type(value).__name__}")
    if "role" not in value or not ("content" in value or "tool_calls" in value):
        missing = "content" if "role" in value else "role"
        raise RequestError(f"chat: {where}: expected role and content, or role and tool_calls, got no {missing}")
    for key, kinds, expected in (
        ("role", str, "a string"),
        ("content", (str, list, type(None)), "a string, a list of parts or null"),
    ):
        if key in value and not isinstance(value[key], kinds):
            raise RequestError(f"chat: {where}: {key}: expected {expected}, got {type(value[key]).__name__}")
    # Clients and data sets write null for what a message lacks; a template would write "None", or go over nothing.
    message: dict[str, Any] = {name: part for name, part in _json(value, where).items() if part is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise RequestError(f"chat: {name}: expected a list of objects, got {value!r:.60}")
    entries: list[dict[str, Any]] = _json(value, name)
    return entries


def _json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy in JSON's own types, since a template may call any method of its values."""
    if depth > _DEEPEST:
        raise RequestError(f"chat: {where}: more than {_DEEPEST} levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(part, where, depth + 1) for part in value]
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        return {name: _json(part, f"{where}: {name}", depth + 1) for name, part in value.items()}
    raise RequestError(f"chat: {where}: expected a value of JSON, got {type(value).__name__}")
