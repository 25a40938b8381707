"""The options of a request's body are those of the decoding, by name and value, on both sides of the socket."""

import json

from draftwood.runtime.decoding import Asked, Options
from draftwood.runtime.speculation.restriction import Wishes
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.serve import messages
from draftwood.tools.serve.asks import asks
from draftwood.tools.serve.bodies import CompletionBody, parse
from draftwood.tools.serve.messages import Ask

BODY = {
    "model": "m", "prompt": "the cat", "n": 2, "seed": 2**63 - 1, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9,
    "top_k": 3, "stop": ["a", "b"], "ignore_eos": True, "logprobs": 2, "allowed_token_ids": [5, 6], "bad_words": ["c"],
    "min_tokens": 2, "logit_bias": {"4": -1.5}, "include_stop_str_in_output": True,
}  # fmt: skip


def sent(body: dict) -> list[Ask]:
    """The texts of a body, as an engine's process reads them."""
    found = asks(parse(json.dumps(body).encode(), CompletionBody), 100, None, [])
    read = [messages.decode_for_engine(messages.framed(ask)[messages.HEAD_BYTES :]) for ask in found]
    assert read == found
    return found


def test_every_option_of_a_body_reaches_the_decoding() -> None:
    _, second = sent(BODY)
    assert second.options.keys() == Asked.__annotations__.keys()
    assert Options.of(**second.options) == Options(
        max_new_tokens=7, sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=2**63), ignore_eos=True,
        stop_strings=("a", "b"), logprobs=2, include_stop_str_in_output=True,
        wishes=Wishes(allowed_token_ids=(5, 6), bad_words=("c",), min_tokens=2, logit_bias={4: -1.5}),
    )  # fmt: skip


def test_a_body_that_says_nothing_is_sampled_up_to_the_servers_limit() -> None:
    (ask,) = sent({"model": "m", "prompt": "the cat", "seed": -1, "max_tokens": None, "regex": "x+"})
    options = Options.of(**ask.options)
    assert (options.max_new_tokens, options.sampling) == (16, Sampling(temperature=1.0, seed=2**64 - 1))
    assert options.grammar == "start: /x+/" and not options.wishes
