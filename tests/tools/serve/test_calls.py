"""Calls of tools: found in the forms that families write, however the text is cut, and asked for of a model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.text.grammar import Grammars
from draftwood.tests.bpe import train_tokenizer
from draftwood.tools.serve.calls import CallForm, Calls, WrittenCall, forced, form_of, read_calls

QWEN = CallForm(begin="<tool_call>", end="</tool_call>")
PANGU = CallForm(begin="[unused11]", end="[unused12]", listed=True, tokens={"[unused11]": 7, "[unused12]": 8})
MISTRAL = CallForm(begin="[TOOL_CALLS]", end="", listed=True)
LLAMA = CallForm(begin="", end="", arguments="parameters")
WEATHER = '{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}'
ONE = WrittenCall("weather", '{"city": "Köln", "days": [1, 2]}')
MARKED = r'{"name": "write", "arguments": {"text": "\"</tool_call>\\"}}'
TWO = WrittenCall("write", r'{"text": "\"</tool_call>\\"}')
TEXTS: list[tuple[CallForm, str, list[Any]]] = [
    (QWEN, f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>", ["I look.\n", ONE]),
    (QWEN, f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n", [ONE, ONE]),
    (QWEN, "a < b <tool> <tool_cal", ["a < b <tool> <tool_cal"]),
    (QWEN, "<tool_call>no JSON</tool_call> and on", ["<tool_call>no JSON</tool_call> and on"]),
    (QWEN, '<tool_call>{"name": "f"', ['<tool_call>{"name": "f"']),
    (QWEN, '<tool_call>{"name": "f"}', [WrittenCall("f", "{}")]),
    (QWEN, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [WrittenCall("f", "{}")]),
    (
        QWEN,
        '<tool_call>{"name": "f", "arguments": {"a": "b\n\tc"}}</tool_call>',
        [WrittenCall("f", r'{"a": "b\n\tc"}')],
    ),
    (QWEN, f"<tool_call>{MARKED}</tool_call>\n<tool_call>{WEATHER}</tool_call>", [TWO, ONE]),
    (
        QWEN,
        f'<tool_call>{{"name": "f</tool_call> no <tool_call>{WEATHER}</tool_call>',
        ['<tool_call>{"name": "f</tool_call> no ', ONE],
    ),
    (PANGU, f"So: [unused11][{WEATHER}, {WEATHER}][unused12]", ["So: ", ONE, ONE]),
    (PANGU, "[unused1] is no mark", ["[unused1] is no mark"]),
    (MISTRAL, f"[TOOL_CALLS] [{WEATHER}]", [ONE]),
    (LLAMA, WEATHER.replace("arguments", "parameters"), [ONE]),
    (LLAMA, "<|python_tag|>" + WEATHER + "; " + WEATHER, [ONE, ONE]),
    (LLAMA, '{"name": "Anna", "age": 3}', ['{"name": "Anna", "age": 3}']),
    (LLAMA, "{not JSON", ["{not JSON"]),
    (LLAMA, "Hello {}", ["Hello {}"]),
    (LLAMA, f"So: {WEATHER}", [f"So: {WEATHER}"]),
    (LLAMA, f"So <|python_tag|>{WEATHER}", [f"So <|python_tag|>{WEATHER}"]),
    (QWEN, f"<tool_call>{WEATHER}</tool_call>\n\n <b>\n<tool_call>{WEATHER}</tool_call>\n ", [ONE, "\n\n <b>\n", ONE]),
    (LLAMA, "<|python", ["<|python"]),
]


def found(form: CallForm, pieces: list[str], most: int | None = None) -> list[Any]:
    """The pieces found, with adjoining texts joined."""
    calls, merged = Calls(form, ["weather"], most), list[Any]()
    for one in [one for piece in pieces for one in calls.push(piece)] + calls.finish():
        if isinstance(one, str) and merged and isinstance(merged[-1], str):
            merged[-1] += one
        else:
            merged.append(one)
    return merged


@pytest.mark.parametrize(("form", "text", "expected"), TEXTS, ids=[text[:30] for _, text, _ in TEXTS])
def test_calls_are_found_wherever_the_text_is_cut(form: CallForm, text: str, expected: list[Any]) -> None:
    assert found(form, [text]) == expected
    assert found(form, list(text)) == expected
    for at in range(len(text)):
        assert found(form, [text[:at], text[at:]]) == expected


@given(st.text(alphabet='<tool_call>/{}[]" :,f\n', max_size=60), st.integers(0, 60))
def test_no_text_is_lost_that_is_no_call(text: str, at: int) -> None:
    for form in (QWEN, PANGU, MISTRAL, LLAMA):
        given_back = found(form, [text[:at], text[at:]])
        if all(isinstance(one, str) for one in given_back):
            assert "".join(given_back) == text


def test_more_calls_than_asked_for_are_dropped() -> None:
    assert found(PANGU, [f"[unused11][{WEATHER}, {WEATHER}][unused12]"], most=1) == [ONE]


def test_text_is_given_as_soon_as_it_is_clear() -> None:
    calls = Calls(QWEN, [])
    assert calls.push("one <to") == ["one "]
    assert calls.push("re>") == ["<tore>"]
    assert calls.push("<tool_call>") == []


# Python reads these numbers and halves of characters; no client does.
UNREADABLE = [f'{{"name": "f", "arguments": {{"a": {value}}}}}' for value in ("NaN", "1e999", r'"\ud83d"')]
UNREADABLE += [r'{"name": "\ud83d"}', r'{"name": "f", "arguments": "\ud83d"}']


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"name": 3}', '{"name": "f", "arguments": 3}', "[" * 100_000, *UNREADABLE]
)
def test_what_is_no_call(text: str) -> None:
    assert read_calls(text, "arguments") == []


class Template:
    """As much of a tokenizer as says how calls are written."""

    def __init__(self, template: str | None, tokens: dict[str, int] | None = None) -> None:
        self.tool_template, self._tokens = template, tokens or {}

    def token_id(self, token: str) -> int | None:
        return self._tokens.get(token)


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("{% if tools %}<tools>...<tool_call>{'name'}</tool_call>", "<tool_call>"),
        ("{% if tools %}[unused11] ... [unused12]", "[unused11]"),
        ("{% if tools %}[TOOL_CALLS]", "[TOOL_CALLS]"),
        ('{% if tools %}Environment: ipython {"name": function name, "parameters": ...}', ""),
        ("{% if tools %}<tool_call>{name}<arg_key>", None),
        ("{% if tools %}<tool_call>\n<function=example>", None),
        ("{% for message in messages %}", None),
        (None, None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str | None, begin: str | None) -> None:
    form = form_of(Template(template))  # type: ignore[arg-type]
    assert (form and form.begin) == begin


def test_a_template_that_takes_one_call_a_message_gets_one() -> None:
    """Llama 3's refused the next request, which hands all calls of the answer back."""
    template = 'tools Environment: ipython "parameters" This model only supports single tool-calls at once!'
    form, several = (form_of(Template(text)) for text in (template, template[:40]))  # type: ignore[arg-type]
    assert form is not None and several is not None and (form.most, several.most) == (1, None)


def test_marks_that_are_tokens_are_asked_for_by_id() -> None:
    form = form_of(Template("tools [unused11] [unused12]", {"[unused11]": 7, "[unused12]": 8}))  # type: ignore[arg-type]
    assert form is not None and form.tokens == {"[unused11]": 7, "[unused12]": 8}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    lark = forced(form, [tool])
    assert lark.startswith(r'start: <[7]> /[ \n]?/ "[" call "]" /\n?/ <[8]>' + "\n")
    assert 'call_0: "{\\"name\\": \\"f\\", \\"arguments\\": " parameters_0 "}"\n' in lark


def test_a_mark_that_is_an_added_token_but_not_special_can_be_asked_for() -> None:
    """Qwen's: where their letters were asked for, the grammar's library forced their token, and then refused it."""
    pytest.importorskip("llguidance")
    tokenizer = train_tokenizer([], 261)
    tokenizer.add_tokens([QWEN.begin, QWEN.end])
    grammars = Grammars(tokenizer.to_str(), 263, [1])
    (begin, end), tool = (tokenizer.token_to_id(mark) for mark in (QWEN.begin, QWEN.end)), {"function": {"name": "f"}}
    template = Template("tools <tool_call>", {QWEN.begin: begin, QWEN.end: end})
    call = '{"name": "f", "arguments": {}}'
    for space in ("", "\n"):  # its template has the second
        held = grammars.begin(forced(form_of(template), [tool]))  # type: ignore[arg-type]
        ids = tokenizer.encode(f"<tool_call>{space}{call}{space}</tool_call>").ids
        assert (ids[0], held.forced(0)) == (begin, begin)
        for position, token in enumerate([*ids, 1]):
            assert held.allows(position, token)
            held.take(position, token)


@pytest.mark.parametrize("inner", [{"required": ["a"]}, {"$ref": "#/$defs/A", "$defs": {"A": {"required": ["a"]}}}])
def test_parameters_are_an_object_whether_or_not_their_schema_says_so(inner: dict) -> None:
    """Any other value is no call."""
    pytest.importorskip("llguidance")
    tokenizer, tool = train_tokenizer([], 261), {"function": {"name": "f", "parameters": inner}}
    held = Grammars(tokenizer.to_str(), 261, [1]).begin(forced(LLAMA, [tool]))
    *before, number = tokenizer.encode('{"name": "f", "parameters": 3').ids
    for position, token in enumerate(before):
        held.take(position, token)
    assert held.allows(len(before), tokenizer.token_to_id("{")) and not held.allows(len(before), number)


def test_references_in_a_tools_parameters_begin_at_their_own_root() -> None:
    """As pydantic writes models within models; ``#`` is the parameters, and not the call."""
    pytest.importorskip("llguidance")
    item = {"type": "object", "properties": {"n": {"const": 1}, "in": {"$ref": "#"}}, "additionalProperties": False}
    inner = {"$ref": "#/$defs/Item"}
    parameters = {"type": "object", "properties": {"a": inner}, "additionalProperties": False, "$defs": {"Item": item}}
    tools = [{"function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    tokenizer = train_tokenizer([], 261)
    held = Grammars(tokenizer.to_str(), 261, [1]).begin(forced(LLAMA, tools))
    text = '{"name": "g", "parameters": {"a": {"n": 1, "in": {"a": {}}}}}'
    for position, token in enumerate(tokenizer.encode(text).ids):
        assert held.allows(position, token)
        held.take(position, token)
