"""LangChain's and LiteLLM's clients, each in its own environment: they show plain decoding's text."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import draftwood
from draftwood.tools.serve.calls import Calls, WrittenCall, forced, form_of

from .conftest import MESSAGES, STRICT, TOOLS

pytestmark = pytest.mark.slow

TOKENS = 100

# Each reads what is asked for, and prints what it was given, whole and in a stream.
LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI
from openai import BadRequestError

asked = json.loads(sys.argv[1])
model = ChatOpenAI(model="tiny", base_url=asked["url"], api_key="none", max_retries=0, stream_usage=True,
                   extra_body=asked["own"], **asked["how"])
free, messages = model.bind(extra_body={"ignore_eos": True, **asked["own"]}), asked["messages"]
pieces = list(free.stream(messages))
held = model.bind(response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": asked["schema"]}})
tools = model.bind_tools(asked["tools"], tool_choice="required")

def called(message):
    return [[call["name"], call["args"]] for call in message.tool_calls]

def summed(stream):
    first, *rest = stream
    return sum(rest, first)

try:
    param = model.bind(presence_penalty=3).invoke(messages)
except BadRequestError as error:
    param = error.param
print(json.dumps({
    "whole": free.invoke(messages).content,
    "stream": "".join(piece.content for piece in pieces),
    "tokens": summed(pieces).usage_metadata["output_tokens"],
    "schema": held.invoke(messages).content,
    "schema in a stream": "".join(piece.content for piece in held.stream(messages)),
    "parsed": model.with_structured_output({"title": "city", **asked["schema"]}, method="json_schema").invoke(messages),
    "calls": called(tools.invoke(messages)),
    "calls in a stream": called(summed(tools.stream(messages))),
    "refused": param,
}))
"""
LITELLM = """
import json, sys
import litellm

asked = json.loads(sys.argv[1])

def ask(**more):
    return litellm.completion(
        model="openai/tiny", api_base=asked["url"], api_key="none", messages=asked["messages"], num_retries=0,
        **asked["how"], **{"extra_body": asked["own"], **more}
    )

def text(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

def called(message):
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]

free = {"extra_body": {"ignore_eos": True, **asked["own"]}}
pieces = list(ask(stream=True, stream_options={"include_usage": True}, **free))
held = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": asked["schema"]}}}
tools = {"tools": asked["tools"], "tool_choice": "required"}
try:
    param = ask(presence_penalty=3)
except litellm.BadRequestError as error:
    param = error.body["param"]
schema = ask(**held).choices[0].message.content
print(json.dumps({
    "whole": ask(**free).choices[0].message.content,
    "stream": text(pieces),
    "tokens": litellm.stream_chunk_builder(pieces).usage.completion_tokens,
    "schema": schema,
    "schema in a stream": text(ask(stream=True, **held)),
    "parsed": json.loads(schema),
    "calls": called(ask(**tools).choices[0].message),
    "calls in a stream": called(litellm.stream_chunk_builder(list(ask(stream=True, **tools))).choices[0].message),
    "refused": param,
}))
"""
CLIENTS = {"langchain-openai==1.7.4": LANGCHAIN, "litellm==1.110.2": LITELLM}


def environment(folder: Path, requirement: str) -> Path:
    """The Python of an environment with a client, made once."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--retries", "1", requirement]
    index = os.environ | {"PIP_NO_INDEX": "0"}  # which the other tests leave alone
    done = subprocess.run(install, capture_output=True, text=True, timeout=900, env=index)
    if done.returncode and "after connection broken by" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def server(started: Callable[..., Any], tools_bundle: Path) -> Any:
    return started(f"tiny={tools_bundle}", "--threads", 1)


@pytest.fixture(scope="module", params=[{"temperature": 0, "seed": 1}, {"temperature": 0.8, "seed": 7}], ids=str)
def expected(request: pytest.FixtureRequest, tools_bundle: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sampling, and the library's text by it, without speculation."""
    how = request.param
    with draftwood.open(tools_bundle, threads=1) as model:
        form = form_of(model.bundle.tokenizer)
        assert form is not None

        def text(prompt: Any = MESSAGES, **more: Any) -> str:
            result = model.generate(prompt, policy="plain", max_new_tokens=TOKENS, **how, **more)
            assert result.text is not None
            return result.text

        free, held = text(ignore_eos=True), text(grammar=STRICT)
        (call,) = Calls(form, []).push(text({"messages": MESSAGES, "tools": TOOLS}, grammar=forced(form, TOOLS)))
    assert isinstance(call, WrittenCall)
    calls = [[call.name, json.loads(call.arguments)]]
    return how, {
        "whole": free,
        "stream": free,
        "tokens": TOKENS,
        "schema": held,
        "schema in a stream": held,
        "parsed": json.loads(held),
        "calls": calls,
        "calls in a stream": calls,
        "refused": "presence_penalty",
    }


@pytest.mark.parametrize("requirement", CLIENTS)
def test_a_client_shows_plain_decodings_text(
    server: Any, expected: Any, requirement: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, texts = expected
    python = environment(pytestconfig.cache.mkdir("clients") / requirement, requirement)
    asked = {"url": server.url + "/v1", "messages": MESSAGES, "tools": TOOLS, "schema": STRICT}
    asked |= {"how": how | {"max_tokens": TOKENS}, "own": {"draftwood": {"policy": "lookup-full-2x1-kv512"}}}
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks GitHub for prices
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    run = [python, "-c", CLIENTS[requirement], json.dumps(asked)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == texts
