"""Proofs about a bundle on this machine, so that hashing gigabytes is paid once.

A proof is remembered for exactly the files that it was made of, as the file system tells them apart. These are device,
inode, size, and the times of the last change to content and to inode, in nanoseconds. The record is an empty file whose
name is the SHA-256 of all that. So there is nothing in it to be read, damaged or forged into something else.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from draftwood.files import cache_home
from draftwood.manifest import MANIFEST_FILE, File, file_digest

# Raised when opening proves more than it did, so that old records no longer count.
_VERSION = 1
# File systems stamp changes by a clock that ticks every 10 ms at most. A file that changed this long ago cannot change
# again unseen.
_TICK_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a bundle at one moment; taken before a proof, so that a change during it is noticed."""

    facts: str
    settled: bool

    @classmethod
    def of(cls, folder: Path, files: dict[str, File]) -> Files:
        """Asks the file system; OSError if a file is gone."""
        now, newest = time.time_ns(), 0
        lines = [f"{_VERSION} {file_digest(folder / MANIFEST_FILE)}"]
        for name in sorted(files):
            status = (folder / name).stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            lines.append(f"{status.st_dev} {status.st_ino} {status.st_size} {times} {name}")
            newest = max(newest, *times)
        return cls("\n".join(lines), newest < now - _TICK_NS)

    def proved(self, what: str) -> bool:
        """Whether ``what`` was proved of these very files."""
        try:
            return self._record(what).exists()
        except OSError:
            return False

    def remember(self, what: str) -> None:
        """Notes that ``what`` was proved; if there is no place for a note, it is proved again next time."""
        if not self.settled:
            return
        with contextlib.suppress(OSError):
            record = self._record(what)
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()

    def _record(self, what: str) -> Path:
        name = hashlib.sha256(f"{what}\n{self.facts}".encode()).hexdigest()
        return cache_home() / "draftwood" / "verified" / name
