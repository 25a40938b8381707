"""Text that streams: a stream releases only text that no later token can change.

So shown text is never taken back, no UTF-8 character is split, and no stop string begins to show.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from draftwood.errors import RequestError
from draftwood.runtime.text.tokenizer import Tokenizer

# Longest run of byte tokens that is waited for before its whole characters are released; see _Window.
_RUN_LIMIT = 32
# A character has at most four bytes.
_CHARACTER_BYTES = 4


class Stream:
    """Text of a growing token sequence, released as soon as it is final, up to the first stop string.

    Example:
        >>> stream = Stream(tokenizer, stop_strings=("END",))  # doctest: +SKIP
        >>> stream.push(ids), stream.stopped, stream.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: tuple[str, ...] = (),
        special_tokens: Sequence[str] = (),
        *,
        shows_stop: bool = False,
        least: int = 0,
        after: Sequence[int] = (),
    ) -> None:
        """``special_tokens`` appear in the text by their spelling; other special tokens leave nothing in it.

        ``shows_stop``: the text ends after the stop string and not before it. The text of the ``least`` first tokens
        ends no text. ``after``: the tokens that the text goes on with, which are not shown; it keeps its first space.

        Raises RequestError if ``stop_strings`` is a bare string or holds an empty one.
        """
        if isinstance(stop_strings, str) or not all(isinstance(s, str) and s for s in stop_strings):
            raise RequestError(f"stop strings: expected a tuple of non-empty strings, got {stop_strings!r}")
        by_bytes = tokenizer.decoders == ["ByteLevel"]
        self._pieces: _Pieces = _Bytes(tokenizer) if by_bytes else _Window(tokenizer, after)
        self._stops, self._shows_stop, self._least = tuple(stop_strings), shows_stop, least
        self._shown = {tokenizer.special_id(token): token for token in special_tokens}
        self._held = ""  # final text that may be the beginning of a stop string
        # Characters that became final, those held counted.
        self._tokens_used = self._characters = 0
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; the rest is dropped."""
        return self._stopped

    @property
    def tokens_used(self) -> int:
        """Tokens taken in: all pushed, or up to and including the one that completed the stop string."""
        return self._tokens_used

    def offset_of(self, token_id: int) -> int:
        """Where the text of a token begins that is pushed next, in characters; of a part of a character, where that
        begins."""
        return self._characters + self._pieces.begun(token_id)

    def push(self, ids: Sequence[int]) -> str:
        """Takes in tokens and returns the text that became final; how tokens are grouped has no effect."""
        released = []
        for token_id in ids:
            if self._stopped:
                break
            self._tokens_used += 1
            released.append(self._release(self._piece(int(token_id))))
        return "".join(released)

    def finish(self) -> str:
        """Returns the text held back; all returned text is then ``decode(ids)`` up to the stop string."""
        released = self._release(self._pieces.finish())
        rest, self._held = self._held, ""
        return released + rest

    def _piece(self, token_id: int) -> str:
        if token_id in self._shown:  # it ends the part that was not final
            piece = self._pieces.finish() + self._shown[token_id]
        else:
            piece = self._pieces.push(token_id)
        self._characters += len(piece)
        return piece

    def _release(self, piece: str) -> str:
        if self._stopped or not piece:
            return ""
        known, text = len(self._held), self._held + piece
        # A stop string that ends within the least tokens has ended nothing; one that only begins there may.
        stops = self._stops if self._tokens_used > self._least else ()
        begins = ((text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in stops)
        ends = [(start, size) for start, size in begins if start >= 0]
        self._stopped = bool(ends)
        start, size = min(ends) if ends else (len(text) - overlap(text, self._stops), 0)
        self._held = "" if ends else text[start:]
        return text[: start + size] if self._shows_stop else text[:start]


def overlap(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of one of some marks."""
    longest = max(map(len, marks), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((n for n in sizes if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class _Pieces:
    """Turns tokens, one at a time, into text that no later token can change."""

    def begun(self, token_id: int) -> int:
        """Characters between the final text and the one that the next token is of."""
        return 0

    def push(self, token_id: int) -> str:
        raise NotImplementedError

    def finish(self) -> str:
        raise NotImplementedError


class _Bytes(_Pieces):
    """Byte-level vocabularies: a token is bytes, and the text is those bytes read as UTF-8.

    Python's decoder replaces invalid bytes exactly as the tokenizers library does: one U+FFFD for each maximal valid
    beginning. It also knows at once whether a byte can still become part of a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        spelling = self._tokenizer.spelling(token_id)
        return "" if spelling is None else self._utf8.decode(_bytes_of(spelling))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window(_Pieces):
    """Any other decoder: the new text is the difference of the last few tokens' decoding with and without the new ones.

    A released token stays as context. So the special treatment of a decoder's first token (dropping its leading space)
    does not happen again in the middle. A run of byte tokens is decoded as a whole, valid or not at all, so it is final
    when it ends. Past a limit its whole characters are released.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A byte token may be a part of a character.
        spelled = [(token, tokenizer.spelling(token)) for token in reversed(after[-_RUN_LIMIT:])]
        before = [token for token, spelling in spelled if spelling is not None and not _is_byte_token(spelling)]
        self._context = next(([token] for token in before if tokenizer.decode([token])), before[:1])
        self._pending: list[int] = []
        self._fallback = "ByteFallback" in tokenizer.decoders
        self._lossy = "ByteLevel" in tokenizer.decoders  # among others, so _Bytes does not apply
        self._run = 0  # byte tokens at the end of pending

    def begun(self, token_id: int) -> int:
        if not self._run:
            return 0
        return sum(map(self._begins, self._pending)) - (not self._begins(token_id))

    def _begins(self, token_id: int) -> bool:
        """Whether a token is the first of a character: no byte in the middle of one."""
        spelling = self._tokenizer.spelling(token_id) or ""
        return not _is_byte_token(spelling) or int(spelling[3:5], 16) & 0xC0 != 0x80

    def push(self, token_id: int) -> str:
        spelling = self._tokenizer.spelling(token_id)
        if spelling is None:
            return ""
        self._pending.append(token_id)
        self._run = self._run + 1 if self._fallback and _is_byte_token(spelling) else 0
        return self._take(len(self._pending) - self._open())

    def finish(self) -> str:
        return self._take(len(self._pending))

    def _open(self) -> int:
        """Tokens at the end of pending whose text is not final."""
        if self._run < _RUN_LIMIT and not self._lossy:
            return self._run
        for back in range(min(_CHARACTER_BYTES, len(self._pending) + 1)):
            tokens = self._context + self._pending[: len(self._pending) - back]
            if not self._tokenizer.decode(tokens).endswith("\ufffd"):
                return back
        return 0  # four bytes in a row that end no character: no later one can mend them

    def _take(self, count: int) -> str:
        first, self._pending = self._pending[:count], self._pending[count:]
        self._run = min(self._run, len(self._pending))
        if not first:
            return ""
        before = self._tokenizer.decode(self._context)
        tokens = self._context + first
        # Tokens without text would not do as context: the next one would again count as the first.
        sizes = (len(first), len(first) + 1)
        self._context = next((tokens[-n:] for n in sizes if self._tokenizer.decode(tokens[-n:])), tokens)
        return self._tokenizer.decode(tokens)[len(before) :]


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
