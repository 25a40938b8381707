"""Tokenizers of GGUF metadata: texts are cut as llama.cpp cuts them, and become the ids that transformers makes of the
same file, and those of SentencePiece's own rule."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from draftwood.compiler.checkpoints.gguf_header import read_header
from draftwood.compiler.teachers.gguf_tokenizer import write_tokenizer
from draftwood.errors import CheckpointError
from draftwood.runtime.stream import Stream
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tests.bpe import train_tokenizer
from draftwood.tests.gguf_files import write_tokens
from draftwood.tests.many_lines import lines

NORMAL, UNKNOWN, CONTROL, DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CORPUS = list(lines(300, seed=1))
LINES = [*lines(200), "", " ", "   leading and trailing   ", "I'LL DON'T we've 12345"]
# src/llama-vocab.cpp: each expression cuts what the one before has left.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CUTS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama-bpe": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
CUTS["glm4"] = CUTS["llama-bpe"]


@pytest.fixture(scope="module")
def byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges of texts of bytes, two special ones at the end."""
    read = json.loads(train_tokenizer([{"text": text} for text in CORPUS], 600).to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in read["merges"]]
    return [*sorted(read["vocab"], key=read["vocab"].get), "<|endoftext|>", "<|im_start|>"], merges


def save(path: Path, vocabulary: tuple[list[str], list[str]], pre: str, **more: Any) -> Path:
    tokens, merges = vocabulary
    kinds = [NORMAL] * (len(tokens) - 2) + [CONTROL, DEFINED]
    write_tokens(path, "gpt2", tokens, kinds, pre=pre, merges=merges, bos_token_id=len(tokens) - 2, **more)
    return path


def read(path: Path, folder: Path) -> Tokenizer:
    folder.mkdir()
    assert write_tokenizer(read_header(path), folder)
    return Tokenizer.load(folder)


def cut(text: str, expressions: list[str]) -> list[str]:
    """An expression's matches and the text between them, each cut by the next expression."""
    if not expressions:
        return [text] if text else []
    found, at = [], 0
    for match in regex.finditer(expressions[0], text):
        found += [text[at : match.start()], match[0]]
        at = match.end()
    return [piece for part in (*found, text[at:]) for piece in cut(part, expressions[1:])]


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_as_llama_cpp_cuts_them(
    pre: str, byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    assert write_tokenizer(read_header(save(tmp_path / "m.gguf", byte_level, pre)), tmp_path)
    cuts = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    for line in LINES:
        assert [line[at:to] for _, (at, to) in cuts.pre_tokenize_str(line)] == cut(line, CUTS[pre]), line


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2", "default", "smollm"])
def test_ids_are_those_that_transformers_makes_of_the_file(
    pre: str, byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    ours = read(save(tmp_path / "m.gguf", byte_level, pre, add_bos_token=False), tmp_path / "ours")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    if pre == "smollm":  # it leaves out that digits stand alone
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if pre in ("llama-bpe", "tekken"):  # and that words which are tokens need no merges
        theirs.backend_tokenizer.model.ignore_merges = True
    for line in LINES:
        assert ours.encode(line, special=False) == theirs.encode(line, add_special_tokens=False), line


@pytest.mark.parametrize(
    ("pre", "more", "begun"),
    [("llama-bpe", {}, True), ("llama-bpe", {"add_bos_token": False}, False), ("tekken", {}, True),
     ("qwen2", {}, False), ("smollm", {"add_bos_token": True}, True)],
)  # fmt: skip
def test_a_begin_token_comes_where_llama_cpp_puts_one(
    pre: str, more: dict, begun: bool, byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    ours = read(save(tmp_path / "m.gguf", byte_level, pre, **more), tmp_path / "ours")
    assert (ours.encode("hat")[0] == len(byte_level[0]) - 2) == begun


def test_added_tokens_are_whole_whatever_they_are_spelled_with(
    byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """DeepSeek's marks have characters that no vocabulary of bytes has, and runs of spaces are tokens of their own."""
    tokens, merges = byte_level
    added, many = ["<\uff5cUser\uff5c>", "   ", "<\uff5cend▁of▁sentence\uff5c>"], len(tokens)
    kinds = [NORMAL] * many + [DEFINED, DEFINED, CONTROL]
    write_tokens(tmp_path / "m.gguf", "gpt2", tokens + added, kinds, pre="deepseek-r1-qwen", merges=merges)
    ours = read(tmp_path / "m.gguf", tmp_path / "ours")
    ids = ours.encode(text := "<\uff5cUser\uff5c>hat   x", special=False)
    assert (ids[0], ids[-2]) == (many, many + 1) and ours.encode(added[2]) == [many + 2]
    stream = Stream(ours)
    assert ours.decode([*ids, many + 2]) == text == stream.push([*ids, many + 2]) + stream.finish()


KINDS = [(NORMAL, NORMAL), (DEFINED, DEFINED), (UNUSED, DEFINED), (CONTROL, CONTROL)]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_tokens_that_end_a_text_are_whole_and_not_shown(
    kinds: tuple[int, int], byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """As in llama.cpp. transformers shows those that a user defined."""
    tokens, merges = byte_level
    names, of_all = [*tokens, "<|turn|>", "<|im_end|>"], [NORMAL] * len(tokens) + [*kinds]
    named = {"eos_token_id": len(tokens), "eot_token_id": len(tokens) + 1}
    write_tokens(tmp_path / "m.gguf", "gpt2", names, of_all, pre="qwen2", merges=merges, **named)
    ours = read(tmp_path / "m.gguf", tmp_path / "ours")
    ids = ours.encode("hat<|im_end|><|turn|>", special=False)
    assert ids[-2:] == [len(tokens) + 1, len(tokens)] and ours.decode(ids) == "hat"


@pytest.mark.parametrize("key", ["add_eos_token", "add_sep_token", "suppress_tokens"])
def test_what_would_change_a_text_is_refused_by_its_key(
    key: str, byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    path = save(tmp_path / "m.gguf", byte_level, "qwen2", **{key: [3] if key == "suppress_tokens" else True})
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{key} is .*; expected no such key"):
        write_tokenizer(read_header(path), tmp_path)


@pytest.fixture(scope="module")
def pieces() -> tuple[list[str], list[int], list[float]]:
    """A SentencePiece vocabulary, its kinds and scores. It has a text's characters and their merges, the first with the
    best score; bytes for all else; and a word that no merge leads to."""
    learned = tokenizers.Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(CORPUS[:60], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocabulary = json.loads(learned.to_str())["model"]["vocab"]
    words = [word for word in sorted(vocabulary, key=vocabulary.get) if word not in ("<s>", "</s>")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<|user|>"]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words) + [DEFINED]
    return tokens, kinds, [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0]


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: of all neighbours that are a token together the best one, the first among equals."""
    parts = list(text)
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not found:
            return parts
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_the_best_score_first_and_spells_the_rest_in_bytes(
    prefix: bool, pieces: tuple[list[str], list[int], list[float]], tmp_path: Path
) -> None:
    tokens, kinds, scores = pieces
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    write_tokens(tmp_path / "m.gguf", "llama", tokens, kinds, scores=scores, add_space_prefix=prefix, **special)
    ours = read(tmp_path / "m.gguf", tmp_path / "ours")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ids = {token: id_ for id_, token in enumerate(tokens)}
    known = {token: score for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == NORMAL}
    for line in (line for line in LINES if "<" not in line):
        found = ours.encode(line, special=False)
        assert not prefix or found == theirs.encode(line, add_special_tokens=False), line
        # Before a space transformers writes no further one.
        began = bool(prefix and line) and not line.startswith((" ", "▁"))
        want = merged((" " * began + line).replace(" ", "▁"), known)
        spelled = [[ids[part]] if part in ids else [3 + byte for byte in part.encode()] for part in want]
        assert found == [id_ for part in spelled for id_ in part], line
    assert ours.encode("hat")[0] == 1 and ours.decode(ours.encode("hat  x")) == "hat  x"
