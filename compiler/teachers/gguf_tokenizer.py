"""The tokenizer and chat template of a GGUF file's metadata, as tokenizer.json and tokenizer_config.json.

A file names one of llama.cpp's pre-tokenizers and does not define it. The definitions here are those of the supported
families in llama.cpp's src/llama-vocab.cpp (commit 0c1e570, the switch over type_pre and the names before it). Both
kinds of vocabulary become the tokenizer that transformers 5.23 makes of the same file, except for four things that it
leaves out:

* digits stand alone with smollm and its like: `\\p{N}`, then GPT-2's expression (llama.cpp's form; the tokenizer.json
  that SmolLM2's publisher ships was not at hand);
* a word that is a token needs no merges (llama-bpe, glm4, tekken);
* texts begin with the begin token if the file does not say and the pre-tokenizer is Llama 3's or tekken;
* tokens that end texts are control tokens, whatever kind the file gives them.

Two things differ from llama.cpp. A SentencePiece text that begins with a space gets no further space before it. The
pre-tokenizer "default", by which a file says that its own is not known, cuts texts as GPT-2 does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from draftwood.compiler.checkpoints.gguf_header import CONTROL, USER_DEFINED, Header
from draftwood.compiler.teachers.gguf_config import end_ids
from draftwood.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_AS_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
# Cut by one expression.
_SPLITS = {
    **dict.fromkeys((*_AS_LLAMA3, "smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    "tekken": TEKKEN,
}
# Cut as GPT-2 does; of the second with each digit alone.
_AS_GPT2 = ("gpt-2", "default", "mpt", "olmo", "phi-2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
# A word that is a token is one, even if no merges lead to it.
_WHOLE_WORDS = (*_AS_LLAMA3, "tekken", "glm4")
# Kinds of vocabulary and pre-tokenizers whose texts begin with the begin token unless the file says otherwise.
_BEGUN = ("llama", *_AS_LLAMA3, "tekken")
# Additions to a text's end, and tokens that no text may have: no file for generation has these keys.
_REFUSED = ("add_eos_token", "add_sep_token", "suppress_tokens")


def write_tokenizer(header: Header, folder: Path) -> bool:
    """Writes both files into a folder; returns False and writes nothing if the metadata has no tokens.

    Raises:
        CheckpointError: an unsupported kind of vocabulary or pre-tokenizer, or arrays that contradict each other.
    """
    kind = header.fields.get(f"{_PREFIX}model", "none")
    if kind == "none":
        return False
    if kind not in _BUILDERS:
        raise CheckpointError(f"{header.path}: {_PREFIX}model is {kind!r}; expected {' or '.join(_BUILDERS)} or none")
    for name in _REFUSED:
        if value := header.fields.get(f"{_PREFIX}{name}"):
            raise CheckpointError(f"{header.path}: {_PREFIX}{name} is {value!r}; expected no such key")
    tokens = _strings(header, "tokens")
    if not tokens or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {_PREFIX}tokens has {len(tokens)} texts; expected each once, at least one"
        )
    try:
        tokenizer = _BUILDERS[kind](header, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{header.path}: no tokenizer can be made of its metadata ({error})") from None
    _add_whole(tokenizer, header, tokens)
    named = _named(header, tokens)
    begun = kind in _BEGUN or header.fields.get(f"{_PREFIX}pre") in _BEGUN
    if header.fields.get(f"{_PREFIX}add_bos_token", begun) and "bos_token" in named:
        begin = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokens.index(begin))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    if templates := _templates(header):
        config["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    return True


def _byte_level(header: Header, tokens: list[str]) -> Tokenizer:
    """BPE over the bytes of UTF-8."""
    pre = header.fields.get(f"{_PREFIX}pre", "default")
    merges = [_pair(header, merge) for merge in _strings(header, "merges")]
    alphabet, whole = _spelling(), {token for token, _ in _whole(header, tokens)}
    known = set(alphabet.values())
    # Added tokens are spelled as texts. One that the file does not call added is bytes, as all others are.
    vocabulary = {
        token if token in whole or set(token) <= known else "".join(alphabet[byte] for byte in token.encode()): id_
        for id_, token in enumerate(tokens)
    }
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _SPLITS:
        cuts = [pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")]
        steps = [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in _AS_GPT2 or pre in _DIGITS:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        names = ", ".join((*_SPLITS, *_AS_GPT2, *_DIGITS))
        raise CheckpointError(f"{header.path}: {_PREFIX}pre is {pre!r}; expected one of {names}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, tokens: list[str]) -> Tokenizer:
    """BPE over characters, with bytes for those that have no token; the best score is merged first."""
    scores = header.array(f"{_PREFIX}scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{header.path}: {_PREFIX}scores has {len(scores)} numbers; expected {len(tokens)}")
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    merges = [_pair(header, merge) for merge in _strings(header, "merges")] or _merges(vocabulary, scores)
    unknown = header.fields.get(f"{_PREFIX}unknown_token_id", 0)
    unk = tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = bool(header.fields.get(f"{_PREFIX}add_space_prefix", True))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = spaces_decoder(int(prefix))
    return tokenizer


def spaces_decoder(spaces: int) -> Any:
    """The decoder of SentencePiece's spelling of spaces and bytes; takes so many spaces off a text's beginning."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(content=" ", left=spaces)] if spaces else [])])


_BUILDERS: dict[str, Callable[[Header, list[str]], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every cut of a token in two tokens, the token with the best score first."""
    cuts = [
        (scores[id_], token[:at], token[at:])
        for token, id_ in vocabulary.items()
        for at in range(1, len(token))
        if token[:at] in vocabulary and token[at:] in vocabulary
    ]
    cuts.sort(key=lambda cut: (-cut[0], -len(cut[1]), -len(cut[2])))
    return [(first, second) for _, first, second in cuts]


def _pair(header: Header, merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if not first or not second or " " in second:
        raise CheckpointError(
            f"{header.path}: {_PREFIX}merges holds {merge!r}; expected two tokens and a space between"
        )
    return first, second


def _spelling() -> dict[int, str]:
    """Which character a byte-level vocabulary spells a byte with: printable ones by themselves (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _add_whole(tokenizer: Tokenizer, header: Header, tokens: list[str]) -> None:
    """Adds the tokens that stay whole in a text; decoding leaves control tokens out."""
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, normalized=False, special=kind == CONTROL)
                for token, type_ in _whole(header, tokens)
                if type_ == kind
            ]
        )


def _whole(header: Header, tokens: list[str]) -> list[tuple[str, int]]:
    """The tokens that stay whole in a text, control tokens and those that a user defined, each with its kind."""
    kinds, ends = header.array(f"{_PREFIX}token_type"), end_ids(header)
    if kinds and len(kinds) != len(tokens):
        raise CheckpointError(f"{header.path}: {_PREFIX}token_type has {len(kinds)} numbers; expected {len(tokens)}")
    triples = zip(range(len(tokens)), tokens, kinds or [0] * len(tokens), strict=True)
    pairs = [(token, CONTROL if id_ in ends else kind) for id_, token, kind in triples]
    return [(token, kind) for token, kind in pairs if kind in (CONTROL, USER_DEFINED)]


def _named(header: Header, tokens: list[str]) -> dict[str, str]:
    """Texts of the tokens that templates ask for."""
    ids = {name: header.fields.get(f"{_PREFIX}{key}_token_id") for name, key in _SPECIAL.items()}
    for name, id_ in ids.items():
        if id_ is not None and not (isinstance(id_, int) and 0 <= id_ < len(tokens)):
            raise CheckpointError(f"{header.path}: {name} is {id_!r}; expected an id below {len(tokens)}")
    return {name: tokens[id_] for name, id_ in ids.items() if id_ is not None}


def _templates(header: Header) -> str | list[dict[str, str]] | None:
    """One template, or several by name."""
    names = [str(name) for name in header.array("tokenizer.chat_templates")]
    keys = {"default": "tokenizer.chat_template"} | {name: f"tokenizer.chat_template.{name}" for name in names}
    texts: dict[str, Any] = {name: header.fields[key] for name, key in keys.items() if key in header.fields}
    if wrong := [keys[name] for name, text in texts.items() if not isinstance(text, str)]:
        raise CheckpointError(f"{header.path}: {wrong[0]} is no text; expected a template")
    if texts.keys() <= {"default"}:
        return texts.get("default")
    return [{"name": name, "template": text} for name, text in texts.items()]


def _strings(header: Header, name: str) -> list[str]:
    values = header.array(f"{_PREFIX}{name}")
    if any(not isinstance(value, str) for value in values[:1]):
        raise CheckpointError(f"{header.path}: {_PREFIX}{name} holds {values[0]!r}; expected strings")
    return values
