"""The options of a request's body are those of the decoding, by name and value, on both sides of the socket."""

import json
from typing import Any

import pytest

from draftwood.errors import RequestError
from draftwood.manifest import UsualSampling
from draftwood.runtime.options import Asked, Options
from draftwood.runtime.speculation.restriction import Wishes
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.serve import messages
from draftwood.tools.serve.asks import asks
from draftwood.tools.serve.bodies import ChatBody, CompletionBody, parse
from draftwood.tools.serve.errors import RequestRefused
from draftwood.tools.serve.messages import Ask, WrittenChat

BODY = {
    "model": "m", "prompt": "the cat", "n": 2, "seed": 2**63 - 1, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9,
    "top_k": 3, "stop": ["a", "b"], "ignore_eos": True, "logprobs": 2, "allowed_token_ids": [5, 6], "bad_words": ["c"],
    "min_tokens": 2, "logit_bias": {"4": -1.5}, "include_stop_str_in_output": True, "min_p": 0.1,
    "presence_penalty": 1, "stop_token_ids": [9], "frequency_penalty": -1, "repetition_penalty": 1.5,
}  # fmt: skip


def sent(body: dict, **usual: Any) -> list[Ask]:
    """The texts of a body, as an engine's process reads them."""
    return taken(asks(parse(json.dumps(body).encode(), CompletionBody), 100, None, [], UsualSampling(**usual)))


def taken(found: list[Ask]) -> list[Ask]:
    read = [messages.decode_for_engine(messages.framed(ask)[messages.HEAD_BYTES :]) for ask in found]
    assert read == found
    return found


def test_every_option_of_a_body_reaches_the_decoding() -> None:
    _, second = sent(BODY)
    assert second.options.keys() == Asked.__annotations__.keys()
    assert Options.of(**second.options) == Options(
        max_new_tokens=7, sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=2**63),
        stop_strings=("a", "b"), stop_token_ids=(9,), logprobs=2, include_stop_str_in_output=True, ignore_eos=True,
        wishes=Wishes(
            allowed_token_ids=(5, 6), bad_words=("c",), min_tokens=2, logit_bias={4: -1.5}, presence_penalty=1.0,
            frequency_penalty=-1.0, repetition_penalty=1.5,
        ),
    )  # fmt: skip


def test_a_body_that_says_nothing_is_sampled_up_to_the_servers_limit() -> None:
    (ask,) = sent({"model": "m", "prompt": "the cat", "seed": -1, "max_tokens": None, "regex": "x+"})
    options = Options.of(**ask.options)
    assert (options.max_new_tokens, options.sampling) == (16, Sampling(temperature=1.0, seed=2**64 - 1))
    assert options.grammar == "start: /x+/" and not options.wishes


def test_a_body_that_says_nothing_is_sampled_as_the_models_authors_do() -> None:
    usual = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    (ask,) = sent({"prompt": "the cat", "seed": 1}, **usual)
    options = Options.of(**ask.options)
    assert options.sampling == Sampling(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, seed=1)
    assert options.wishes == Wishes(repetition_penalty=1.1)
    # OpenAI's clients send what they mean; a value of the body is never the model's.
    asked = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    (ask,) = sent({"prompt": "the cat", "seed": 1, **asked}, **usual)
    options = Options.of(**ask.options)
    assert options.sampling == Sampling(temperature=0.0, seed=1) and not options.wishes


STRUCTURED: list[tuple[dict[str, Any], Any]] = [
    ({"json": {"type": "object"}}, {"type": "object"}),
    ({"json": '{"const": 1}', "regex": None}, {"const": 1}),
    ({"json_object": True}, {"type": "object"}),
    ({"regex": "x+"}, "start: /x+/"),
    ({"choice": ["yes", 'say "no"', "\n"]}, 'start: "yes" | "say \\"no\\"" | "\\n"'),
    ({"choice": ["a\x7f"]}, 'start: "a\\u007f"'),
    ({"grammar": "start: /x/"}, "start: /x/"),
]


@pytest.mark.parametrize(("asked", "grammar"), STRUCTURED, ids=str)
def test_vllms_structured_outputs_are_grammars(asked: dict, grammar: Any) -> None:
    (ask,) = sent({"prompt": "the cat", "structured_outputs": asked})
    assert ask.options["grammar"] == grammar


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"structured_outputs": {}}, "structured_outputs: expected one of json, .*, got none"),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs: .*, got json and regex",
        ),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json: expected a schema, an object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json: no JSON"),
        ({"structured_outputs": {"json": '{"const": 1e999}'}}, "structured_outputs.json: no JSON"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "regex: expected one of regex and structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ],
    ids=str,
)
def test_structured_outputs_that_are_no_form_are_refused(body: dict, said: str) -> None:
    with pytest.raises(RequestRefused, match=said):
        sent({"prompt": "the cat", **body})


def test_the_schema_of_any_json_is_a_form() -> None:
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"structured_outputs": {"json": {}}},
    ):
        (ask,) = sent({"prompt": "the cat", **body})
        assert ask.options["grammar"] == {}


def chat_asked(**more: Any) -> Ask:
    body = {"messages": [{"role": "user", "content": "the cat"}], **more}
    (ask,) = taken(asks(parse(json.dumps(body).encode(), ChatBody), 100, None, [], UsualSampling()))
    return ask


def chat_sent(**more: Any) -> Asked:
    """The options of a chat."""
    return chat_asked(**more).options


def test_a_call_with_any_whole_number_is_handed_back() -> None:
    """A model may write one of more than 64 bits, and the next request has it."""
    call = {"function": {"name": "product", "arguments": f'{{"a": {2**80}}}'}}
    prompt = chat_asked(messages=[{"role": "assistant", "tool_calls": [call]}]).prompt
    assert isinstance(prompt, WrittenChat)
    assert prompt.read()["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"a": 2**80}
    with pytest.raises(RequestError, match="chat: nested too deep"):
        WrittenChat(b"[" * 2000 + b"]" * 2000).read()


def test_two_lengths_of_an_answer_are_one() -> None:
    """One of them was left out in silence."""
    assert chat_sent(max_tokens=7, max_completion_tokens=7)["max_new_tokens"] == 7
    for lengths in ({"max_tokens": 3, "max_completion_tokens": 7}, {"max_tokens": 700, "max_completion_tokens": 7}):
        with pytest.raises(RequestRefused, match="but max_completion_tokens is 7 and means the same"):
            chat_sent(**lengths)


def test_what_changes_no_answer_is_served() -> None:
    plain = chat_sent(seed=1)
    for field in ({"prediction": {"type": "content", "content": "hat"}}, {"verbosity": "medium"}, {"top_logprobs": 0}):
        assert chat_sent(seed=1, **field) == plain
    assert len(sent(BODY | {"best_of": 2})) == 2
    for field, body in (("verbosity", {"verbosity": "low"}), ("top_logprobs", {"top_logprobs": 1})):
        with pytest.raises(RequestRefused, match=f"^{field}: "):
            chat_sent(**body)
    with pytest.raises(RequestRefused, match="best_of: expected n, since all texts are given, got 3"):
        sent(BODY | {"best_of": 3})


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"tool_choice": "any"}, "tool_choice: expected none or auto or required, got any"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: expected function, got allowed_tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, r"tools\[0\].type: expected function, got custom"),
        ({"response_format": {"type": "json"}}, "response_format.type: expected text or json_object or json_schema, "),
    ],
    ids=str,
)
def test_a_word_that_is_none_of_a_fields_is_answered_with_those(field: dict, said: str) -> None:
    with pytest.raises(RequestRefused, match=said):
        chat_sent(**field)
