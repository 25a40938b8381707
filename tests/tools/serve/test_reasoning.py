"""Reasoning told apart from answers: however a text is cut, and through the service from a model that has to reason."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.runtime.reasoning import Reasoning, ReasoningForm
from draftwood.runtime.text.tokenizer import Tokenizer

from .conftest import MESSAGES, TEMPLATE, bundle_of_template

MARKS = ("[unused16]", "[unused17]")
THINK = ReasoningForm(begin="<think>", end="</think>")
# A text, whether its prompt ended with the mark, the reasoning and the answer.
TEXTS = [
    ("<think>\nhm\n\nyes\n</think>\n\nYes.\n", False, "hm\n\nyes", "Yes.\n"),
    ("\n <think>hm</think>Yes </think> <think>", False, "hm", "Yes </think> <think>"),
    ("hm </thin </think> Yes", True, "hm </thin", "Yes"),
    ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
    ("</think>Yes", True, "", "Yes"),
    ("<think> hm </thi", False, "hm </thi", ""),
    ("hm \n", True, "hm", ""),
    (" Yes <think>no</think>\n", False, "", " Yes <think>no</think>\n"),
    (" <thinking> </think>", False, "", " <thinking> </think>"),
    ("\n <thi", False, "", "\n <thi"),
    ("", False, "", ""),
    ("", True, "", ""),
]


def is_seven(text: str, calls: list[Any]) -> bool:
    return bool(text) and json.loads(text) == [7] and not calls


def divided(pieces: list[str], begun: bool) -> tuple[str, str]:
    reader = Reasoning(THINK)
    if begun:
        reader.begin()
    parts = [reader.push(piece) for piece in pieces] + [reader.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(("text", "begun", "reasoning", "answer"), TEXTS, ids=[repr(text) for text, *_ in TEXTS])
def test_a_text_is_divided_wherever_it_is_cut(text: str, begun: bool, reasoning: str, answer: str) -> None:
    assert divided([text], begun) == (reasoning, answer)
    assert divided(list(text), begun) == (reasoning, answer)
    for at in range(len(text)):
        assert divided([text[:at], text[at:]], begun) == (reasoning, answer)


@given(st.text(alphabet="<think>/ \nab", max_size=60), st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_cuts_change_nothing_and_no_text_is_lost(text: str, cuts: list[int], begun: bool) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    reasoning, answer = divided(pieces, begun)
    assert (reasoning, answer) == divided([text], begun)
    if begun or text.lstrip().startswith(THINK.begin):
        rest = text if begun else text.lstrip().removeprefix(THINK.begin)
        before, _, after = rest.partition(THINK.end)
        assert (reasoning, answer) == (before.strip(), after.lstrip())
    else:
        assert (reasoning, answer) == ("", text)


@pytest.fixture(scope="module", params=[False, True], ids=["marks are text", "marks are special"])
def bundle(request: pytest.FixtureRequest, tiny_teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose vocabulary has the marks, and whose template begins the reasoning if it is told so."""
    folder = tmp_path_factory.mktemp("reasoning")
    shutil.copytree(tiny_teacher, folder / "teacher")
    path = folder / "teacher" / "tokenizer.json"
    file = json.loads(path.read_text().replace("<|system|>", MARKS[0]).replace("<|user|>", MARKS[1]))
    for token in file["added_tokens"]:
        token["special"] = token["special"] and (request.param or token["content"] not in MARKS)
    path.write_text(json.dumps(file))
    template = TEMPLATE + "{% if thinks %}[unused16]\n{% endif %}{% if never %}[unused16]\n[unused17]{% endif %}"
    return bundle_of_template(folder, template)


@pytest.fixture(scope="module")
def server(started: Callable[..., Any], bundle: Path) -> Any:
    return started(f"tiny={bundle}", "--threads", 1)


def answered(server: Any, thinks: str, written: str, **more: Any) -> tuple[str | None, str | None, list[Any]]:
    """The reasoning, the text and the calls of an answer that is held to a grammar; a stream's are the same."""
    body = {"messages": MESSAGES, "max_tokens": 60, "seed": 1, "grammar": f"start: {written}"}
    body |= {"chat_template_kwargs": {thinks: True}} | more
    status, answer, _ = server.ask("/v1/chat/completions", body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    parts: list[Any] = ["", "", []]
    _, events, _ = server.ask("/v1/chat/completions", body | {"stream": True})
    for event in events.decode().split("\n\n")[:-2]:
        delta = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
        parts[0] += delta.get("reasoning_content", "")
        parts[1] += delta.get("content") or ""
        parts[2] += [call["function"] for call in delta.get("tool_calls", [])]
    whole = [message.get("reasoning_content", ""), message["content"] or ""]
    assert parts == [*whole, [call["function"] for call in message.get("tool_calls", [])]]
    return message.get("reasoning_content"), message["content"], parts[2]


def test_reasoning_is_a_field_of_its_own(server: Any, bundle: Path) -> None:
    tokenizer = Tokenizer.load(bundle / "tokenizer")
    begin, end = (f"<[{tokenizer.token_id(mark)}]>" for mark in MARKS)
    rest = f'"\\nthe cat\\n" {end} "\\n\\nthe mat"'
    assert answered(server, "", f"{begin} {rest}") == ("the cat", "the mat", [])
    assert answered(server, "never", '"the mat"') == (None, "the mat", [])
    assert answered(server, "", '" the mat"') == (None, " the mat", [])


def test_reasoning_that_is_not_separated_stays_in_the_text(server: Any, bundle: Path) -> None:
    tokenizer = Tokenizer.load(bundle / "tokenizer")
    begin, end = (f"<[{tokenizer.token_id(mark)}]>" for mark in MARKS)
    shown = [mark if tokenizer.special_id(mark) is None else "" for mark in MARKS]
    text = f"{shown[0]}the cat{shown[1]}the mat"
    written = f'{begin} "the cat" {end} "the mat"'
    assert answered(server, "", written, separate_reasoning=False) == (None, text, [])


def test_a_prompt_may_begin_the_reasoning(server: Any, bundle: Path) -> None:
    tokenizer = Tokenizer.load(bundle / "tokenizer")
    end = tokenizer.token_id(MARKS[1])
    free = {"grammar": None, "allowed_token_ids": [end, *tokenizer.encode("the cat")], "max_tokens": 12}
    divided_ones = 0
    for seed in range(6):
        raw = answered(server, "thinks", "", **free, seed=seed, separate_reasoning=False)[1] or ""
        reasoning, text, _ = answered(server, "thinks", "", **free, seed=seed)
        divided_ones += bool(reasoning and text)
        if tokenizer.special_id(MARKS[1]) is None:
            before, _, after = raw.partition(MARKS[1])
            assert (reasoning or "", text) == (before.strip(), after.lstrip())
        assert answered(server, "never", "", **free, seed=seed)[0] is None
    assert divided_ones


SEVEN = {"type": "function", "function": {"name": "seven", "parameters": {"properties": {"n": {"const": 7}}}}}
SEVEN["function"]["parameters"] |= {"type": "object", "required": ["n"], "additionalProperties": False}
FORMS: dict[str, tuple[dict[str, Any], Callable[[str, list[Any]], bool]]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": [7]}}}},
        is_seven,
    ),
    "regex": ({"regex": "[78]{2}"}, lambda text, _: re.fullmatch("[78]{2}", text) is not None),
    "choice": ({"structured_outputs": {"choice": ["no", "yes"]}}, lambda text, _: text in ("no", "yes")),
    "call": ({"tools": [SEVEN], "tool_choice": "required"}, lambda text, calls: not text and len(calls) == 1),
}


@pytest.mark.parametrize(
    ("form", "thinks"),
    [
        ("schema", ""),
        ("schema", "thinks"),
        ("schema", "never"),
        ("regex", "thinks"),
        ("choice", ""),
        ("call", "thinks"),
    ],
)
def test_an_answer_of_a_form_comes_after_the_reasoning(server: Any, bundle: Path, form: str, thinks: str) -> None:
    """A model of random weights reasons for as long as biases say."""
    asked, fits = FORMS[form]
    tokenizer = Tokenizer.load(bundle / "tokenizer")
    begin, end = (str(tokenizer.token_id(mark)) for mark in MARKS)
    words = {str(token): 8 for token in tokenizer.encode("the cat sat")}
    for first, reasons in ((7, thinks != "never"), (-100, thinks == "thinks")):
        free = {"grammar": None, "logit_bias": {begin: first, end: 7.5} | words, "temperature": 1, "max_tokens": 200}
        reasoned = []
        for seed in range(2):
            reasoning, *answer = answered(server, thinks, "", **asked, **free, seed=seed)
            plain = answered(server, thinks, "", **asked, **free, seed=seed, draftwood={"policy": "plain"})
            assert plain == (reasoning, *answer) and fits(answer[0] or "", answer[1])
            reasoned.append(reasoning is not None)
        assert any(reasoned) == reasons


def test_a_grammar_is_one_of_the_whole_text(server: Any) -> None:
    for thinks in ("thinks", "never", ""):
        assert answered(server, thinks, '"the mat"') == (None, "the mat", [])
        structured = {"grammar": None, "structured_outputs": {"grammar": 'start: "the mat"'}}
        assert answered(server, thinks, "", **structured) == (None, "the mat", [])
