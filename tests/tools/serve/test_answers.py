"""Answers to clients of OpenAI's interface: the library's texts, whole and in chunks, and errors they understand."""

import asyncio
import json
import re
import urllib.request
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftwood
from draftwood.tools.serve.bodies import ChatBody, CompletionBody
from draftwood.tools.serve.completions import Completion, event
from draftwood.tools.serve.messages import Begun, Ended, Piece

PROMPT = "the cat sat"
# With a tree at every step: what the default policy chooses goes by the clock.
TREE = {"policy": "ragged-kv128"}
TEXT = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "draftwood": TREE}


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> Any:
    """The texts that everything is held to: the library's, without speculation."""
    with draftwood.open(tiny_bundle, threads=1) as model:

        def generate(**options: Any) -> Any:
            given = {"max_new_tokens": 24, "ignore_eos": True, "policy": "plain"} | options
            return model.generate(given.pop("prompt", PROMPT), **given)

        yield generate


def events(server: Any, path: str, body: dict) -> list[Any]:
    content = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(server.url + path, content, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7}, {"temperature": 1, "top_p": 0.9, "seed": 3}])
def test_a_text_is_the_librarys(server: Any, plain: Any, sampling: dict) -> None:
    expected = plain(**sampling)
    status, answer, headers = server.ask("/v1/completions", TEXT | sampling, x_request_id="mine-1")
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    assert answer["choices"][0]["text"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
    assert answer["usage"]["speculative_decoding"]["num_spec_steps"] > 0
    streamed = events(server, "/v1/completions", TEXT | sampling | {"stream_options": {"include_usage": True}})
    assert "".join(one["choices"][0]["text"] for one in streamed[:-1]) == expected.text
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"]["total_tokens"] == answer["usage"]["total_tokens"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 1}], ids=str)
def test_a_streams_logprobs_are_the_whole_answers(server: Any, plain: Any, sampling: dict) -> None:
    """A stop string that begins to show holds text back, so that tokens come before their text."""
    starts = sorted({*plain(**sampling).text})
    asked = TEXT | sampling | {"logprobs": 1, "stop": [f"{start}\0" for start in starts[:16]]}
    (choice,) = server.ask("/v1/completions", asked)[1]["choices"]
    parts = [chunk["choices"][0] for chunk in events(server, "/v1/completions", asked)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name in ("tokens", "text_offset"):
        whole = choice["logprobs"][name]
        assert [one for part in parts if part["logprobs"] for one in part["logprobs"][name]] == whole and len(
            whole
        ) == 24
    before = ""
    for token, begin in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert "bytes:" in before + token or choice["text"].startswith(token, begin)  # or part of a character
        before = token


def test_an_event_is_one_line_to_clients_that_know_all_of_unicodes() -> None:
    text = "".join(chr(number) for number in range(0x3000))
    line, *empty = event({"content": text}).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"content": text} and empty == [""]


def test_every_choice_of_a_stream_begins_with_its_role(server: Any) -> None:
    """There is room for two texts, so the third begins after one has ended."""
    asked = {
        "messages": [{"role": "user", "content": PROMPT}],
        "n": 3,
        "max_tokens": 200,
        "ignore_eos": True,
        "seed": 1,
    }
    (one, two, three) = ([], [], [])  # type: tuple[list[Any], ...]
    for chunk in events(server, "/v1/chat/completions", asked):
        (choice,) = chunk["choices"]
        (one, two, three)[choice["index"]].append(choice["delta"])
    for deltas in (one, two, three):
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta.get("content", "") for delta in deltas)


def test_choices_have_seeds_that_follow_each_other(server: Any, plain: Any) -> None:
    _, answer, _ = server.ask("/v1/completions", TEXT | {"temperature": 1, "seed": 5, "n": 3})
    expected = [plain(temperature=1.0, seed=seed).text for seed in (5, 6, 7)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_stop_ends_before_its_text(server: Any, plain: Any) -> None:
    whole = plain().text
    stop = whole[len(whole) // 2 :][:3]
    _, answer, _ = server.ask("/v1/completions", TEXT | {"stop": stop})
    assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_logprobs_are_the_same_without_speculation(server: Any) -> None:
    body = TEXT | {"logprobs": 3, "seed": 1, "temperature": 0.8}
    with_drafts, without = (
        server.ask("/v1/completions", body | {"draftwood": {"policy": policy}})[1]["choices"][0]["logprobs"]
        for policy in (TREE["policy"], "plain")
    )
    assert with_drafts["tokens"] == without["tokens"]
    # Rows of a tree sum in another order, some 1e-5 of a logit.
    assert with_drafts["token_logprobs"] == pytest.approx(without["token_logprobs"], abs=1e-4)
    assert [list(top) for top in with_drafts["top_logprobs"]] == [list(top) for top in without["top_logprobs"]]
    assert max(map(len, without["top_logprobs"])) == 3


def test_steps_show_their_tree_and_path(server: Any) -> None:
    body = TEXT | {"draftwood": TREE | {"steps": True}}
    chunks = events(server, "/v1/completions", body)
    steps = [step for chunk in chunks for step in chunk.get("draftwood", [])]
    assert sum(len(step["accepted"]) for step in steps) >= TEXT["max_tokens"] - 1
    for step in steps:
        assert step["parents"] == [0, 0, 0, 0, 1, 1, 2]
        path = step["accepted"]
        assert path[0] == 0
        assert all(step["parents"][row] == above for above, row in pairwise(path))


def test_drafts_past_the_end_gained_nothing(server: Any) -> None:
    """The first token is the prompt's, so the one drafted step gains the second, whatever else it accepts."""
    before = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    asked = TEXT | {"max_tokens": 2, "temperature": 0.7, "seed": 1, "n": 4}
    gained = server.ask("/v1/completions", asked)[1]["usage"]["speculative_decoding"]
    assert gained["num_spec_steps"] == 4 and gained["mean_acceptance_length"] == 1
    assert len(gained["acceptance_histogram"]) == 2 and gained["num_accepted_tokens"] <= 4
    after = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert after - before == gained["num_accepted_tokens"]


@pytest.mark.parametrize("body", [ChatBody(messages=[], stream=True), CompletionBody(prompt="a", stream=True)])
def test_the_end_of_a_text_and_its_reason_are_two_chunks(body: Any) -> None:
    """Some clients read no text next to a reason. Here all is there at once, as from a fast engine."""
    letters = (Begun(id=1, prompt_tokens=1, cached_tokens=0), Piece(id=1, text="hat", tokens=1), Ended(1, "length"))
    model = SimpleNamespace(name="fast", facts=None, drop=lambda asks: None)
    model.submit = lambda asks, box: [box.put(0, letter) for letter in letters]

    async def chunks() -> list[bytes]:
        return [chunk async for chunk in Completion(model, body, 9).chunks()]

    opening, text, reason = [json.loads(chunk[6:])["choices"][0] for chunk in asyncio.run(chunks())[:-1]]
    assert opening["finish_reason"] is None
    assert "hat" in str(text) and text["finish_reason"] is None
    assert reason["finish_reason"] == "length" and (reason["delta"] == {} if "delta" in reason else not reason["text"])


SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "animal",
        "schema": {
            "type": "object",
            "properties": {"name": {"enum": ["cat", "hat"]}, "old": {"type": "boolean"}},
            "required": ["name", "old"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        },
    },
}


@pytest.mark.parametrize(
    "asked", [{"response_format": SCHEMA}, {"grammar": 'root ::= "yes" | "no"'}], ids=["json", "gbnf"]
)
def test_an_answer_is_what_its_format_says(server: Any, plain: Any, asked: dict) -> None:
    held_to = asked.get("grammar") or SCHEMA["json_schema"]["schema"]
    for seed in range(3):
        expected = plain(temperature=1.0, seed=seed, max_new_tokens=60, grammar=held_to, ignore_eos=False)
        body = {"prompt": PROMPT, "seed": seed, "max_tokens": 60, "draftwood": TREE} | asked
        (choice,) = server.ask("/v1/completions", body)[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, "stop")
        if "grammar" in asked:
            assert choice["text"] in ("yes", "no")
        else:
            found = json.loads(choice["text"])
            assert set(found) == {"name", "old"} and found["name"] in ("cat", "hat")


CHOICES = ["the hat", 'say "no"', "a\\b", "line\nline", "grün 🙂", "/x/", "a\x7fb"]


@pytest.mark.parametrize("choices", [[choice] for choice in CHOICES] + [CHOICES], ids=str)
def test_an_answer_is_one_of_its_choices(server: Any, choices: list[str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "structured_outputs": {"choice": choices}, "draftwood": TREE}
    for seed in range(2):
        (choice,) = server.ask("/v1/completions", body | {"seed": seed})[1]["choices"]
        assert choice["text"] in choices and choice["finish_reason"] == "stop"


def test_a_stop_token_ends_an_answer(server: Any, plain: Any) -> None:
    stop = plain().token_ids[9]
    (choice,) = server.ask("/v1/completions", TEXT | {"stop_token_ids": [stop]})[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (plain(stop_token_ids=[stop]).text, "stop")
    assert plain().text.startswith(choice["text"])


BAD = [
    ({"prompt": PROMPT, "temperature": 3}, "temperature", 400),
    ({"prompt": PROMPT, "temperature": "hot"}, "temperature", 400),
    ({"prompt": PROMPT, "presence_penalty": 3}, "presence_penalty", 400),
    ({"prompt": PROMPT, "repetition_penalty": 0}, "repetition_penalty", 400),
    ({"prompt": PROMPT, "repetition_penalty": 5e-324}, "repetition_penalty", 400),
    ({"prompt": PROMPT, "typical_p": 0.5}, "typical_p", 400),
    ({"prompt": PROMPT, "response_format": {"type": "yaml"}}, "response_format.type", 400),
    ({"prompt": PROMPT, "response_format": {"type": "json_schema"}}, "response_format.json_schema", 400),
    ({"prompt": PROMPT, "response_format": SCHEMA | {"json_schema": {"schema": {"type": 3}}}}, "response_format", 400),
    ({"prompt": PROMPT, "grammar": "start: ("}, "grammar", 400),
    ({"prompt": PROMPT, "grammar": "x", "response_format": {"type": "json_object"}}, "grammar", 400),
    ({"prompt": PROMPT, "grammar": 'start: "x"', "ignore_eos": True}, "grammar", 400),
    ({"prompt": [1, "a"]}, "prompt", 400),
    ({"prompt": [9999]}, "prompt", 400),
    ({"prompt": [5] * 400}, "prompt", 400),
    ({"prompt": PROMPT, "max_tokens": 10**6}, "max_tokens", 400),
    ({"prompt": PROMPT, "n": 0}, "n", 400),
    ({"prompt": PROMPT, "model": "gpt"}, "model", 404),
    ({"prompt": PROMPT, "draftwood": {"policy": "nope"}}, "draftwood.policy", 400),
    ({"prompt": PROMPT, "draftwood": {"polcy": "plain"}}, "draftwood.polcy", 400),
    (
        {"prompt": PROMPT, "response_format": {"type": "text", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        400,
    ),
    ({"prompt": PROMPT, "response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", 400),
    ({}, "prompt", 400),
    ([], None, 400),
]


@pytest.mark.parametrize(("body", "param", "status"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_names_its_field(
    server: Any, tiny_bundle: Path, body: Any, param: str | None, status: int, stream: bool
) -> None:
    got, answer, _ = server.ask("/v1/completions", body | {"stream": True} if stream and body else body)
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert str(tiny_bundle) not in answer["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"prompt":' + b"[" * 9000, b"", b'{"prompt": NaN}'])
def test_malformed_bodies(server: Any, content: bytes) -> None:
    assert server.ask("/v1/completions", content)[0] == 400


@pytest.mark.parametrize(
    "field", ["prompt", "stop", "response_format", "draftwood", "nothing_known", "frequency_penalty"]
)
def test_deep_bodies(server: Any, field: str) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in (500, 3000):
            deep = opening * depth + b"1" + closing * depth
            status, answer, _ = server.ask("/v1/completions", b'{"prompt": "x", "%s": %s}' % (field.encode(), deep))
            assert status == 400 or (field == "draftwood" and status == 200), answer
    schema = b'{"type": "json_schema", "json_schema": {"schema": %s}}' % (b'{"not":' * 2000 + b"{}" + b"}" * 2000)
    assert server.ask("/v1/completions", b'{"prompt": "x", "response_format": %s}' % schema)[0] == 400
    assert server.ask("/health")[1]["models"]["tiny"]["restarts"] == 0


def test_other_routes(server: Any) -> None:
    assert server.ask("/v1/models")[1]["data"][0] | {"created": 0} == {
        "id": "tiny", "created": 0, "max_model_len": 255, "object": "model", "owned_by": "draftwood"
    }  # fmt: skip
    assert server.ask("/version")[1] == {"version": draftwood.__version__}
    assert server.ask("/health")[1]["status"] == "ok"
    tokens = server.ask("/tokenize", {"prompt": PROMPT})[1]
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert server.ask("/tokenize", {})[1]["error"]["param"] == "prompt"
    chat = {"messages": [{"role": "user", "content": PROMPT}], "add_special_tokens": True}
    assert server.ask("/tokenize", chat)[1]["error"]["param"] == "add_special_tokens"
    assert server.ask("/tokenize", chat | {"add_special_tokens": False})[1]["count"] > 0
    refused = server.ask("/v1/completions", {"prompt": ["a", "", "b"], "n": 2})[1]["error"]
    assert (refused["param"], refused["message"]) == ("prompt", "prompt[1]: empty; expected at least one token")
    refused = server.ask("/v1/completions", {"prompt": [5] * 300})[1]["error"]
    assert (refused["param"], refused["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    "path, body, status, message",
    [
        ("/v1/responses", {}, 404, "no path /v1/responses; expected one of /health, "),
        ("/chat/completions", {}, 404, "no path /chat/completions; did you mean /v1/chat/completions? "),
        ("/n%C3%B6pe%0A", None, 404, r"no path /n\xf6pe\n; expected one of "),
        ("/v1/completions", None, 405, "/v1/completions: expected POST, got GET"),
    ],
)
def test_a_path_that_is_not_there(server: Any, path: str, body: Any, status: int, message: str) -> None:
    got, answer, *_ = server.ask(path, body)
    assert (got, answer["error"]["message"][: len(message)]) == (status, message)
    assert "/v1/chat/completions" in answer["error"]["message"] or status == 405


def test_the_openai_client(server: Any, plain: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    extra = {"ignore_eos": True, "metadata": {"a": 5}}
    assert client.completions.create(**asked, extra_body=extra).choices[0].text == plain().text
    chunks = client.completions.create(**asked, stream=True, extra_body=extra)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain().text
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    penalised = plain(**penalties).text
    answer = client.completions.create(**asked, **penalties, extra_body=extra).choices[0]
    assert answer.text == penalised != plain().text
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(**asked, echo=True)
    assert found.value.param == "echo"
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(**asked, extra_body={"num_ctx": 5})
    assert found.value.param == "num_ctx"
    messages = [{"role": "developer", "content": "cat"}, {"role": "user", "content": [{"type": "text", "text": "hat"}]}]
    chat = {"model": "tiny", "messages": messages, "max_completion_tokens": 24, "temperature": 0, "extra_body": extra}
    expected = plain(prompt=[{"role": "system", "content": "cat"}, {"role": "user", "content": "hat"}]).text
    whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2).choices[0]
    assert whole.message.content == expected
    assert len(whole.logprobs.content) == 24
    deltas = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**chat, stream=True)]
    assert "".join(deltas) == expected
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        )
    assert found.value.param == "messages[0].content[0]"


def test_fields_of_other_servers_are_done(server: Any) -> None:
    """Each changes the answer as it says."""
    body = {"prompt": "the cat", "max_tokens": 8, "temperature": 0}

    def text(**more: Any) -> str:
        status, answer, _ = server.ask("/v1/completions", body | more)
        assert status == 200, answer
        found: str = answer["choices"][0]["text"]
        return found

    free = text(ignore_eos=True)
    assert text(ignore_eos=True, stop=free[2:4], include_stop_str_in_output=True) == free[: free.index(free[2:4]) + 2]
    x, q = (server.ask("/tokenize", {"prompt": one, "add_special_tokens": False})[1]["tokens"][0] for one in "xq")
    assert text(ignore_eos=True, logit_bias={str(x): 100}) == text(ignore_eos=True, allowed_token_ids=[x]) == "x" * 8
    assert text(ignore_eos=True, allowed_token_ids=[x, q], bad_words=["x"]) == "q" * 8
    assert text(logit_bias={"1": 100}) == "" != text(logit_bias={"1": 100}, min_tokens=2)
    pytest.importorskip("llguidance")
    assert re.fullmatch(r"[xq]{3}/(yes|no)", text(regex=r"[xq]{3}/(yes|no)", max_tokens=20))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"1": 101}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [999999]),
        ("bad_words", [""]),
        ("min_tokens", 99),
        ("regex", "(["),
        ("structured_outputs", {"regex": "(["}),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_field(server: Any, field: str, value: Any) -> None:
    status, answer, _ = server.ask("/v1/completions", {"prompt": "the cat", "max_tokens": 8, field: value})
    assert status == 400 and answer["error"]["param"].startswith(field) and "\n" not in answer["error"]["message"]
