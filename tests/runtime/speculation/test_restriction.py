"""Restrictions and biases of a request: exact, and the same with every tree."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.policy import PLAIN
from draftwood.runtime.speculation.adjustment import Adjustment
from draftwood.runtime.speculation.restriction import Restriction, Wishes, words_of
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.tests.decoded import drafting_gears

PROMPT = "the cat sat on the mat"
END = 1


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def model(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> Iterator[OpenedBundle]:
    """Drafts that rank levels, that follow nodes, and that choose their tree."""
    with draftwood.open(tiny_bundles[request.param], threads=1, prefixes=False) as opened:
        yield opened


def of_every_tree(model: OpenedBundle, **asked: Any) -> Any:
    """The result, which is that of every tree."""
    plain = model.generate(PROMPT, policy=PLAIN, **asked)
    for gear in drafting_gears(model.manifest):
        assert model.generate(PROMPT, policy=gear, **asked).token_ids == plain.token_ids, (gear, asked)
    return plain


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 3}, {"temperature": 1.0, "top_p": 0.6}], ids=str)
def test_every_field_is_exact_with_every_tree(model: OpenedBundle, sampling: dict) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 24} | sampling
    free = of_every_tree(model, ignore_eos=True, **asked)
    some = tuple(sorted({*free.token_ids[:3], 7, 40, 41, 42}))
    held = of_every_tree(model, ignore_eos=True, allowed_token_ids=some, **asked)
    assert set(held.token_ids) <= set(some) and len(held.token_ids) == 24
    pushed = of_every_tree(model, ignore_eos=True, logit_bias={77: 100.0}, **asked)
    assert set(pushed.token_ids) == {77}
    shunned = of_every_tree(model, ignore_eos=True, logit_bias={free.token_ids[0]: -100.0}, **asked)
    assert free.token_ids[0] not in shunned.token_ids
    ended = of_every_tree(model, logit_bias={END: 100.0}, min_tokens=9, **asked)
    assert ended.token_ids.index(END) == 9 == len(ended.token_ids) - 1
    assert of_every_tree(model, logit_bias={END: 100.0}, **asked).token_ids == (END,)


def test_a_bad_word_does_not_come(model: OpenedBundle) -> None:
    tokenizer = model.bundle.tokenizer
    assert tokenizer is not None
    asked: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    free = of_every_tree(model, **asked)
    for word in ("cat", "the", "a", tokenizer.decode(free.token_ids[4:6]).strip() or "hat"):
        words = words_of([word], tokenizer)
        found = of_every_tree(model, bad_words=[word], **asked).token_ids
        for tokens in words:
            assert tokens not in [found[at : at + len(tokens)] for at in range(len(found))], word


def test_a_stop_string_waits_for_the_least_tokens_and_may_be_shown(model: OpenedBundle) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    text = of_every_tree(model, **asked).text
    stop = text[4:6]
    cut, shown = (of_every_tree(model, stop=stop, include_stop_str_in_output=one, **asked) for one in (False, True))
    assert cut.text == text[: text.index(stop)] and shown.text == cut.text + stop
    late = of_every_tree(model, stop=stop, min_tokens=20, **asked)
    assert len(late.token_ids) >= 20 and late.text.startswith(cut.text + stop)


def test_a_stop_token_ends_the_text_and_is_not_in_it(model: OpenedBundle) -> None:
    tokenizer, asked = model.bundle.tokenizer, {"max_new_tokens": 30, "ignore_eos": True}
    assert tokenizer is not None
    tokens = of_every_tree(model, **asked).token_ids
    stop = next(token for at, token in enumerate(tokens) if at > 3 and token not in tokens[:at])
    at = tokens.index(stop)
    for shown in (False, True):
        ended = of_every_tree(model, stop_token_ids=[stop], include_stop_str_in_output=shown, **asked)
        assert ended.token_ids == tokens[: at + 1] and ended.finish_reason == "stop"
        assert ended.text == tokenizer.decode(tokens[: at + shown])
    later = of_every_tree(model, stop_token_ids=[stop], min_tokens=at + 2, **asked)
    assert stop not in later.token_ids[: at + 2]
    with pytest.raises(RequestError, match="stop_token_ids: token id -1 is outside the vocabulary"):
        model.generate(PROMPT, stop_token_ids=[-1])


def test_a_bias_is_added_before_anything_else() -> None:
    random = np.random.default_rng(0)
    for position in range(100):
        logits_V = random.normal(0, 2, 300).astype(np.float32)
        state = SequenceState(None, None, Sampling(temperature=0.9, top_k=20, seed=2))
        bias = {int(token): float(random.normal(0, 9)) for token in random.choice(300, 5, replace=False)}
        state.adjustment = Adjustment(Wishes(logit_bias=bias), ())
        biased_V, before_V = logits_V.copy(), logits_V.copy()
        biased_V[[*bias]] += np.array([*bias.values()], np.float32)
        assert state.draw(logits_V, position) == draw(biased_V, state.sampling, position)
        assert (logits_V == before_V).all()


@pytest.mark.parametrize("seed", range(20))
def test_penalties_are_those_of_transformers_and_vllm(seed: int) -> None:
    """Token by token, as the formulas say it; the answer is taken back in between, as a walk through a tree does."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 40, 12).tolist()
    presence, frequency = (float(value) for value in random.uniform(-2, 2, 2))
    repetition = float(random.uniform(0.5, 2))
    wishes = Wishes(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    adjustment, answer = Adjustment(wishes, prompt), list[int]()
    for _ in range(60):
        if answer and random.random() < 0.3:
            del answer[int(random.integers(len(answer))) :]
        logits_V = random.normal(0, 3, 40).astype(np.float32)
        wanted_V = logits_V.copy()
        processor = transformers.RepetitionPenaltyLogitsProcessor(repetition)
        wanted_V = processor(torch.tensor([[*prompt, *answer]]), torch.from_numpy(wanted_V)[None])[0].numpy()
        for token in range(40):
            count = answer.count(token)
            wanted_V[token] -= frequency * count + presence * (count > 0)
        position = len(prompt) + len(answer)
        np.testing.assert_allclose(adjustment.of(position, logits_V), wanted_V, rtol=1e-5, atol=1e-5)
        answer.append(int(random.integers(40)))
        adjustment.take(position, answer[-1])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "min_p": 0.1, "seed": 3}], ids=str)
def test_penalties_are_exact_with_every_tree(model: OpenedBundle, sampling: dict) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True} | sampling
    free = of_every_tree(model, **asked).token_ids
    for penalties in ({"presence_penalty": 1.0, "frequency_penalty": 0.5}, {"repetition_penalty": 1.5}):
        other = of_every_tree(model, **penalties, **asked).token_ids
        assert len(set(other)) > len(set(free)), penalties
    often = of_every_tree(model, frequency_penalty=-2.0, **asked).token_ids
    assert len(set(often)) < len(set(free))
    grammar = of_every_tree(model, frequency_penalty=2.0, grammar="start: /[a-z ]+/", max_new_tokens=30, **sampling)
    assert grammar.text.replace(" ", "").isalpha()


def test_a_text_that_cannot_go_on_names_what_was_asked_for() -> None:
    grammar = Restriction(Wishes(allowed_token_ids=(2,)), set(), {1}, 4, 0, None)
    for wishes, words, said in (
        (Wishes(bad_words=("a",)), {(2,)}, "bad_words: with grammar"),
        (Wishes(allowed_token_ids=(1,), min_tokens=3), set[Any](), "allowed_token_ids: with min_tokens and grammar"),
    ):
        with pytest.raises(RequestError, match=f"{said}, no token can go on with the text"):
            Restriction(wishes, words, {1}, 4, 0, grammar).allowed(0)


def test_a_restriction_goes_back_with_the_text() -> None:
    wishes = Wishes(allowed_token_ids=(1, 2, 3, 4), min_tokens=2)
    one = Restriction(wishes, {(2, 3), (4,)}, [1], 6, 10, None)
    assert np.flatnonzero(one.allowed(10)).tolist() == [2, 3]
    one.take(10, 2)
    assert np.flatnonzero(one.allowed(11)).tolist() == [2] and not one.allows(11, 3)
    one.take(11, 2)
    assert np.flatnonzero(one.allowed(12)).tolist() == [1, 2]
    one.take(10, 3)
    assert np.flatnonzero(one.allowed(11)).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids: no token would be allowed"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids: token id 300 is outside the vocabulary"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id -1 is outside"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: expected numbers between"),
        ({"logit_bias": {1: 1e39}}, "logit_bias: expected numbers between"),
        ({"presence_penalty": float("inf")}, "presence_penalty: expected a number between"),
        ({"frequency_penalty": -1e39}, "frequency_penalty: expected a number between"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number from 0.01 to 100, got 0.0"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty: expected a number from 0.01"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty: expected a number from 0.01"),
        ({"temperature": 1e300}, "sampling: temperature: expected a number in [0, 100]"),
        ({"min_p": 1.5}, "sampling: min_p: expected a number in [0, 1]"),
        ({"bad_words": [" "]}, "bad_words: expected words"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens: 9, but the text has at most 8"),
        ({"min_tokens": 2, "grammar": "start: /a*/"}, "min_tokens: the grammar says"),
        ({"min_tokens": 2, "allowed_token_ids": [END]}, "allowed_token_ids: with min_tokens, no token"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(medusa: OpenedBundle, asked: dict, said: str) -> None:
    with pytest.raises(RequestError) as found:
        medusa.generate(PROMPT, **asked)
    assert str(found.value).startswith(said)


@pytest.mark.parametrize(
    "asked",
    [
        {"logit_bias": {1: 1e4, 2: -1e4}},
        {"presence_penalty": -1e4, "frequency_penalty": 1e4},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"temperature": 5e-324},
        {"temperature": 100.0},
        {"temperature": 1.0, "top_p": 5e-324},
    ],
    ids=str,
)
def test_numbers_at_the_ends_of_their_ranges_are_computed_with(medusa: OpenedBundle, asked: dict) -> None:
    asked = {"max_new_tokens": 20, "seed": 1, "ignore_eos": True} | asked
    texts = [medusa.generate(PROMPT, policy=policy, **asked).token_ids for policy in ("adaptive", "plain")]
    assert texts[0] == texts[1] and len(texts[0]) == 20
