"""JSON as every reader of this package wants it: one line of error that says where the file is wrong."""

from typing import TypeVar

import msgspec

from draftwood.errors import TreeError
from draftwood.files import json_of

T = TypeVar("T")


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


def read_form(text: str | bytes, kind: type[T], form: str, version: int, where: str) -> T:
    """The value of type ``kind`` in ``text``, which says of itself that it is of Draftwood's format ``form``.

    Raises:
        TreeError: it is of another format or version, or something in it is not what ``kind`` says.
    """
    try:
        header = msgspec.json.decode(text, type=_Header)
        if header.format != form:
            raise TreeError(f"expected an object with format {form!r}, got {header.format!r}; check the path")
        if header.version != version:
            raise TreeError(f"expected version {version} of {form}, got {header.version}; make the file again")
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise TreeError(f"{where}: not {form}: {error}; make the file again") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TreeError(f"{where}: not JSON: {error}; check the file") from error
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from error


def load_json(text: str, where: str) -> object:
    """The value in `text`, which people may have written; TreeError if it is not JSON or repeats a key."""
    try:
        return json_of(text)
    except ValueError as error:
        raise TreeError(f"{where}: {error}; check the file") from error
