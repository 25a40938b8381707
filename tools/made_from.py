"""Files, options and product version that a long job was made from, and the first of them that has changed since.

A file is known by its size, the time of its last change, and a digest of samples of its content, which costs
milliseconds at any size. So a replaced checkpoint is noticed, and the same checkpoint by another path is not. What a
job has made is no input of it, wherever it lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from draftwood.errors import RequestError
from draftwood.files import read_text
from draftwood.version import __version__

# Bytes of a sample, and how many are spread over a file between its two ends.
_SAMPLE, _SAMPLES = 1 << 16, 14
# A bound, in case a large folder was named by mistake.
_MOST_FILES = 4096

# How the folder ends in which `make` makes a bundle of the rest of its name.
WORK = ".make"

MadeFrom = dict[str, Any]
T = TypeVar("T", dict[str, Any], list[Any])


def made_from(files: Mapping[str, Path | None], options: Mapping[str, Any]) -> MadeFrom:
    """Stamps of a job's input, for JSON: ``files`` and folders by their role in the job, without those that are
    None."""
    stamps = {title: stamps_of(path) for title, path in files.items() if path is not None}
    return {"version": __version__, "files": stamps, "options": json.loads(json.dumps(dict(options)))}


def stamps_of(path: Path) -> dict[str, list[Any]]:
    """Size, time of the last change and digest of samples, by the name inside a folder (empty for a file itself)."""
    if not path.is_dir():
        return {"": _stamp(path)}
    names = sorted(_files_of(path))[:_MOST_FILES]
    return {str(name.relative_to(path)): _stamp(name) for name in names if name.is_file()}


def _files_of(folder: Path) -> Iterator[Path]:
    """A folder's files, without bundles that were made there."""
    for at, inside, files in os.walk(folder):
        inside[:] = [name for name in inside if not name.endswith(WORK) and f"{name}{WORK}" not in inside]
        yield from (Path(at, name) for name in files)


def changed(before: object, now: MadeFrom) -> str | None:
    """The first thing that differs, for people; None if nothing does."""
    if not isinstance(before, dict) or not all(isinstance(before.get(key), dict) for key in ("files", "options")):
        return "nothing says what it was made from"
    if before.get("version") != now["version"]:
        return f"it was made by version {before.get('version')}, this is {now['version']}"
    for title in sorted({*before["files"], *now["files"]}):
        old, new = (note["files"].get(title) for note in (before, now))
        if old != new:
            return f"{title}{_differs(old or {}, new or {})}"
    names = sorted({*before["options"], *now["options"]})
    differ = [name for name in names if before["options"].get(name) != now["options"].get(name)]
    return f"{', '.join(differ)}: asked otherwise" if differ else None


def begin_in(out: Path, marks: Collection[str]) -> None:
    """Makes the folder of a job that writes many files and goes on after a stop.

    Raises:
        RequestError: there is something that the job has not begun, which it might write over: no file of a name in
            ``marks`` is there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in out.iterdir()]
    except OSError as error:
        raise RequestError(f"--out {out}: {error.strerror}; expected a folder, or a place for one") from None
    if names and not set(marks) & set(names):
        raise RequestError(
            f"--out {out}: holds {min(names)}, which this command has not made; expected a new folder, or one to go on"
            " in"
        )


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """During the body no other process works in a job's folder, where both would write the same files.

    The lock is the folder's own: it leaves no file, and the kernel releases it however the process ends.

    Raises:
        RequestError: another process works there.
    """
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _lock(folder):
            raise RequestError(
                f"--out {out}: another process works there; wait until it is done, or name another folder"
            )
        yield
    finally:
        os.close(folder)


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds the lock; so it is on a file system that can lock no folder, too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def read_note(path: Path, kind: type[T]) -> T:
    """The JSON object or list of a file that a stopped job goes on from; empty if there is no file.

    Raises:
        RequestError: it is damaged.
    """
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, getattr(error, "strerror", None) or "not whole JSON") from None
    if not isinstance(value, kind):
        raise damaged(path, f"no JSON {'list' if kind is list else 'object'}")
    return value


def damaged(path: Path, reason: str) -> RequestError:
    """The refusal of a file that nobody can go on from."""
    return RequestError(f"{path}: damaged ({reason}); remove it, or its folder, to begin again")


def _stamp(path: Path) -> list[Any]:
    try:
        size, changed_ns = (status := path.stat()).st_size, status.st_mtime_ns
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for number in range(_SAMPLES + 2):
                file.seek(number * max(0, size - _SAMPLE) // (_SAMPLES + 1))
                digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from error
    return [size, changed_ns, digest.hexdigest()]


def _differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    name = names[0]
    inside = f" ({name}{' and others' if len(names) > 1 else ''})" if name else ""
    if name not in now or name not in before:
        return f"{inside} is {'new' if name in now else 'gone'}"
    return f"{inside} has changed"
