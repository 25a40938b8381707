"""A SentencePiece model alone is a tokenizer: ids of 2000 lines are those of SentencePiece, of transformers' Llama, or
of a class that a publisher ships as Python; what has no form here is refused in one line by every command."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from transformers import AutoTokenizer

from draftwood.compiler.checkpoints.gguf_header import read_header
from draftwood.compiler.teachers.formats import has_tokenizer, write_tokenizer
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer as write_gguf_tokenizer
from draftwood.errors import CheckpointError
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests.gguf_files import write_tokens
from draftwood.tests.many_lines import lines
from draftwood.tools.cli import main
from draftwood.tools.measure.conversations import continuation

sentencepiece = pytest.importorskip("sentencepiece")

CORPUS = [line.replace("\n", " ") for line in lines(300, seed=1)]
NAMED = regex.compile(r"<s>|</s>|<unk>")
LINES = [line for line in lines(2000) if not NAMED.search(line)]
LINES += ["", " ", "   leading and trailing   ", " \t x", "a\0b", "\uff1c|user|\uff1e x", "①２ ﬁ"]
SYMBOLS = ["<|user|>", "[unused9]", "<|im_start|>", "foxes"]


def train(**options: Any) -> bytes:
    made = io.BytesIO()
    chosen = {
        "model_type": "bpe", "vocab_size": 800, "byte_fallback": True, "normalization_rule_name": "identity",
        "add_dummy_prefix": True, "remove_extra_whitespaces": False, "character_coverage": 0.98,
    } | options  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=made, hard_vocab_limit=False, minloglevel=2, **chosen
    )
    return made.getvalue()


@pytest.fixture(scope="module")
def plain() -> bytes:
    return train()


def edited(model: bytes, change: Callable[[Any], object]) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    held = sentencepiece_model_pb2.ModelProto.FromString(model)
    change(held)
    return held.SerializeToString()


def convert(folder: Path, model: bytes, **config: Any) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "ours").mkdir()
    assert write_tokenizer(folder, folder / "ours")
    return Tokenizer.load(folder / "ours")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False, "user_defined_symbols": SYMBOLS},
        {"remove_extra_whitespaces": True, "user_defined_symbols": SYMBOLS},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "nfkc_cf", "remove_extra_whitespaces": True, "user_defined_symbols": SYMBOLS},
        {"byte_fallback": False, "split_digits": True, "user_defined_symbols": SYMBOLS},
        {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"model_type": "unigram", "user_defined_symbols": SYMBOLS, "byte_fallback": False, "vocab_size": 600},
    ],
    ids=str,
)
def test_ids_and_texts_are_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    model = train(**options)
    ours, theirs = convert(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    for line, ids in zip(LINES, theirs.encode(LINES), strict=True):
        assert ours.encode(line, special=False) == ids, line
        if theirs.unk_id() not in ids:  # decoded as a sign of its own there
            assert ours.decode(ids) == theirs.decode(ids), line


@pytest.mark.parametrize(
    "config", [{}, {"legacy": True}, {"add_prefix_space": False}, {"add_bos_token": False}], ids=str
)
def test_a_llama_tokenizer_is_that_of_transformers(config: dict[str, Any], plain: bytes, tmp_path: Path) -> None:
    model = edited(plain, lambda held: [setattr(held.pieces[id_], "type", 4) for id_ in (600, 601)])
    ours = convert(tmp_path, model, tokenizer_class="LlamaTokenizer", **config)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for line in [*LINES, "<s>a</s> b<unk>"]:
        ids = theirs.encode(line, add_special_tokens=False)
        assert ours.encode(line, special=False) == ids, line
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), line


def test_a_continuation_has_the_space_that_its_first_token_loses_alone(plain: bytes, tmp_path: Path) -> None:
    tokenizer = convert(tmp_path, plain, tokenizer_class="LlamaTokenizer")
    prompt = tokenizer.encode("the cat:\n")
    new = tokenizer.encode("the cat:\n    the hat")[len(prompt) :]
    assert tokenizer.decode(new) == "   the hat"
    assert continuation(tokenizer, prompt, new) == "    the hat"


@pytest.mark.parametrize("older", [True, False], ids=["older files", "listed as plain"])
def test_an_added_token_with_a_name_is_special(older: bool, plain: bytes, tmp_path: Path) -> None:
    named, ids = {"eos_token": "<|im_end|>"}, {"<|im_end|>": _size(plain), "<|im_start|>": _size(plain) + 1}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    listed = {"added_tokens_decoder": {str(id_): flags | {"content": text} for text, id_ in ids.items()}}
    for name, values in {"special_tokens_map.json": named, "added_tokens.json": ids}.items() if older else ():
        (tmp_path / name).write_text(json.dumps(values))
    ours = convert(tmp_path, plain, tokenizer_class="LlamaTokenizer", **({} if older else named | listed))
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), "the cat<|im_end|>\n<|im_start|>the hat"
    found = ours.encode(text, special=False)
    assert found == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(found) == theirs.decode(found, skip_special_tokens=True) == "the cat\n<|im_start|>the hat"


def openpangu(model: bytes) -> tuple[bytes, dict[str, Any]]:
    """Files as openPangu's: marks of turns are pieces that stand for themselves, and the class is Python of its own."""
    marks = {600: "[unused9]", 601: "[unused10]", 602: "<|User|>:"}

    def change(held: Any) -> None:
        for id_, text in marks.items():
            held.pieces[id_].piece, held.pieces[id_].type = text, 4

    added = {0: "<unk>", 1: "<s>", 2: "</s>"} | marks | {805: "[more]"}
    config = {
        "tokenizer_class": "PanguTokenizer", "bos_token": "<s>", "eos_token": {"content": "[unused10]"},
        "auto_map": {"AutoTokenizer": ["tokenization_openpangu.PanguTokenizer", None]},
        "chat_template": "{% for m in messages %}[unused9]{{ m.content }}[unused10]{% endfor %}",
        "added_tokens_decoder": {str(id_): {"content": text, "special": True} for id_, text in added.items()},
    }  # fmt: skip
    grown = edited(model, change)
    config["added_tokens_decoder"][str(_size(grown))] = config["added_tokens_decoder"].pop("805")
    return grown, config


def _size(model: bytes) -> int:
    return int(sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size())


def test_a_class_of_python_is_read_and_not_run(plain: bytes, tmp_path: Path) -> None:
    """Such a class gives each piece between added tokens to SentencePiece, and puts the begin token before all."""
    model, config = openpangu(plain)
    (tmp_path / "tokenization_openpangu.py").write_text("raise SystemExit('was run')")
    ours, pieces = convert(tmp_path, model, **config), sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = {token["content"]: int(id_) for id_, token in config["added_tokens_decoder"].items()}
    marks = regex.compile(f"({'|'.join(map(regex.escape, ids))})")
    for at, line in enumerate(LINES):
        text = f"[unused9]系统\uff1a{line}[unused10]{'[more]' * (at % 3)} {line}"
        found = [[ids[part]] if part in ids else pieces.encode(part) for part in marks.split(text) if part]
        assert ours.encode(text) == [1, *(id_ for part in found for id_ in part)], text
    assert ours.chat([{"role": "user", "content": "hat"}]) == [600, *pieces.encode("hat"), 601]
    assert "auto_map" not in json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())


def test_a_gguf_file_of_the_same_model_has_its_ids(plain: bytes, tmp_path: Path) -> None:
    """Only before a space, no further one is written; see gguf_tokenizer.py."""
    from sentencepiece import sentencepiece_model_pb2

    held = sentencepiece_model_pb2.ModelProto.FromString(plain)
    tokens, kinds = [piece.piece for piece in held.pieces], [piece.type for piece in held.pieces]
    scores = [piece.score for piece in held.pieces]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    write_tokens(tmp_path / "m.gguf", "llama", tokens, kinds, scores=scores, **special)
    assert write_gguf_tokenizer(read_header(tmp_path / "m.gguf"), tmp_path)
    ours = Tokenizer.load(tmp_path)
    bare = edited(plain, lambda held: setattr(held.normalizer_spec, "add_dummy_prefix", False))
    begun, as_is = (sentencepiece.SentencePieceProcessor(model_proto=model) for model in (plain, bare))
    for line in LINES:
        theirs = as_is if line.startswith((" ", "▁")) else begun
        assert ours.encode(line, special=False) == theirs.encode(line), line


def normal_twice(held: Any) -> None:
    held.pieces[700].piece = held.pieces[701].piece


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "not SentencePiece's": (lambda model: b"IQ== 0\nIg== 1\n", "is no SentencePiece model"),
    "half": (lambda model: model[: len(model) // 2], "is no SentencePiece model"),
    "empty": (lambda model: b"", "is no SentencePiece model"),
    "twice": (lambda model: edited(model, normal_twice), "expected each once"),
    "words": (lambda model: edited(model, lambda held: setattr(held.trainer_spec, "model_type", 3)), "model type 3"),
    "suffix": (
        lambda model: edited(model, lambda held: setattr(held.trainer_spec, "treat_whitespace_as_suffix", True)),
        "at a word's end",
    ),
    "unused": (lambda model: edited(model, lambda held: setattr(held.pieces[700], "type", 5)), "1 pieces that it"),
    "bytes": (
        lambda model: edited(model, lambda held: setattr(held.pieces[7], "piece", "q~q")).replace(b"q~q", b"\xff" * 3),
        "piece 7 is .*expected UTF-8",
    ),
    "unknown": (lambda model: edited(model, lambda held: setattr(held.trainer_spec, "unk_id", 9999)), "unk_id is 9999"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_has_no_form_is_one_line_with_the_way_out(fault: str, plain: bytes, tmp_path: Path) -> None:
    damage, said = FAULTS[fault]
    (tmp_path / "tokenizer.model").write_bytes(damage(plain))
    (out := tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*{said}.*; put its tokenizer\.json there: ") as one:
        write_tokenizer(tmp_path, out)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tekken.json"])
def test_a_folder_of_a_tokenizers_name_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert not has_tokenizer(tmp_path)
    assert not write_tokenizer(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json", "qwen.tiktoken"])
def test_a_tokenizer_in_another_file_alone_is_refused(name: str, tmp_path: Path) -> None:
    """A bundle without a tokenizer was built."""
    (tmp_path / name).write_text("{}")
    assert has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name}: a tokenizer that has no form here; put its tokenizer.json"):
        write_tokenizer(tmp_path, tmp_path)


def test_an_added_token_in_the_place_of_a_piece_is_refused(plain: bytes, tmp_path: Path) -> None:
    added = {"600": {"content": "[unused9]"}}
    with pytest.raises(CheckpointError, match=r"id 600 is .*; tokenizer_config\.json says '\[unused9\]'"):
        convert(tmp_path, plain, added_tokens_decoder=added)


def test_a_folder_with_such_a_model_alone_is_inspected(
    tiny_teacher: Path, plain: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_teacher, tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").unlink()
    (tmp_path / "teacher" / "tokenizer.model").write_bytes(plain)
    assert main(["inspect", str(tmp_path / "teacher"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"]["tokens"] == _size(plain)
