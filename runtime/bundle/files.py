"""Whether the files of a bundle are those that its manifest vouches for.

At the top of a bundle anything may lie next to the manifest (a report of ``draftwood check``, a model card), since
nothing there is read. In its folders a file that the manifest does not list is refused: a tokenizer or a graph would
read it by its name. ATC's results in ``npu/om`` are a product of the bundle.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from draftwood.errors import BundleError
from draftwood.files import open_regular
from draftwood.manifest import File

PRODUCTS = ("npu/om", ".binding")


def check_files(folder: Path, files: dict[str, File]) -> None:
    """Every listed file is a regular one inside the bundle and has its size; no other lies in a folder.

    Raises:
        BundleError: the first that does not; nothing was opened for it, so nothing can have blocked.
    """
    root = folder.resolve()
    for name, listed in files.items():
        _check_file(folder, root, name, listed)
    for name in _found(folder):
        if name not in files:
            raise BundleError(
                f"{folder / name}: the manifest does not list it; expected listed files alone in the bundle's folders;"
                " remove it"
            )


def check_digests(folder: Path, files: dict[str, File]) -> None:
    """The SHA-256 of every listed file; BundleError names the first that differs."""
    for name, listed in files.items():
        try:
            with open_regular(folder / name) as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise BundleError(f"{folder / name}: cannot be read: {error.strerror}; copy the bundle again") from error
        if got != listed.sha256:
            raise BundleError(
                f"{folder / name}: altered (SHA-256 {got[:12]}..., expected {listed.sha256[:12]}...);"
                " copy the bundle again"
            )


def _check_file(folder: Path, root: Path, name: str, listed: File) -> None:
    path = folder / name
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError):  # a circle of links is a RuntimeError before Python 3.13
        raise BundleError(f"{path}: missing; the manifest lists it; copy the whole bundle again") from None
    if not real.is_relative_to(root):
        raise BundleError(f"{path}: a link to {real}; expected a file inside the bundle; copy the file itself")
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path}: no regular file; expected one of {listed.bytes} bytes; copy the bundle again")
    if status.st_size != listed.bytes:
        raise BundleError(
            f"{path}: altered or truncated ({status.st_size} bytes, expected {listed.bytes}); copy the bundle again"
        )


def _found(folder: Path) -> Iterator[str]:
    """Files and links in the bundle's folders, by their names relative to it."""
    for at, folders, names in os.walk(folder):
        here = Path(at).relative_to(folder)
        folders[:] = [name for name in folders if not {name, (here / name).as_posix()} & {*PRODUCTS}]
        links = [name for name in folders if (folder / here / name).is_symlink()]
        if here != Path():
            yield from ((here / name).as_posix() for name in (*names, *links))
