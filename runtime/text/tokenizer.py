"""Text in, text out: the tokenizer and the chat template of a bundle."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer as Vocabulary

from draftwood.errors import BundleError, RequestError
from draftwood.files import read_text
from draftwood.runtime.text.chat import Templates
from draftwood.runtime.text.messages import Chat

_Parsed = TypeVar("_Parsed")

# Roles that templates write, by these names or whatever the name is.
_ROLES = ("system", "user", "assistant")

# Of a text: about a million tokens, more than any context; four times as much takes a minute and gigabytes.
MOST_BYTES = 4 << 20
# Up to so many bytes a text takes milliseconds; of those with more than so many one at a time is encoded.
_SHORT_BYTES, _LONG_BYTES = 1 << 12, 1 << 18
# By how much all replacements of a tokenizer together may lengthen a text: those that people use keep its length.
_MOST_GROWTH = 1000
# Bytes by the characters that byte-level vocabularies spell them with: printable as themselves (GPT-2, encoder.py)
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = (byte for byte in range(256) if byte not in _SHOWN)
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + n): byte for n, byte in enumerate(_HIDDEN)}


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """The field of ``tokenizer_config.json`` that is used besides the names of tokens."""

    chat_template: str | list[_NamedTemplate] | None = None

    def templates(self) -> dict[str, str]:
        """By name: ``default``, and maybe ``tool_use`` for chats with tools."""
        if isinstance(self.chat_template, list):
            return {named.name: named.template for named in self.chat_template}
        return {} if self.chat_template is None else {"default": self.chat_template}


class _TokenizerFile(msgspec.Struct):
    """The facts of ``tokenizer.json`` that are needed besides the tokenizers library."""

    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None

    def decoders(self) -> list[str]:
        return [part.get("type", "") for part in _parts(self.decoder or {}, "decoders")]

    def growth(self) -> int:
        """By how much replacements one after the other lengthen a text, or its tokens, at most."""
        chains = (_parts(self.normalizer or {}, "normalizers"), _parts(self.decoder or {}, "decoders"))
        return max(prod(max(len(str(part.get("content", ""))), 1) for part in chain) for chain in chains)


def _parts(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The members of a sequence, sequences inside it too; anything else is its own member."""
    inner = part.get(name)
    if not isinstance(inner, list):
        return [part]
    return [part for other in inner if isinstance(other, dict) for part in _parts(other, name)]


class Tokenizer:
    """The tokenizer and chat template of a bundle.

    Example:
        >>> tokenizer = Tokenizer.load(Path("bundle/tokenizer"))  # doctest: +SKIP
        >>> tokenizer.decode(tokenizer.encode("Hello"))  # doctest: +SKIP
        'Hello'
    """

    def __init__(
        self,
        path: Path,
        vocabulary: Vocabulary,
        decoders: list[str],
        templates: Templates,
        tokens: dict[str, str],
    ) -> None:
        """Not for callers: ``Tokenizer.load`` makes one."""
        # Settings left in tokenizer.json by training would cut or pad prompts in silence.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self._path, self._vocabulary = path, vocabulary
        self.decoders = decoders
        self._templates = templates
        self._long = threading.Lock()
        self._template_tokens = tokens
        self._skipped = {i for i, token in vocabulary.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def load(cls, folder: Path, known: bool = False) -> Tokenizer:
        """Reads ``tokenizer.json`` and, if there, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Args:
            known: whether an earlier reading of these very files found that its templates are some.

        Raises:
            BundleError: a file is missing or broken; the message names it.
        """
        path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        source = _read(path)
        file = _parse(source, _TokenizerFile, path)
        growth = _called(path, file.growth)
        if growth > _MOST_GROWTH:
            raise BundleError(
                f"{path}: its replacements make a text up to {growth:.3g} times as long, expected at most"
                f" {_MOST_GROWTH}; this is no tokenizer that a model was trained with"
            )
        vocabulary = _called(path, Vocabulary.from_str, source)
        settings = _read(config_path) if config_path.is_file() else "{}"
        tokens = _tokens(config_path, _parse(settings, dict[str, Any], config_path))
        templates, where = _parse(settings, _Config, config_path).templates(), config_path
        if (folder / "chat_template.jinja").is_file():  # the newer form, which wins as in transformers
            where = folder / "chat_template.jinja"
            templates = {"default": _read(where)}
        return cls(path, vocabulary, file.decoders(), Templates(templates, where, known), tokens)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` adds the tokens that the tokenizer puts around it (a begin token, say).

        Raises:
            RequestError: not a string, one that is not valid Unicode, or one that is too long for any context.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, got {type(text).__name__}")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: expected Unicode text, got the lone surrogate {text[error.start]!r} at character "
                f"{error.start}; read the prompt as UTF-8"
            ) from error
        if size > MOST_BYTES:
            raise RequestError(f"prompt: {size} bytes; expected at most {MOST_BYTES}, which no context holds")
        if size <= _SHORT_BYTES:
            ids: list[int] = _called(self._path, self._vocabulary.encode, text, add_special_tokens=special).ids
            return ids
        # Of several texts alone the library lets other threads of Python run meanwhile.
        with self._long if size > _LONG_BYTES else contextlib.nullcontext():
            (encoded,) = _called(self._path, self._vocabulary.encode_batch, [text], add_special_tokens=special)
        return [*encoded.ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids without special tokens; ids that the tokenizer does not know are skipped."""
        text: str = _called(self._path, self._vocabulary.decode, ids, skip_special_tokens=True)
        return text

    def text_of(self, token_id: int) -> str:
        """The text of a token in the middle of a text: the first one may lose its space. "" of a special token."""
        alone = self.decode([token_id])
        if "ByteLevel" in self.decoders:  # drops none, and two halves of characters may make a whole one
            return alone
        return self.decode([token_id, token_id])[len(alone) :]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text, those of a part of a character too; none of a special token."""
        text, spelled = self.text_of(token_id), self.spelling(token_id) or ""
        if "\ufffd" in text and (part := re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelled)):
            return bytes.fromhex(part[1])
        if "\ufffd" in text and "ByteLevel" in self.decoders and _BYTES.keys() >= set(spelled):
            return bytes(_BYTES[character] for character in spelled)
        return text.encode()

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling in the vocabulary, or None."""
        number: int | None = self._vocabulary.token_to_id(token)
        return number

    def to_json(self) -> str:
        """The vocabulary as ``tokenizer.json`` has it."""
        text: str = _called(self._path, self._vocabulary.to_str)
        return text

    @property
    def size(self) -> int:
        """How many tokens it knows, the special ones counted."""
        size: int = self._vocabulary.get_vocab_size()
        return size

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template."""
        return "default" in self._templates

    @property
    def tool_template(self) -> str | None:
        """The source of the template that renders chats with tools; None if there is no template."""
        return self._templates.source(self._named(True))

    def special_id(self, token: str) -> int | None:
        """The id of a special token by its spelling; None if there is none, or a text shows it by itself."""
        number = self.token_id(token)
        return number if number in self._skipped else None

    def warm(self) -> None:
        """Starts the process that renders chats, so that the first one need not wait for it."""
        self._templates.warm()

    def render(self, chat: Any) -> str:
        """The prompt that the chat template makes of a chat, up to where the assistant is to speak.

        Args:
            chat: a list of messages, or an object of the fields of `draftwood.runtime.text.messages.Chat`.

        Raises:
            RequestError: no template, a malformed chat (by field and index), or one that the template refuses.
        """
        checked = Chat.of(chat)
        name = self._named(checked.tools is not None)
        if name not in self._templates:
            raise RequestError("chat: this bundle has no chat template; send a plain prompt")
        # tools and documents are None, not undefined: templates ask `tools is not none`.
        messages = checked.marked if checked.continue_final_message else checked.messages
        fixed: dict[str, Any] = {"messages": messages, "tools": checked.tools, "documents": checked.documents}
        fixed["add_generation_prompt"] = checked.add_generation_prompt
        values = self._template_tokens | checked.chat_template_kwargs | fixed
        rendered = self._templates.render(name, values)
        self._check_roles(name, values, rendered)
        return checked.continued(rendered) if checked.continue_final_message else rendered

    def _check_roles(self, name: str, values: dict[str, Any], rendered: str) -> None:
        """Refuses messages that a template leaves out, since it knows no such role. If it names none, it may still
        write them: the text without them shows it."""
        source, messages = self._templates.source(name) or "", values["messages"]
        roles = {message["role"] for message in messages}
        strange = {role for role in roles.difference(_ROLES) if f"'{role}'" not in source and f'"{role}"' not in source}
        if not strange:
            return
        known = [message for message in messages if message["role"] not in strange]
        try:
            left_out = self._templates.render(name, values | {"messages": known}) == rendered
        except RequestError:  # the others alone are no chat
            return
        if left_out:
            at, role = next((at, one["role"]) for at, one in enumerate(messages) if one["role"] in strange)
            raise RequestError(f"chat: message {at}: the template leaves the role {role!r:.40} out; give another")

    def _named(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def chat(self, chat: Any) -> list[int]:
        """Token ids of ``render(chat)``; the template has put the special tokens where they belong.

        Raises:
            RequestError: as ``render``.
        """
        return self.encode(self.render(chat), special=False)

    def spelling(self, token_id: int) -> str | None:
        """How the vocabulary spells a token; None if it adds nothing to a text (special or unknown)."""
        if token_id in self._skipped:
            return None
        return self.name_of(token_id)

    def name_of(self, token_id: int) -> str | None:
        """How the vocabulary spells a token, a special one too; None if it is unknown."""
        spelled: str | None = self._vocabulary.id_to_token(token_id)
        return spelled


def _tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The tokens that are set, by name: a template may ask whether ``bos_token is defined``."""
    named = {name: value for name, value in config.items() if name.endswith("_token") and type(value) is not bool}
    texts = {name: value.get("content", 0) if isinstance(value, dict) else value for name, value in named.items()}
    for name, text in texts.items():
        if not isinstance(text, str | None):
            raise _broken(path, TypeError(f"{name} is {named[name]!r}, expected a text, or an object with its content"))
    return {name: text for name, text in texts.items() if text is not None}


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise _broken(path, error) from error


def _parse(source: str, kind: type[_Parsed], path: Path) -> _Parsed:
    try:
        return msgspec.json.decode(source, type=kind)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise _broken(path, error) from error


def _called(path: Path, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls the tokenizers library, which raises nothing narrower than Exception, or gives up in Rust."""
    try:
        return function(*args, **options)
    except Exception as error:
        raise _broken(path, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # has no name that could be imported
            raise
        raise _broken(path, error) from error


def _broken(path: Path, error: BaseException) -> BundleError:
    reason = error.strerror if isinstance(error, OSError) else error
    return BundleError(f"{path}: cannot be used: {reason}; build the bundle again")
