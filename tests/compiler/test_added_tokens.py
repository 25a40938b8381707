"""Tokens that files next to tokenizer.json name: ids, texts and chats are those of transformers, or it is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from draftwood.compiler.teachers.formats import write_tokenizer
from draftwood.compiler.teachers.gguf_tokenizer import TEKKEN
from draftwood.compiler.teachers.registry import read_config
from draftwood.errors import CheckpointError
from draftwood.runtime.text.tokenizer import Tokenizer

# Of the vocabulary's last three no one is an added token.
SPECIAL, PLAIN = ["<|begin|>", "<|end|>"], ["<eos>", "<|user|>", "<x>"]
TEXTS = ["the <|user|> quick <eos> a", "<|begin|> x <|end|> y", "[PAD] b <x> .  Hi , there ' s", "I 'm <x>.<|user|>!"]
CHAT = [{"role": "user", "content": "hi"}]
BOTH = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
OFF = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{{ user_token }}{% endfor %}"


def listed(**tokens: dict[str, Any]) -> dict[str, Any]:
    """``added_tokens_decoder``, by the names of the tokens below."""
    texts = {"begin": "<|begin|>", "end": "<|end|>", "user": "<|user|>", "x": "<x>", "more": "[PAD]"}
    return {"added_tokens_decoder": {texts[name]: OFF | {"content": texts[name]} | t for name, t in tokens.items()}}


# tokenizer_config.json, special_tokens_map.json, added_tokens.json; ids stand as the tokens' texts.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {}),
    "the vocabulary's own": (BOTH, {}, {}),
    "an end of the plain vocabulary": (BOTH | {"eos_token": "<eos>"}, {}, {}),
    "named in the older file": ({}, BOTH, {}),
    "an object there": ({}, BOTH | {"eos_token": OFF | {"content": "<eos>", "lstrip": True}}, {}),
    "named otherwise there": (BOTH, {"bos_token": "<x>", "eos_token": "<eos>"}, {}),
    "named otherwise there, but listed": (BOTH | listed(begin={"special": True}), {"bos_token": "<x>"}, {}),
    "additional": (BOTH | {"additional_special_tokens": ["<|user|>"]}, {}, {}),
    "additional in the older file": (BOTH, {"additional_special_tokens": ["<|user|>"]}, {}),
    "extra": (BOTH | {"extra_special_tokens": ["<|user|>"]}, {}, {}),
    "extra by name, and additional": (
        BOTH | {"extra_special_tokens": {"user_token": "<|user|>"}, "additional_special_tokens": ["<x>"]},
        {},
        {},
    ),
    "extra by name": (BOTH | {"extra_special_tokens": {"user_token": "<|user|>"}}, {}, {}),
    "a name of its own": (BOTH | {"user_token": "<|user|>"}, {}, {}),
    "listed as special": (BOTH | listed(user={"special": True}), {}, {}),
    "listed as plain": (BOTH | listed(user={}, x={"single_word": True}), {}, {}),
    "listed as normalised": (BOTH | listed(user={"normalized": True}), {}, {}),
    "listed with spaces": (BOTH | listed(end={"special": True, "lstrip": True, "rstrip": True}), {}, {}),
    "special ones listed as plain": (BOTH | listed(begin={}, end={}), {}, {}),
    "listed as plain and named": (BOTH | {"pad_token": "<x>"} | listed(x={}), {}, {}),
    "older list": (BOTH, {}, {"<|user|>": "<|user|>"}),
    "older list, named": (BOTH, {"pad_token": "<|user|>"}, {"<|user|>": "<|user|>", "<x>": "<x>"}),
    "a new one": (BOTH | {"pad_token": "[PAD]"}, {}, {}),
    "a new one, listed": (BOTH | listed(more={"special": True}), {}, {}),
    "begin and end asked for": (BOTH | {"add_bos_token": True, "add_eos_token": True}, {}, {}),
}


def save(folder: Path, lower: bool, config: dict[str, Any], special: dict[str, Any], added: dict[str, Any]) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, show_progress=False, **options))
    if lower:
        made.normalizer = normalizers.Lowercase()
    held = json.loads(made.to_str())
    ids: dict[str, int] = held["model"]["vocab"]
    for text in PLAIN:
        ids[text] = len(ids)
    numbers = ids | {"[PAD]": len(ids)}
    named = config.get("added_tokens_decoder", {}).items()
    config = config | ({"added_tokens_decoder": {str(numbers[text]): token for text, token in named}} if named else {})
    files = {"tokenizer.json": held, "tokenizer_config.json": config | {"chat_template": TEMPLATE}}
    files |= {"special_tokens_map.json": special, "added_tokens.json": {text: numbers[text] for text in added}}
    for name, values in files.items():
        if values:
            (folder / name).write_text(json.dumps(values))


@pytest.mark.parametrize("lower", [False, True], ids=["as is", "lower case"])
@pytest.mark.parametrize("case", CASES)
def test_ids_texts_and_chats_are_those_of_transformers(case: str, lower: bool, tmp_path: Path) -> None:
    save(tmp_path, lower, *CASES[case])
    (tmp_path / "ours").mkdir()
    assert write_tokenizer(tmp_path, tmp_path / "ours")
    ours, theirs = Tokenizer.load(tmp_path / "ours"), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("config", "special", "added", "end"),
    [
        (BOTH, {}, {}, "<|end|>"),
        ({"eos_token": {"content": "<eos>"}}, {}, {}, "<eos>"),
        ({"eos_token": "[PAD]"} | listed(more={}), {}, {}, "[PAD]"),
        ({}, {"eos_token": "[PAD]"}, {"[PAD]": "[PAD]"}, "[PAD]"),
        ({"bos_token": "<|begin|>"}, {}, {}, None),
        ({"eos_token": "[PAD]"}, {}, {}, None),
    ],
    ids=["added", "of the plain vocabulary", "listed", "older", "none", "without an id"],
)
def test_texts_end_at_the_tokenizers_own_end(
    config: dict, special: dict, added: dict, end: str | None, tmp_path: Path
) -> None:
    """A fine-tuned model's config.json often names its base's alone: chats went on after <|im_end|>."""
    save(tmp_path, False, config, special, added)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    LlamaConfig(vocab_size=1000, eos_token_id=2, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert read_config(tmp_path).eos == (2, *([] if end is None else [tokens.get(end, len(tokens))]))
    LlamaConfig(vocab_size=3, eos_token_id=2, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert read_config(tmp_path).eos == ((2, 1) if end == "<|end|>" else (2,)), "what a teacher cannot write is no end"


@pytest.mark.parametrize(
    "config", [BOTH, BOTH | listed(end={}), {"extra_special_tokens": {"turn": "<|end|>"}}], ids=str
)
def test_a_token_with_a_name_is_special_though_the_vocabulary_adds_it_as_plain(config: dict, tmp_path: Path) -> None:
    """Some fine-tuned models name such a token as the end of their texts; it would be shown."""
    save(tmp_path, False, config, {}, {})
    held = json.loads((path := tmp_path / "tokenizer.json").read_text())
    held["added_tokens"][1]["special"] = False
    path.write_text(json.dumps(held))
    (tmp_path / "ours").mkdir()
    write_tokenizer(tmp_path, tmp_path / "ours")
    ours, theirs = Tokenizer.load(tmp_path / "ours"), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode(TEXTS[1])
    assert ids == theirs(TEXTS[1])["input_ids"]
    assert "<|end|>" not in ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("kind", "warned"), [("mistral", True), ("llama", False)])
def test_a_tokenizer_that_mistral_published_wrong_is_warned_of(kind: str, warned: bool, tmp_path: Path) -> None:
    save(tmp_path, False, BOTH, {}, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    held = (path := tmp_path / "tokenizer.json").read_text()
    for expression, expected in ((r"\p{N}{1,3}|\s+", warned), (TEKKEN, False)):
        made, cut = tokenizers.Tokenizer.from_str(held), pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(use_regex=False)])
        path.write_text(made.to_str())
        (tmp_path / "ours").mkdir(exist_ok=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            write_tokenizer(tmp_path, tmp_path / "ours")
        assert ["otherwise than Mistral's own tokenizer" in str(one.message) for one in caught] == [True] * expected


def test_templates_of_several_files_are_named_by_them(tmp_path: Path) -> None:
    save(tmp_path, False, BOTH, {}, {})
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "ours").mkdir()
    write_tokenizer(tmp_path, tmp_path / "ours")
    ours, theirs = Tokenizer.load(tmp_path / "ours"), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tool = {"type": "function", "function": {"name": "bus", "parameters": {"type": "object"}}}
    for tools in (None, [tool]):
        said = theirs.apply_chat_template(CHAT, tokenize=False, tools=tools)
        assert ours.render({"messages": CHAT, "tools": tools}) == said == ("tools" if tools else "plain")


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens is True; expected false"),
        ("tokenizer_config.json", listed(x={}), "added_tokens_decoder is .*; expected objects with a content, by id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<x>"}}}, "'<x>' gets id 300; expected 9"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token is 5; expected texts, or objects with a text"),
        ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, "extra_special_tokens is '<x>'; expected a list or"),
        ("tokenizer.json", {"model": {"type": "BPE", "dropout": 0.1}}, "dropout is 0.1; expected null"),
        ("tokenizer.json", {"added_tokens": "<x>"}, "added_tokens is '<x>'; expected a list of objects"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_has_no_form_is_refused(file: str, fields: dict, said: str, tmp_path: Path) -> None:
    save(tmp_path, False, BOTH, {}, {})
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | fields))
    (out := tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{said}[^\n]*$"):
        write_tokenizer(tmp_path, out)
