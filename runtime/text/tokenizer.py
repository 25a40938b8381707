"""Text in, text out: the tokenizer and the chat template of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import msgspec
from tokenizers import Tokenizer as Vocabulary

from draftwood.errors import BundleError, RequestError
from draftwood.files import read_text
from draftwood.runtime.text.chat import bounded, compile_template
from draftwood.runtime.text.messages import Chat

_Parsed = TypeVar("_Parsed", bound=msgspec.Struct)


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _Config(msgspec.Struct):
    """What is used of ``tokenizer_config.json``."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None

    def templates(self) -> dict[str, str]:
        """By name: ``default``, and maybe ``tool_use`` for chats with tools."""
        if isinstance(self.chat_template, list):
            return {named.name: named.template for named in self.chat_template}
        return {} if self.chat_template is None else {"default": self.chat_template}

    def tokens(self) -> dict[str, str]:
        """Those that are set: a template may ask whether ``bos_token is defined``."""
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name.endswith("_token")}
        return {name: t.content if isinstance(t, _Token) else t for name, t in named.items() if t is not None}


class _TokenizerFile(msgspec.Struct):
    """What must be known of ``tokenizer.json`` beside what the tokenizers library does with it."""

    decoder: dict[str, Any] | None = None

    def decoders(self) -> list[str]:
        decoder = self.decoder or {}
        return [part.get("type", "") for part in decoder.get("decoders", [decoder])]


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
        templates: dict[str, jinja2.Template],
        tokens: dict[str, str],
    ) -> None:
        """Not for callers: ``Tokenizer.load`` makes one."""
        # Settings left in tokenizer.json by training would cut or pad prompts in silence.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        self._path, self._vocabulary = path, vocabulary
        self.decoders = decoders
        self._templates = templates
        self._template_tokens = tokens
        self._skipped = {i for i, token in vocabulary.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads ``tokenizer.json`` and, if there, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
            BundleError: a file is missing or broken; the message names it.
        """
        path, config_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        source = _read(path)
        file = _parse(source, _TokenizerFile, path)
        vocabulary = _called(path, Vocabulary.from_str, source)
        config = _parse(_read(config_path), _Config, config_path) if config_path.is_file() else _Config()
        templates, where = config.templates(), config_path
        if (folder / "chat_template.jinja").is_file():  # the newer form, which wins as in transformers
            where = folder / "chat_template.jinja"
            templates = {"default": _read(where)}
        compiled = {name: compile_template(template, where) for name, template in templates.items()}
        return cls(path, vocabulary, file.decoders(), compiled, config.tokens())

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
        ids: list[int] = _called(self._path, self._vocabulary.encode, text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids without special tokens; ids that the tokenizer does not know are skipped."""
        text: str = _called(self._path, self._vocabulary.decode, ids, skip_special_tokens=True)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling in the vocabulary, or None."""
        found: int | None = self._vocabulary.token_to_id(token)
        return found

    @property
    def size(self) -> int:
        """How many tokens it knows, the special ones counted."""
        found: int = self._vocabulary.get_vocab_size()
        return found

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template."""
        return "default" in self._templates

    def render(self, chat: Any) -> str:
        """The prompt that the chat template makes of a chat, up to where the assistant is to speak.

        Args:
            chat: a list of messages, or an object with ``messages``, ``tools``, ``documents`` and
                ``chat_template_kwargs``, as `draftwood.runtime.text.messages.Chat` has them.

        Raises:
            RequestError: no template, a malformed chat (by field and index), or one that the template refuses.
        """
        asked = Chat.of(chat)
        name = "tool_use" if asked.tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError("chat: this bundle has no chat template; send a plain prompt")
        # tools and documents are None, not undefined: templates ask `tools is not none`.
        fixed: dict[str, Any] = {"messages": asked.messages, "tools": asked.tools, "documents": asked.documents}
        fixed["add_generation_prompt"] = True
        try:
            with bounded():
                return self._templates[name].render(self._template_tokens | asked.chat_template_kwargs | fixed)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat: the template refuses the messages: {error.message}") from error
        except Exception as error:  # a template can fail in every way that Python can
            reason = str(error) or type(error).__name__
            raise RequestError(f"chat: the template fails on the messages: {reason}") from error

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
        found: str | None = self._vocabulary.id_to_token(token_id)
        return found


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
