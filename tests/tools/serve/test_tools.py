"""Tools through the service, as openai's client sees them: a random model that has to call one does."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import MESSAGES, TOOLS

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def server(started: Callable[..., Any], tools_bundle: Path) -> Any:
    return started(f"tiny={tools_bundle}", "--threads", 1)


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 100, "seed": 1} | more


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}], ids=["any", "one"])
def test_a_call_that_is_asked_for_comes_whole_and_in_a_stream(client: Any, choice: Any) -> None:
    answer = client.chat.completions.create(**asked(tool_choice=choice)).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert re.fullmatch("[0-9A-Za-z]{9}", call.id), "Mistral's templates refuse others"
    assert call.function.name in (("weather", "time") if choice == "required" else ("time",))
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    names, arguments, ids, ends, texts = "", "", [], [], ""
    for chunk in client.chat.completions.create(**asked(tool_choice=choice, stream=True)):
        (one,) = chunk.choices
        texts += one.delta.content or ""
        ends += [one.finish_reason] if one.finish_reason else []
        for delta in one.delta.tool_calls or []:
            assert delta.index == 0
            ids += [delta.id] if delta.id else []
            names, arguments = names + (delta.function.name or ""), arguments + (delta.function.arguments or "")
    assert (names, arguments, ends, texts, len(ids)) == (
        call.function.name, call.function.arguments, ["tool_calls"], "", 1
    )  # fmt: skip


def test_an_answer_need_not_call(client: Any) -> None:
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**asked(tool_choice=choice, max_tokens=8)).choices[0]
        assert answer.message.tool_calls is None and answer.finish_reason in ("length", "stop")


def test_the_template_sees_tools_calls_and_their_answers(client: Any, server: Any) -> None:
    def tokens(**more: Any) -> int:
        return client.chat.completions.create(**asked(max_tokens=1, **more)).usage.prompt_tokens

    assert tokens() > tokens(tools=[]) == tokens(tool_choice="none")
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"city": "Rome"}'}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    assert client.chat.completions.create(**asked(messages=turns, tool_choice="required")).choices[0].message.tool_calls
    shown = server.ask("/tokenize", {"messages": turns})[1]["count"]
    text = "user: the catassistant: <tool_call>timeRome</tool_call>tool: noon"
    assert shown == server.ask("/tokenize", {"prompt": text})[1]["count"]


def test_a_chat_is_counted_with_the_fields_that_its_prompt_is_made_of(client: Any, server: Any) -> None:
    def counted(**more: Any) -> tuple[int, int]:
        used = client.chat.completions.create(**asked(max_tokens=1, extra_body=more)).usage.prompt_tokens
        return used, server.ask("/tokenize", {"messages": MESSAGES, "tools": TOOLS} | more)[1]["count"]

    for more in ({}, {"tool_choice": "none"}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        used, told = counted(**more)
        assert used == told, more
    for wrong, param in (({"prompt": "a", "tools": TOOLS}, "tools"), ({"messages": MESSAGES, "tools": [1]}, "tools")):
        assert server.ask("/tokenize", wrong)[1]["error"]["param"].startswith(param)


BAD = [
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("more", "param"), BAD, ids=[param for _, param in BAD])
def test_what_cannot_be_asked_of_tools_names_its_field(server: Any, more: dict, param: str) -> None:
    status, answer, _ = server.ask("/v1/chat/completions", asked(**more))
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_template_that_takes_no_tools_refuses_them(started: Callable[..., Any], tiny_bundle: Path) -> None:
    server = started(f"tiny={tiny_bundle}", "--threads", 1)
    status, answer, _ = server.ask("/v1/chat/completions", asked())
    assert (status, answer["error"]["param"]) == (400, "tools")
