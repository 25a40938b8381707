"""Files: somebody else's are read if they are regular, up to a size, without a wait; our own are written whole.

Errors are OSError, whose ``strerror`` says the nature of the file, so that a caller names its own family in one place.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import math
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

# Of files that are read whole: JSON, text, statistics. Weights are mapped or streamed and have no limit.
MOST_BYTES = 1 << 30
_PART_BYTES = 1 << 20

# UTF-32's little-endian mark begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading, links followed.

    Raises:
        OSError: it is missing, or a folder, FIFO, socket or device; opening one of those may block.
    """
    _require_regular(_stat(path), path)
    # Another file may take the name between the check and the opening. So it is opened without waiting, and checked
    # again.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; OSError as `open_regular`, and if it is larger."""
    parts, size = [], 0
    with open_regular(path) as file:
        while part := file.read(_PART_BYTES):  # asked for all at once, memory is taken for the limit
            parts.append(part)
            size += len(part)
            if size > limit:
                raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return b"".join(parts)


def read_text(path: Path, limit: int = MOST_BYTES) -> str:
    """The UTF-8 text of a regular file, without a byte order mark, line ends as \\n; OSError also for another encoding.
    All files that a person writes are read in this way, since editors write such marks and line ends.
    """
    content = read_regular(path, limit)
    if (other := _other_encoding(content)) is not None:
        raise OSError(errno.EILSEQ, f"{other} text, expected UTF-8; save it as UTF-8")
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        at = error.start + len(content) - len(content.removeprefix(codecs.BOM_UTF8))
        raise OSError(errno.EILSEQ, f"not UTF-8 text at byte {at}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def real_path(path: Path) -> Path:
    """The path without links. A circle of links stays as it is, for whoever opens it to refuse; until Python 3.13
    ``Path.resolve`` raises RuntimeError for one."""
    return Path(os.path.realpath(path))


def absolute_path(path: Path) -> Path:
    """The path from everywhere, without links. A file keeps its own name, whose end says what it is: a cache of
    downloads links MODEL.gguf to a file without one."""
    return real_path(path) if path.is_dir() else real_path(path.parent) / path.name


def lines_of(text: str) -> list[str]:
    """The lines of a text that `read_text` gave; ``str.splitlines`` would part strings of JSON, too."""
    return text.removesuffix("\n").split("\n") if text else []


def json_of(text: str) -> Any:
    """The value of JSON that a person may have written; ValueError says why if it is none, or repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} occurs twice in one object; keep one")
        return value

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: null stands for a float that is no number, which JSON has no form of."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _other_encoding(content: bytes) -> str | None:
    """The encoding that a byte order mark names, or that every other byte of the beginning shows by being zero."""
    for mark, name in _MARKS.items():
        if content.startswith(mark):
            return name
    begin = content[:64]
    if len(begin) >= 4 and len(begin) % 2 == 0:
        for zeros, others in ((begin[1::2], begin[::2]), (begin[::2], begin[1::2])):
            if not any(zeros) and all(others):
                return "UTF-16"
    return None


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file next to ``path`` and renames it, so that ``path`` never holds half of it; OSError if that fails.

    A link stays, and what it leads to is written. A device or a pipe is written to: a rename would put a file in the
    place of /dev/null.
    """
    if not path.name:  # the folder one is in, or the root
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(content)
            return
    path = real_path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # what is written through a descriptor has no name
        with contextlib.suppress(OSError):  # the folder itself may be missing
            part.unlink()
        raise


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write next to ``path``, which takes its place once it is whole, and vanishes if the body fails."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def cache_home() -> Path:
    """The place of files that this user's programs can make again; OSError without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(named) if named.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except ValueError as error:  # a NUL in the name, say
        raise OSError(errno.EINVAL, f"no possible file name ({error})") from error


def _require_regular(status: os.stat_result, path: Path) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a special file')}, expected a regular file")
