"""Text in, text out: the tokenizer, the chat template, and text that streams as tokens arrive.

A stream releases only text that no later token can change, so what was shown is never taken back.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from draftwood.errors import BundleError, RequestError

# Longest run of byte tokens that is waited for before its whole characters are released; see _Window.
_RUN_LIMIT = 32
# A character has at most four bytes.
_CHARACTER_BYTES = 4


class Text:
    """The tokenizer and chat template of a bundle; made by ``Text.load``."""

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any], template: str | None, where: str) -> None:
        # Settings left in tokenizer.json by training would cut or pad prompts in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = _compile(template, where) if template is not None else None
        self._special_tokens = _special_tokens(config, where)
        self._skipped = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self._decoders = _decoder_names(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Reads ``tokenizer.json`` and, if there, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
            BundleError: a file is missing or broken; the message names it.
        """
        path = folder / "tokenizer.json"
        source = _read(path)
        try:
            tokenizer = Tokenizer.from_str(source)
        except Exception as error:  # the library raises nothing narrower
            raise BundleError(f"{path}: expected a tokenizer, got: {error}; build the bundle again") from error
        config_path = folder / "tokenizer_config.json"
        config = _read_object(config_path) if config_path.exists() else {}
        template_path = folder / "chat_template.jinja"
        if template_path.exists():  # the newer form, which wins as it does in transformers
            return cls(tokenizer, config, _read(template_path), str(template_path))
        return cls(tokenizer, config, _default_template(config, config_path), str(config_path))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` adds what the tokenizer adds around it (a begin token, say).

        Raises:
            RequestError: not a string, or one that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise RequestError(f"prompt: expected a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: expected Unicode text, got the lone surrogate {text[error.start]!r} at character "
                f"{error.start}; read the prompt as UTF-8"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids without special tokens; ids that the tokenizer does not know are skipped."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling in the vocabulary, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template."""
        return self._template is not None

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt that the chat template makes of messages, up to where the assistant is to speak.

        Args:
            messages: each has ``role`` and ``content``; further string fields reach the template too.

        Raises:
            RequestError: no template, malformed messages (by index), or messages that the template refuses.
        """
        if self._template is None:
            raise RequestError("chat: this bundle has no chat template; send a plain prompt")
        _check_messages(messages)
        try:
            # tools and documents are None, not undefined: templates ask `tools is not none`.
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"chat: the template refuses the messages: {error.message}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError(f"chat: the template fails on the messages: {error}") from error

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of ``render(messages)``; the template has put the special tokens where they belong.

        Raises:
            RequestError: as ``render``.
        """
        return self.encode(self.render(messages), special=False)

    def pieces(self) -> _Pieces:
        """A fresh incremental decoder: of the bytes where tokens are bytes, else of a window of tokens."""
        return _Bytes(self) if self._decoders == ["ByteLevel"] else _Window(self)

    def spelling(self, token_id: int) -> str | None:
        """How the vocabulary spells a token; None if it adds nothing to a text (special or unknown)."""
        if token_id in self._skipped:
            return None
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    @property
    def has_byte_tokens(self) -> bool:
        """True if tokens such as ``<0xE4>`` stand for single bytes (SentencePiece's byte fallback)."""
        return "ByteFallback" in self._decoders


class Stream:
    """Text of a growing token sequence, released as soon as it is final, up to the first stop string.

    Example:
        >>> stream = Stream(text, stop_strings=("END",))  # doctest: +SKIP
        >>> stream.push(ids), stream.stopped, stream.finish()  # doctest: +SKIP
    """

    def __init__(self, text: Text, stop_strings: tuple[str, ...] = ()) -> None:
        """Raises RequestError if ``stop_strings`` is a bare string or holds anything but non-empty strings."""
        if isinstance(stop_strings, str) or not all(isinstance(s, str) and s for s in stop_strings):
            raise RequestError(f"stop strings: expected a tuple of non-empty strings, got {stop_strings!r}")
        self._pieces = text.pieces()
        self._stops = tuple(stop_strings)
        self._held = ""  # final text that may be the beginning of a stop string
        self._tokens_used = 0
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; what follows is dropped."""
        return self._stopped

    @property
    def tokens_used(self) -> int:
        """Tokens taken in: all pushed, or up to and including the one that completed the stop string."""
        return self._tokens_used

    def push(self, ids: Sequence[int]) -> str:
        """Takes in tokens and returns the text that became final: what ``ids`` is split into has no effect."""
        released = []
        for token_id in ids:
            if self._stopped:
                break
            self._tokens_used += 1
            released.append(self._release(self._pieces.push(int(token_id))))
        return "".join(released)

    def finish(self) -> str:
        """Returns what was held back; all that was returned is then ``decode(ids)`` up to the stop string."""
        released = self._release(self._pieces.finish())
        held, self._held = self._held, ""
        return released + held

    def _release(self, piece: str) -> str:
        if self._stopped or not piece:
            return ""
        text = self._held + piece
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        self._stopped = bool(starts)
        end = min(starts) if starts else len(text) - self._overlap(text)
        self._held = "" if starts else text[end:]
        return text[:end]

    def _overlap(self, text: str) -> int:
        """Characters at the end of ``text`` that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class _Pieces:
    """Turns tokens, one at a time, into text that no later token can change."""

    def push(self, token_id: int) -> str:
        raise NotImplementedError

    def finish(self) -> str:
        raise NotImplementedError


class _Bytes(_Pieces):
    """Byte-level vocabularies: a token is bytes, and the text is those bytes read as UTF-8.

    Python's decoder replaces what is invalid exactly as the tokenizers library does (one U+FFFD for each
    maximal valid beginning), and knows at once whether a byte can still become part of a character.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        spelling = self._text.spelling(token_id)
        return "" if spelling is None else self._utf8.decode(_bytes_of(spelling))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window(_Pieces):
    """Any other decoder: the new text is what the last few tokens decode to with and without the new ones.

    A token that is released stays as context, so that what a decoder does to the first token only (drop
    its leading space) does not happen again in the middle. A run of byte tokens is decoded as a whole,
    valid or not at all, so it is final when it ends; past a limit its whole characters are released.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._context: list[int] = []
        self._pending: list[int] = []
        self._run = 0  # byte tokens at the end of pending

    def push(self, token_id: int) -> str:
        spelling = self._text.spelling(token_id)
        if spelling is None:
            return ""
        self._pending.append(token_id)
        if self._text.has_byte_tokens:
            self._run = self._run + 1 if _is_byte_token(spelling) else 0
        return self._take(len(self._pending) - self._open())

    def finish(self) -> str:
        return self._take(len(self._pending))

    def _open(self) -> int:
        """Tokens at the end of pending whose text is not final."""
        if self._run < _RUN_LIMIT:
            return self._run
        for back in range(_CHARACTER_BYTES):
            tokens = self._context + self._pending[: len(self._pending) - back]
            if not self._text.decode(tokens).endswith("\ufffd"):
                return back
        return 0  # four bytes in a row that end no character: the run is broken for good

    def _take(self, count: int) -> str:
        if not count:
            return ""
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._run = min(self._run, len(self._pending))
        before = self._text.decode(self._context)
        after = self._text.decode(self._context + taken)
        # A token without text would not do as context: the next one would again count as the first.
        self._context = taken if self._text.decode(taken) else self._context + taken
        return after[len(before) :]


def _is_byte_token(spelling: str) -> bool:
    return len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(spelling: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in spelling])
    except KeyError:  # an added token that is spelled as plain text
        return spelling.encode()


def _decoder_names(tokenizer: Tokenizer) -> list[str]:
    decoder = json.loads(tokenizer.to_str())["decoder"] or {"type": "none"}
    return [part["type"] for part in decoder.get("decoders", [decoder])]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}; build the bundle again") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise BundleError(f"{path}: expected JSON, got: {error}; build the bundle again") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path}: expected a JSON object, got {type(value).__name__}; build the bundle again")
    return value


def _default_template(config: dict[str, Any], path: Path) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict) and t.keys() >= {"name", "template"}]
        if len(named) == len(template):
            template = {t["name"]: t["template"] for t in named}.get("default")
    if template is not None and not isinstance(template, str):
        raise BundleError(
            f"{path}: chat_template: expected a string or a list of objects with name and template, "
            f"got {type(template).__name__}"
        )
    return template


def _special_tokens(config: dict[str, Any], where: str) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and their like, those that are set, by name."""
    tokens = {}
    for name in (key for key in config if key.endswith("_token") and not key.startswith("add_")):
        value = config[name].get("content") if isinstance(config[name], dict) else config[name]
        if isinstance(value, str):
            tokens[name] = value
        elif name in ("bos_token", "eos_token") and value is not None or isinstance(config[name], dict):
            raise BundleError(f"{where}: {name}: expected a string or an object with content, got {config[name]!r}")
    return tokens


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if isinstance(messages, list) else type(messages).__name__
        raise RequestError(f"chat: expected a list of messages, got {got}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"chat: message {index}: expected an object, got {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"chat: message {index}: expected role and content, got no {key}")
        for key, value in message.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise RequestError(f"chat: message {index}: {key}: expected a string, got {type(value).__name__}")
