"""Texts that are held to a grammar: always of it, and the same with and without speculation."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.policy import PLAIN
from draftwood.runtime.speculation.constraint import constrained_draw
from draftwood.runtime.speculation.sampling import Sampling, draw
from draftwood.runtime.text.grammar import Grammars, TextGrammar, Thought
from draftwood.tests.bpe import train_tokenizer
from draftwood.tests.decoded import drafting_gears

pytest.importorskip("llguidance")

# Everything bounded, so that a random model's text ends.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["cat", "mat", "hat"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SAMPLINGS = [{}, {"temperature": 0.8}, {"temperature": 1.5, "top_k": 20}, {"temperature": 1.0, "top_p": 0.7}]
PROMPT = "the cat sat on the mat"


@pytest.fixture(scope="module", params=["medusa", "eagle3", "fasteagle"])
def model(request: pytest.FixtureRequest, tiny_bundles: dict[str, Path]) -> Iterator[OpenedBundle]:
    """Drafts that rank levels, that follow nodes, and that choose their tree."""
    with draftwood.open(tiny_bundles[request.param], threads=1, prefixes=False) as opened:
        yield opened


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_text_is_of_the_schema_with_every_tree(model: OpenedBundle, sampling: dict) -> None:
    accepted = 0
    for seed in range(3 if sampling else 1):
        asked = {"max_new_tokens": 90, "grammar": SCHEMA, "seed": seed, "logprobs": 2} | sampling
        expected = model.generate(PROMPT, policy=PLAIN, **asked)
        assert expected.finish_reason == "stop" and expected.text is not None
        jsonschema.validate(json.loads(expected.text), SCHEMA)
        for policy in ("adaptive", *drafting_gears(model.manifest)):
            found = model.generate(PROMPT, policy=policy, **asked)
            assert found.token_ids == expected.token_ids, policy
            assert [one.logprob for one in found.logprobs] == pytest.approx(
                [one.logprob for one in expected.logprobs], abs=1e-4
            )
            accepted += len(found.token_ids) - 1 - found.steps
    assert accepted > 0 or not sampling  # some drafts hit, or nothing was shown; greedily there is but one text


def test_texts_of_one_launch_have_grammars_of_their_own(model: OpenedBundle) -> None:
    from concurrent.futures import ThreadPoolExecutor

    grammars: list[Any] = [SCHEMA, None, 'start: "yes" | "no"', {"type": "boolean"}]

    def text(number: int, policy: str) -> Any:
        grammar = grammars[number % 4]
        return model.generate(PROMPT, grammar=grammar, policy=policy, seed=number, temperature=1.0, max_new_tokens=70)

    plain = [text(number, PLAIN).token_ids for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert [one.token_ids for one in threads.map(text, range(8), ["adaptive"] * 8)] == plain


class Bits:
    """A constraint that allows some tokens, whatever came before."""

    def __init__(self, allowed_V: np.ndarray) -> None:
        self.allowed_V, self.taken = allowed_V, list[tuple[int, int]]()

    def allows(self, position: int, token: int) -> bool:
        return bool(self.allowed_V[token])

    def allowed(self, position: int) -> np.ndarray:
        return self.allowed_V

    def take(self, position: int, token: int) -> None:
        self.taken.append((position, token))


@pytest.mark.parametrize("sampling", [Sampling(**(one | {"seed": 3})) for one in SAMPLINGS], ids=str)
def test_a_draw_is_that_of_the_logits_that_are_allowed(sampling: Sampling) -> None:
    random = np.random.default_rng(0)
    for position in range(200):
        logits_V = random.normal(0, 3, 500).astype(np.float32).round(1)  # with ties
        constraint = Bits(random.random(500) < random.choice([0.005, 0.3, 0.99]))
        constraint.allowed_V[random.integers(500)] = True
        before_V = logits_V.copy()
        masked_V = np.where(constraint.allowed_V, logits_V, np.float32(-np.inf))
        token = constrained_draw(logits_V, sampling, position, constraint)
        assert token == draw(masked_V, sampling, position) and constraint.allowed_V[token]
        assert constraint.taken == [(position, token)] and (logits_V == before_V).all()


@pytest.fixture
def yes_or_no(bundle: Bundle) -> Callable[[], TextGrammar]:
    return lambda: bundle.grammars.begin('start: "yes" | "no" | "y"')


def spelled(bundle: Bundle, allowed_V: np.ndarray) -> set[str]:
    assert bundle.tokenizer is not None
    return {bundle.tokenizer.spelling(token) or "END" for token in np.flatnonzero(allowed_V).tolist()}


def test_a_grammar_says_when_the_text_ends_and_goes_back(bundle: Bundle, yes_or_no: Callable[[], TextGrammar]) -> None:
    assert bundle.tokenizer is not None
    (y,), (e,), (s,), end = *(bundle.tokenizer.encode(one, special=False) for one in "yes"), 1
    grammar = yes_or_no()
    assert spelled(bundle, grammar.allowed(7)) == {"y", "n"}
    for _ in range(2):
        grammar.take(7, y)
        assert spelled(bundle, grammar.allowed(8)) == {"e", "END"} and grammar.allows(8, end)
        grammar.take(8, e)
        assert not grammar.allows(9, end) and not grammar.allows(9, y) and grammar.allows(9, s)
        grammar.take(9, s)
        assert spelled(bundle, grammar.allowed(10)) == {"END"} and not grammar.allows(10, s)
        grammar.take(10, end)
        assert grammar.allowed(11).all()  # nobody reads what is there
        grammar.take(11, s)
        assert spelled(bundle, grammar.allowed(7)) == {"y", "n"}
    for token in (y, e, s, end, y):
        position = grammar._taken + 7
        agrees = grammar.allowed(position)
        assert [grammar.allows(position, one) for one in range(300)] == agrees.tolist()
        grammar.take(position, token)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ({"type": "nonsense"}, "grammar: "),
        ("start: (", "grammar: "),
        ("", "grammar: "),
        ("start: /([/", "grammar: "),
        ({"type": "string", "pattern": "(["}, "grammar: "),
        (3, "grammar: Expected `str | object | null`, got `int`"),
        ({"a": object()}, "grammar: the schema is not JSON"),
        ("x" * (1 << 21), "grammar: 2097152 characters; expected at most"),
    ],
    ids=["schema", "lark", "empty", "regex", "pattern", "number", "object", "long"],
)
def test_what_is_no_grammar_is_refused_in_one_line(medusa: OpenedBundle, grammar: Any, said: str) -> None:
    with pytest.raises(RequestError) as found:
        medusa.generate(PROMPT, grammar=grammar)
    assert str(found.value).startswith(said) and "\n" not in str(found.value)
    assert not str(found.value).endswith(":") and ("([" not in str(grammar) or "unclosed" in str(found.value))


def test_gbnf_is_told_by_its_rules_and_all_else_is_larks() -> None:
    """Lark's own examples have ?start, which was taken for GBNF's."""
    grammars = Grammars(train_tokenizer([], 261).to_str(), 261, [1])
    for grammar in ('?start: "a"', 'start[suffix="b"]: "a"', 'a: "a"\nstart: a', 'root::="a"', 'b ::= "a"\nroot ::= b'):
        assert grammars.begin(grammar).allowed(0).sum() == 1, grammar
    for grammar, said in (
        ('root ::= start\nstart ::= "a"', "Rule 'start' already exists"),
        ('a: "a"', "no start rule"),
    ):
        with pytest.raises(RequestError, match=said):
            grammars.begin(grammar)


def test_letters_of_an_added_token_can_be_held_to() -> None:
    """Of Qwen's <think>, which is not special, and of <s>, which is: the library reads the token out of them."""
    tokenizer = train_tokenizer([], 261)
    tokenizer.add_tokens(["<think>", "/nothink"])
    grammars, letters = Grammars(tokenizer.to_str(), 263, [1]), ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("<think>", "é<|user|><think>", "<|end|>"):
        held = grammars.begin({"const": text})
        for position, letter in enumerate(letters.pre_tokenize_str(f'"{text}"')[0][0]):
            token = tokenizer.token_to_id(letter)
            assert held.allowed(position).nonzero()[0].tolist() == [token] == [held.forced(position)]
            assert held.allows(position, token)
            held.take(position, token)
    # Added tokens keep their ids, and those that are spelled <...> their names.
    for grammar, name in (
        ('start: "/nothink"', "/nothink"),
        ("start: <think>", "<think>"),
        ("start: <|user|>", "<|user|>"),
    ):
        assert grammars.begin(grammar).allowed(0).nonzero()[0].tolist() == [tokenizer.token_to_id(name)]


def test_a_tokenizer_may_have_more_tokens_than_the_teacher() -> None:
    """[PAD], which some folders add to it alone; no text can be held to that."""
    tokenizer = train_tokenizer([], 261)
    tokenizer.add_tokens(["[PAD]", *map(str, range(40))])
    held = Grammars(tokenizer.to_str(), 261, [1]).begin('start: "a" /./* | "[PAD]"')
    a = tokenizer.token_to_id("a")
    assert held.allowed(0).size == 261 and held.allowed(0)[a] and held.allows(0, a)
    forced = Grammars(tokenizer.to_str(), 261, [1]).begin('start: "[PAD]"')
    assert forced.forced(0) is None
    with pytest.raises(RequestError, match="no token of this bundle can go on"):
        forced.allowed(0)


@pytest.mark.parametrize("grammar", [{"const": 7}, 'start: "7"', 'root ::= "7"'], ids=["schema", "lark", "gbnf"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_thought_is_free_until_its_mark_however_that_is_spelled(bundle: Bundle, grammar: Any, begun: bool) -> None:
    tokenizer = bundle.tokenizer
    assert tokenizer is not None
    begin, end = (tokenizer.token_id(mark) for mark in ("<|system|>", "<|user|>"))
    assert begin is not None and end is not None
    held = bundle.grammars.begin(grammar, Thought(None if begun else begin, end, "cat"))
    at = 0

    def takes(*tokens: int) -> bool:
        nonlocal at
        for token in tokens:
            if not held.allows(at, token):
                return False
            assert held.allowed(at)[token]
            held.take(at, token)
            at += 1
        return True

    (seven,) = tokenizer.encode("7")
    letters = {letter: tokenizer.token_id(letter) for letter in "cat"}
    spelled = [token for token in letters.values() if token is not None]
    assert len(spelled) == 3 and held.forced(0) is None
    assert held.allows(0, seven) and takes(*([] if begun else [begin]))
    assert not takes(begin) and not takes(*spelled) and at == (0 if begun else 1) + 2
    assert takes(seven, *tokenizer.encode(" 8"), end) and not takes(end) and not takes(spelled[0])
    assert takes(seven) and held.allows(at, bundle.manifest.teacher.eos[0]) and not held.allows(at, seven)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_gbnf_is_understood_and_ignore_eos_refused(tiny_bundle: Path, engine: str) -> None:
    with draftwood.open(tiny_bundle, engine=engine, threads=1) as model:
        assert model.generate(PROMPT, grammar='root ::= "yes" | "no"').text in ("yes", "no")
        with pytest.raises(RequestError, match="leave ignore_eos out"):
            model.generate(PROMPT, grammar={"type": "object"}, ignore_eos=True)


def test_without_the_library_one_line_says_so(tiny_bundle: Path, python: Callable[..., str]) -> None:
    code = f"""
import draftwood
with draftwood.open({str(tiny_bundle)!r}, threads=1) as model:
    assert model.generate("the cat", max_new_tokens=4).steps
    try:
        model.generate("the cat", grammar={{"type": "object"}})
    except draftwood.errors.RequestError as error:
        print(error)
"""
    assert python(code, blocked=["llguidance"]) == (
        "grammar: needs the package llguidance, which the extra serve brings\n"
    )


def test_a_library_that_forgets_long_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.7.0")
    with pytest.raises(
        RequestError, match=r"^grammar: llguidance 1\.7\.0 is too old for it; install 1\.7\.2 or later$"
    ):
        Grammars("", 1, [0])


def test_a_long_text_with_escapes_is_held_to_in_whole() -> None:
    lines = "\n" * 100
    tokenizer = train_tokenizer([{"id": "0", "text": "the cat"}], 300)
    held = Grammars(tokenizer.to_str(), 300, [1]).begin({"const": lines})
    for position, token in enumerate(tokenizer.encode(json.dumps(lines)).ids):
        assert held.allows(position, token), position
        held.take(position, token)
