"""A ``tokenizer.json`` with all tokens that the files next to it name, as transformers 5.23 adds them.

tokenizer_config.json lists tokens by id, and names some; in older folders special_tokens_map.json and
added_tokens.json do. Such a token stays whole in a text, and a special one is left out of what is decoded.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from draftwood.compiler.checkpoints.fields import Fields, read_json
from draftwood.compiler.checkpoints.sentencepiece_file import FILE as SENTENCEPIECE
from draftwood.compiler.checkpoints.sentencepiece_file import read_model
from draftwood.compiler.teachers.gguf_tokenizer import TEKKEN
from draftwood.errors import CheckpointError
from draftwood.files import read_text

VOCABULARY, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_LISTED, _EXTRA = "added_tokens_decoder", ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def fields_of(path: Path) -> Fields:
    """The fields of a JSON file; none if it is not there."""
    return Fields(path, read_json(path) if path.is_file() else {})


def content_of(fields: Fields, name: str, value: Any) -> str | None:
    """A token's text, whether given by itself or as an object."""
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str | None):
        fields.fail(name, "texts, or objects with a text as their content")
    if any("\ud800" <= character <= "\udfff" for character in content or ""):
        fields.fail(name, "texts without half a character")
    return content


def write_added(model: Path, folder: Path) -> None:
    """Writes a checkpoint's ``tokenizer.json`` and the configuration that goes with it into a folder.

    Raises:
        CheckpointError: a file is damaged, two contradict each other, or a setting has no form here.
    """
    vocabulary, settings = Fields(model / VOCABULARY, read_json(model / VOCABULARY)), fields_of(model / CONFIG)
    config = settings
    if vocabulary.nested("model").get("dropout"):
        vocabulary.nested("model").fail("dropout", "null: a text must always have the same tokens")
    if config.flag("split_special_tokens", False):
        config.fail("split_special_tokens", "false; special tokens stay whole here")
    if fields_of(model / "config.json").get("model_type") == "mistral" and _cuts_unlike_mistral(vocabulary):
        warnings.warn(
            f"{vocabulary.path}: cuts texts otherwise than Mistral's own tokenizer, of which transformers warns, too;"
            " load it there with fix_mistral_regex=True, and save_pretrained writes a right one",
            stacklevel=2,
        )
    own, older = _own(vocabulary), config.get(_LISTED) is None
    config = _with_older(model, config)
    named = _special(config, _named(config))
    special = named | _special(config, _unnamed(config))
    if older:
        listed = _older(fields_of(model / ADDED), special) | own
    else:
        by_id = config.nested(_LISTED).values
        listed = {_id(config, key): _token(config, _LISTED, value) for key, value in by_id.items()}
    source = _text(vocabulary.path)
    more = _more(own, listed, special, named.keys())
    (folder / VOCABULARY).write_text(_grown(vocabulary.path, source, more, listed) if more else source, "utf-8")
    extra = config.get(_EXTRA[0])
    values = config.values | (extra if isinstance(extra, dict) else {})
    if values != settings.values:
        _write_config(folder, values)
    elif settings.path.is_file():
        (folder / CONFIG).write_text(_text(settings.path), "utf-8")


def end_id(model: Path) -> int | None:
    """The id of the token that a checkpoint's tokenizer names as the end of a text; None if it names none.

    Raises:
        CheckpointError: a file is damaged.
    """
    config = _with_older(model, fields_of(model / CONFIG))
    end = content_of(config, "eos_token", config.get("eos_token"))
    return next((ids.whole(end) for ids in _ids(model, config) if end in ids.values), None) if end else None


def _ids(model: Path, config: Fields) -> Iterator[Fields]:
    """Ids by token, of every file that has some; those of whole vocabularies, which take long to read, last."""
    listed = config.nested(_LISTED).values.items()
    contents = ((key, content_of(config, _LISTED, token)) for key, token in listed)
    yield Fields(config.path, {content: _id(config, key) for key, content in contents if content})
    yield fields_of(model / ADDED)
    if (path := model / VOCABULARY).is_file():
        vocabulary = fields_of(path)
        yield Fields(path, {token.content: id_ for id_, token in _own(vocabulary).items()})
        pieces = vocabulary.nested("model").get("vocab")
        yield Fields(path, pieces if isinstance(pieces, dict) else {})
    elif (path := model / SENTENCEPIECE).is_file():
        yield Fields(path, {piece.piece: id_ for id_, piece in enumerate(read_model(path).pieces)})


def _with_older(model: Path, config: Fields) -> Fields:
    """The configuration, with the names of an older folder if it lists no tokens."""
    if config.get(_LISTED) is not None:
        return config
    return Fields(config.path, config.values | fields_of(model / SPECIAL).values)


def _cuts_unlike_mistral(vocabulary: Fields) -> bool:
    """Whether a tokenizer cuts texts by an expression that is not Tekken's, as some that Mistral has published do."""
    steps = vocabulary.nested("pre_tokenizer").get("pretokenizers", [])
    patterns = [step.get("pattern") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return any(isinstance(pattern, dict) and pattern.get("Regex", TEKKEN) != TEKKEN for pattern in patterns)


def _own(vocabulary: Fields) -> dict[int, AddedToken]:
    tokens = vocabulary.get("added_tokens", [])
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        vocabulary.fail("added_tokens", "a list of objects")
    return {Fields(vocabulary.path, token).whole("id"): _token(vocabulary, "added_tokens", token) for token in tokens}


def _older(added: Fields, special: Mapping[str, AddedToken]) -> dict[int, AddedToken]:
    return {
        added.whole(name): AddedToken(name, normalized=name not in special, special=name in special)
        for name in added.values
    }


def _id(config: Fields, key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        config.fail(_LISTED, "objects with a content, by id")
    return int(key)


def _token(fields: Fields, name: str, value: Any) -> AddedToken:
    content = content_of(fields, name, value)
    if content is None or not isinstance(value, dict):
        fields.fail(name, "objects with a content")
    return AddedToken(content, **{flag: bool(value[flag]) for flag in _FLAGS if value.get(flag) is not None})


def _named(config: Fields) -> list[tuple[str, Any]]:
    """What has a name, a class's own among them; add_bos_token is no token."""
    extra = config.get(_EXTRA[0])
    named = {name: value for name, value in config.values.items() if name.endswith("_token")}
    return [*named.items(), *(extra.items() if isinstance(extra, dict) else ())]


def _unnamed(config: Fields) -> list[tuple[str, Any]]:
    """What is listed without names, in the first field that has any."""
    for name in _EXTRA:
        if not isinstance(extra := config.get(name, []), dict | list):
            config.fail(name, "a list or an object")
        if isinstance(extra, list) and extra:
            return [(name, value) for value in extra]
    return []


def _special(config: Fields, values: Iterable[tuple[str, Any]]) -> dict[str, AddedToken]:
    """Special tokens by their text."""
    tokens = {}
    for name, value in values:
        if isinstance(value, bool) or (content := content_of(config, name, value)) is None:
            continue
        flags = value if isinstance(value, dict) else {}
        tokens[content] = _token(config, name, {"normalized": False} | flags | {"content": content, "special": True})
    return tokens


def _more(
    own: Mapping[int, AddedToken],
    listed: Mapping[int, AddedToken],
    special: Mapping[str, AddedToken],
    named: Collection[str],
) -> list[AddedToken]:
    """The tokens that the vocabulary has not, or has with other flags; one with a name is special."""
    more = {
        token.content: token
        for _, token in sorted(listed.items())
        if token not in own.values() or (token.content in named and not token.special)
    }
    known = {token.content for token in own.values()} | more.keys()
    for content in more.keys() & (special.keys() | {token.content for token in own.values() if token.special}):
        more[content].special = True
    return [*more.values(), *(token for content, token in special.items() if content not in known)]


def _grown(path: Path, source: str, more: Iterable[AddedToken], listed: Mapping[int, AddedToken]) -> str:
    """The vocabulary with more tokens; those that have no id yet get the next ones."""
    try:
        tokenizer = Tokenizer.from_str(source)
        for token in more:
            tokenizer.add_tokens([token])
        grown: str = tokenizer.to_str(pretty=True)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path}: no tokenizer can be made of it ({error}); fetch the file again") from None
    check_ids(path, tokenizer, listed)
    return grown


def check_ids(path: Path, tokenizer: Tokenizer, listed: Mapping[int, AddedToken]) -> None:
    """Raises CheckpointError if a token has another id than the list says."""
    for id_, token in listed.items():
        if (actual := tokenizer.token_to_id(token.content)) != id_:
            raise CheckpointError(f"{path}: token {token.content!r} gets id {actual}; expected {id_}, as {CONFIG} says")


def write_templates(model: Path, folder: Path) -> None:
    """Writes a checkpoint's files of chat templates into a folder with its tokenizer. Several go into the
    configuration; one alone stays a file.

    Raises:
        CheckpointError: one cannot be read.
    """
    several = {path.stem: path for path in sorted((model / TEMPLATES).glob("*.jinja"))}
    if (model / _TEMPLATE).is_file():
        several["default"] = model / _TEMPLATE
    if [*several] == ["default"]:
        (folder / _TEMPLATE).write_text(_text(model / _TEMPLATE), "utf-8")
    elif several:
        texts = [{"name": name, "template": _text(path)} for name, path in several.items()]
        _write_config(folder, fields_of(folder / CONFIG).values | {"chat_template": texts})


def _write_config(folder: Path, values: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); fetch the file again") from None
