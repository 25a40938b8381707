"""A SentencePiece model (``tokenizer.model``) as tokenizer.json and tokenizer_config.json.

Two rules exist for what surrounds the model's own cutting of a text, and tokenizer_config.json says which holds:

* ``tokenizer_class`` LlamaTokenizer: what transformers 5.23 makes of the same folder. A text gets one space before it
  unless it begins with one, and the model's normalisation is not used.
* any other class, or none: what SentencePiece itself makes of each piece of text between added tokens, normalised by
  the model. Classes that publishers ship as Python, openPangu's for one, call SentencePiece so; their Python is neither
  needed nor run.

Two kinds of rare texts differ from SentencePiece's. Of two pieces with equal scores the first is merged first;
SentencePiece merges the leftmost in the text. A combining mark of few bytes after a sign that the model's table
replaces is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from draftwood.compiler.checkpoints.fields import Fields
from draftwood.compiler.checkpoints.sentencepiece_file import (
    CONTROL,
    DEFINED,
    FILE,
    NORMAL,
    UNIGRAM,
    read_model,
    refuse,
)  # fmt: skip
from draftwood.compiler.teachers.added_tokens import ADDED, CONFIG, SPECIAL, check_ids, content_of, fields_of
from draftwood.compiler.teachers.gguf_tokenizer import spaces_decoder
from draftwood.errors import CheckpointError

_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
_NAMED = {"bos_token": "bos_id", "eos_token": "eos_id", "unk_token": "unk_id", "pad_token": "pad_id"}
_FLAGS = ("lstrip", "rstrip", "single_word", "special")
_ALL = 1 << 30
# Fields about the folder's Python code, and fields that tokenizer.json has.
_LEFT_OUT = ("auto_map", "added_tokens_decoder", "tokenizer_class")


def write_sentencepiece(model: Path, folder: Path) -> None:
    """Writes both files into a folder, from the ``tokenizer.model`` of a checkpoint and the JSON files next to it.

    Raises:
        CheckpointError: no conversion of the model exists, or its files contradict each other.
    """
    path, model_proto = model / FILE, read_model(model / FILE)
    config = fields_of(model / CONFIG)
    named = _named(model_proto, config, fields_of(model / SPECIAL))
    llama = config.get("tokenizer_class") in _LLAMA
    added = _added(model_proto, config, fields_of(model / ADDED), named, llama)
    contents = {token.content for token in added.values()}
    apart = [piece.piece for piece in model_proto.pieces if piece.type == DEFINED and piece.piece not in contents]
    try:
        tokenizer = _cutting(path, model_proto, _pieces(path, model_proto, added), apart)
        if llama:
            _as_llama(tokenizer, config)
        else:
            _as_sentencepiece(tokenizer, model_proto, apart)
        _add(path, tokenizer, added)
        _surround(tokenizer, config, named)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing narrower
        refuse(path, f"no tokenizer can be made of it ({error})")
    tokenizer.save(str(folder / "tokenizer.json"))
    other_fields = {name: value for name, value in config.values.items() if name not in _LEFT_OUT}
    written = {"tokenizer_class": "PreTrainedTokenizerFast", **other_fields, **named}
    (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n")


def _named(model_proto: Any, config: Fields, special: Fields) -> dict[str, str]:
    """The tokens that templates ask for: those of the files, else the model's own."""
    named = {}
    for name, field in _NAMED.items():
        content = content_of(config, name, config.get(name)) or content_of(special, name, special.get(name))
        token_id = getattr(model_proto.trainer, field)
        if content is None and name not in config.values and 0 <= token_id < len(model_proto.pieces):
            content = model_proto.pieces[token_id].piece
        if content is not None:
            named[name] = content
    return named


def _added(
    model_proto: Any, config: Fields, older: Fields, named: Mapping[str, str], llama: bool
) -> dict[int, AddedToken]:
    """By id, tokens that stay whole in a text: the configuration's, or those of added_tokens.json, and named ones."""
    more = config.get("additional_special_tokens", [])
    if not isinstance(more, list):
        config.fail("additional_special_tokens", "a list")
    texts = [content_of(config, "additional_special_tokens", value) for value in more]
    tokens: dict[int, AddedToken] = {}
    for key, options in config.nested("added_tokens_decoder").values.items():
        content = content_of(config, "added_tokens_decoder", options)
        if not key.isdecimal() or content is None or not isinstance(options, dict):
            config.fail("added_tokens_decoder", "objects with a content, by id")
        flags = {name: bool(options.get(name)) for name in _FLAGS}
        flags["special"] |= content in named.values()
        tokens[int(key)] = AddedToken(content, normalized=False, **flags)
    if not tokens:
        special = {*named.values(), *texts}
        tokens = {
            older.whole(name): AddedToken(name, normalized=False, special=name in special) for name in older.values
        }
    ids = {piece.piece: id_ for id_, piece in enumerate(model_proto.pieces)}
    known = {token.content for token in tokens.values()}
    for text in dict.fromkeys((*named.values(), *texts)):
        if text is not None and text in ids and text not in known:
            tokens.setdefault(ids[text], AddedToken(text, normalized=False, special=True))
    for id_, piece in enumerate(model_proto.pieces if llama else ()):
        if piece.type in (CONTROL, DEFINED):
            tokens.setdefault(id_, AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL))
    return dict(sorted(tokens.items()))


def _pieces(path: Path, model_proto: Any, added: Mapping[int, AddedToken]) -> list[str]:
    """The spelling of every id; an added token takes the place of a piece that stands for no text."""
    pieces = [piece.piece for piece in model_proto.pieces]
    for id_, token in added.items():
        if id_ < len(pieces) and pieces[id_] != token.content:
            if model_proto.pieces[id_].type == NORMAL or token.content in pieces:
                raise CheckpointError(f"{path}: id {id_} is {pieces[id_]!r}; {CONFIG} says {token.content!r}")
            pieces[id_] = token.content
    return pieces


def _cutting(path: Path, model_proto: Any, pieces: Sequence[str], apart: Sequence[str]) -> Tokenizer:
    """The model's algorithm over its pieces; those in ``apart`` reach it by themselves and stay whole."""
    bytes_too, unknown = model_proto.trainer.byte_fallback, model_proto.trainer.unk_id
    if model_proto.trainer.model_type == UNIGRAM:
        scores = [piece.score for piece in model_proto.pieces]
        return Tokenizer(Unigram([*zip(pieces, scores, strict=True)], unk_id=unknown, byte_fallback=bytes_too))
    normal = {piece.piece: (-piece.score, id_) for id_, piece in enumerate(model_proto.pieces) if piece.type == NORMAL}
    options = {
        "vocab": {piece: id_ for id_, piece in enumerate(pieces)}, "merges": _merges(normal),
        "unk_token": pieces[unknown], "fuse_unk": True, "byte_fallback": bytes_too,
    }  # fmt: skip
    tokenizer = Tokenizer(BPE(**options))
    if not apart:
        return tokenizer
    # A symbol is one token although no merges lead to it; so this must change no other piece that stands alone.
    for piece in normal:
        if len(tokenizer.model.tokenize(piece)) != 1:
            refuse(
                path, f"has the piece {piece!r}, which no merges lead to, and symbols of its maker's, {apart[0]!r} one"
            )
    return Tokenizer(BPE(**options, ignore_merges=True))


def _merges(best: Mapping[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """Every cut of a normal piece in two, the best piece's first, the longest left part first."""
    cuts = [
        (best[whole], -at, (whole[:at], whole[at:]))
        for whole in best
        for at in range(1, len(whole))
        if whole[:at] in best and whole[at:] in best
    ]
    return [pair for *_, pair in sorted(cuts)]


def _as_llama(tokenizer: Tokenizer, config: Fields) -> None:
    prefix = config.flag("add_prefix_space", True)
    scheme = "never" if not prefix else "always" if config.flag("legacy", False) else "first"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = spaces_decoder(int(prefix))


def _as_sentencepiece(tokenizer: Tokenizer, model_proto: Any, apart: Sequence[str]) -> None:
    spec = model_proto.normalizer
    steps = _table(spec.precompiled_charsmap) if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" +"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    steps.append(normalizers.Replace(" ", "▁"))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"▁+\z"), ""))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if apart:
        symbols = "|".join(re.escape(symbol) for symbol in sorted(apart, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(symbols), behavior="isolated")
    tokenizer.decoder = spaces_decoder(_ALL if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix))


def _table(table: bytes) -> list[Any]:
    """The model's table of replacements. Of a carriage return and a line feed, which are one grapheme, the library
    replaces the first alone."""
    by_table = normalizers.Precompiled(table)
    if by_table.normalize_str("\r") != by_table.normalize_str("\n"):
        return [by_table]
    return [normalizers.Replace("\r\n", "\n\n"), by_table]


def _add(path: Path, tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    for token in added.values():
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    check_ids(path, tokenizer, added)


def _surround(tokenizer: Tokenizer, config: Fields, named: Mapping[str, str]) -> None:
    """Puts the begin token before a text, and the end token after it, if the configuration asks for them."""
    begin = named.get("bos_token") if config.flag("add_bos_token", True) else None
    end = named.get("eos_token") if config.flag("add_eos_token", False) else None
    marks = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys((begin, end)) if text]
    if not marks or None in dict(marks).values():
        return
    single = " ".join(part for part in (begin, "$A", end) if part)
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=marks)
