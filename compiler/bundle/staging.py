"""A folder appears whole or not at all, and one process at a time makes it.

The lock is a file next to the folder. Its owner holds it with ``flock``, which the kernel releases however the owner
ends. An unfinished folder that the lock's owner finds has no other owner, so it is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from draftwood.errors import RequestError
from draftwood.files import real_path

_held = threading.local()


@contextmanager
def exclusive(out: Path, wait: bool = True, tell: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """During the body no other process or thread makes the folder ``out``; ``staged`` may be used inside.

    With ``wait`` it waits for another owner, and ``tell`` gets one line about that; otherwise it raises.

    Raises:
        RequestError: ``out`` is being made elsewhere, or nothing can be written next to it.
    """
    mine: set[Path] = _held.__dict__.setdefault("locks", set())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = real_path(out.parent) / f".{out.name}.lock"
        file = None if lock in mine else _lock(lock, out, wait, tell)
    except OSError as error:
        raise RequestError(f"{out}: cannot be written ({error}); choose another --out") from error
    if file is None:
        yield
        return
    mine.add(lock)
    try:
        yield
    finally:
        mine.remove(lock)
        lock.unlink(missing_ok=True)
        file.close()


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """A folder next to ``out`` that becomes ``out`` if the body succeeds, and vanishes otherwise.

    Raises:
        RequestError: ``out`` exists, is being made by another process, or cannot be written by this or by the body.
    """
    folder = out.parent / f".{out.name}.partial"  # also of a folder that has no name, such as the current one
    with exclusive(out, wait=False):
        if os.path.lexists(out):  # a link to nothing, too: no folder can be renamed to it
            raise RequestError(f"{out}: exists already; expected a new folder; remove it or choose another --out")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
            folder.chmod(0o755)
            folder.rename(out)
        except OSError as error:
            raise RequestError(f"{out}: cannot be written ({error}); choose another --out") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _lock(lock: Path, out: Path, wait: bool, tell: Callable[[str], None]) -> BinaryIO:
    """The lock's file, held. Its owner removes it, so what was locked may no longer be what lies there."""
    while True:
        file = _open(lock)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                busy = f"{out}: process {file.read(20).decode(errors='replace') or 'unknown'} is writing it"
                if not wait:
                    raise RequestError(f"{busy}; wait until it is done, or choose another --out") from None
                tell(f"{busy}; waiting until it is done")
                fcntl.flock(file, fcntl.LOCK_EX)
            if _still_there(lock, file):
                file.truncate(0)
                file.write(str(os.getpid()).encode())
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open(lock: Path) -> BinaryIO:
    """The lock's file for reading and writing. Links are refused, because the owner overwrites the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(lock, flags, 0o666), "r+b", buffering=0)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        file.close()
        raise OSError(errno.EINVAL, "expected a file of its own; remove it", str(lock))
    return file


def _still_there(lock: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(lock.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
