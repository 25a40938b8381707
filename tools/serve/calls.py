"""Tools that a model calls: how families write calls, how they are found in a text, and how one is asked for.

The form follows from the chat template, which tells the model of it. A call is JSON between two marks:

* Qwen (and Hermes): ``<tool_call>`` {"name": ..., "arguments": {...}} ``</tool_call>``, one object each;
* openPangu: ``[unused11]`` [{"name": ..., "arguments": {...}}, ...] ``[unused12]``, or the same between
  ``<|tool_call_start|>`` and ``<|tool_call_end|>``;
* Mistral: ``[TOOL_CALLS]`` [{"name": ..., "arguments": {...}}, ...] up to the end;
* Llama 3: the whole text is {"name": ..., "parameters": {...}}, maybe after ``<|python_tag|>``, several with ``;``
  between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from draftwood.runtime.stream import overlap
from draftwood.runtime.text.tokenizer import Tokenizer

PYTHON_TAG = "<|python_tag|>"
# Models that write code leave its line ends and tabs as they are, in a string, too.
_DECODER = json.JSONDecoder(strict=False)
# JSON without choice in its white space: models have seen this form, because templates write calls so.
_AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of a tool that names none.
_NO_PARAMETERS = {"additionalProperties": False}


class CallForm(Struct, kw_only=True):
    """How calls are written. ``begin`` is empty if the text itself is one, ``end`` if the text's end ends it.

    ``tokens`` has the ids of those marks that are tokens of their own, special ones or not.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    # Whether a list of calls stands between the marks.
    listed: bool = False
    # Calls that the template takes in one message, if not any number.
    most: int | None = None
    tokens: dict[str, int] = {}


_FORMS = (
    CallForm(begin="[unused11]", end="[unused12]", listed=True),
    CallForm(begin="<|tool_call_start|>", end="<|tool_call_end|>", listed=True),
    CallForm(begin="[TOOL_CALLS]", end="", listed=True),
    CallForm(begin="<tool_call>", end="</tool_call>"),
)
# Text between the same marks in forms that are none of these: XML for each argument (GLM-4, Qwen3-Coder), or the name
# outside of the JSON (later Mistral).
_OTHERS = ("<arg_key>", "<function=", "[ARGS]")
# How Llama 3's templates refuse a message with several calls.
_SINGLE = "only supports single tool-calls"


def form_of(tokenizer: Tokenizer | None) -> CallForm | None:
    """The form that a chat template tells its model of; None if it takes no tools, or has its own form."""
    template = None if tokenizer is None else tokenizer.tool_template
    if tokenizer is None or template is None or "tools" not in template or any(o in template for o in _OTHERS):
        return None
    form = next((form for form in _FORMS if form.begin in template), None)
    if form is None and '"parameters"' in template and "ipython" in template:
        form = CallForm(begin="", end="", arguments="parameters", most=1 if _SINGLE in template else None)
    if form is None:
        return None
    marks = [form.begin or PYTHON_TAG, form.end]
    ids = {mark: tokenizer.token_id(mark) for mark in marks if mark}
    return msgspec.structs.replace(form, tokens={mark: token for mark, token in ids.items() if token is not None})


class WrittenCall(NamedTuple):
    """One call: a tool's name, and its arguments as JSON's text."""

    name: str
    arguments: str


class Calls:
    """Finds calls in a text that comes in pieces. Text that is no call after all is text again.

    Args:
        form: how calls are written.
        names: of the tools; if calls have no marks, text that names none of them stays text.
        most: calls that are given; later ones are dropped.
    """

    def __init__(self, form: CallForm, names: Iterable[str], most: int | None = None) -> None:
        self._form, self._names, self._most = form, set(names), most
        self.found = 0
        self._held, self._inside = "", False
        # The call up to an end mark that stands in a string of its JSON.
        self._string = ""
        # Without marks: whether the text has begun as none of calls.
        self._is_text = False
        # The white space since a call, if nothing else has come since.
        self._space: str | None = None

    def push(self, text: str) -> list[str | WrittenCall]:
        """Text and calls that have become clear."""
        self._held += text
        return self._unmarked() if not self._form.begin else list(self._marked())

    def finish(self) -> list[str | WrittenCall]:
        """The rest, which was held back."""
        self._held, self._string = self._string + self._held, ""
        found = list(self._marked(last=True)) if self._form.begin else []
        rest, self._held = self._held, ""
        if not self._form.begin:
            return self._read(rest.removeprefix(PYTHON_TAG), rest) if rest else []
        return found + (self._read(rest, self._form.begin + rest) if self._inside else self._text(rest))

    def _unmarked(self) -> list[str | WrittenCall]:
        """All of a text that may be a call is held back; one that begins otherwise is text up to its end."""
        begun = self._held.lstrip()
        may_be = not begun or begun.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(begun)
        if may_be and not self._is_text:
            return []
        rest, self._held, self._is_text = self._held, "", True
        return self._text(rest)

    def _marked(self, last: bool = False) -> Iterable[str | WrittenCall]:
        """``last``: nothing follows, so a mark in a string of JSON, which has no end then, is none of the string's."""
        while True:
            mark = self._form.end if self._inside else self._form.begin
            before, marked, after = self._held.partition(mark) if mark else (self._held, "", "")
            if marked and self._inside and not last and _in_string('"' * bool(self._string) + before):
                self._string, self._held = self._string + before + mark, after
            elif marked:
                before, self._string, self._held = self._string + before, "", after
                whole = f"{self._form.begin}{before}{mark}"
                yield from self._read(before, whole) if self._inside else self._text(before)
                self._inside = not self._inside
            elif self._inside:
                return
            else:
                clear = self._held[: len(self._held) - overlap(self._held, [mark])]
                self._held = self._held[len(clear) :]
                yield from self._text(clear)
                return

    def _text(self, text: str) -> list[str | WrittenCall]:
        """Text next to calls. White space between them, and after the last, is theirs: it waits for what follows it."""
        if self._space is not None:
            text = self._space + text
            self._space = text if not text or text.isspace() else None
        return [text] if text and self._space is None else []

    def _read(self, text: str, whole: str) -> list[str | WrittenCall]:
        """The calls of a text, or the whole of it as text."""
        calls = read_calls(text, self._form.arguments)
        if not calls or (not self._form.begin and any(call.name not in self._names for call in calls)):
            return self._text(whole)
        self.found += len(calls)
        self._space = ""
        dropped = 0 if self._most is None else max(min(self.found - self._most, len(calls)), 0)
        return list(calls[: len(calls) - dropped])


def _in_string(text: str) -> bool:
    """Whether a text of JSON ends within a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def read_calls(text: str, arguments: str) -> list[WrittenCall]:
    """Calls of a text of JSON: objects, or lists of them, apart by white space or semicolons. None if it is not."""
    calls: list[WrittenCall] = []
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for entry in value if isinstance(value, list) else [value]:
            call = _call(entry, arguments)
            if call is None:
                return []
            calls.append(call)
        rest = rest[end:].lstrip(" \n\t;")
    return calls


def _call(value: Any, arguments: str) -> WrittenCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    # Models mix up the two names.
    passed = value.get(arguments, value.get("arguments", value.get("parameters", {})))
    passed = {} if passed is None else passed  # so some models write that there are none
    if not isinstance(passed, dict | str):
        return None
    try:
        text = passed if isinstance(passed, str) else json.dumps(passed, ensure_ascii=False, allow_nan=False)
        f"{value['name']}{text}".encode()
    except (ValueError, RecursionError):  # what Python reads and no client does: NaN, 1e999, half of a character
        return None
    return WrittenCall(value["name"], text)


def forced(form: CallForm, tools: Sequence[dict[str, Any]]) -> str:
    """A grammar, in Lark's syntax, of exactly one call of one of some tools.

    The parameters of each tool are a schema of their own, since references in it (``#/$defs/Item``) begin at its root.
    The white space that templates write between a mark and the call may stand there: Qwen's line ends, Mistral's space.
    """
    before, after = ('"["', '"]"') if form.listed else ("", "")
    begin = rf"{_mark(form, form.begin)} /[ \n]?/" if form.begin else ""
    end = rf"/\n?/ {_mark(form, form.end)}" if form.end else ""
    calls = " | ".join(f"call_{number}" for number in range(len(tools)))
    lines = [f"start: {begin} {before} call {after} {end}", f"call: {calls}"]
    for number, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        written = json.dumps(f'{{"name": {name}, "{form.arguments}": ', ensure_ascii=False)
        parameters = tool["function"].get("parameters", _NO_PARAMETERS)
        schema = {"type": "object"} | parameters | {"x-guidance": _AS_TEMPLATES_WRITE}
        lines += [
            f'call_{number}: {written} parameters_{number} "}}"',
            f"parameters_{number}: %json {json.dumps(schema)}",
        ]
    return "\n".join(lines) + "\n"


def _mark(form: CallForm, mark: str) -> str:
    return f"<[{form.tokens[mark]}]>" if mark in form.tokens else json.dumps(mark)
