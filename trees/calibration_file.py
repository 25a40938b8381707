"""Calibration statistics on disk: written whole or not at all."""

import errno
import os
from pathlib import Path
from tempfile import TemporaryFile

from draftwood.errors import TreeError
from draftwood.files import read_regular, real_path, write_whole
from draftwood.trees.calibration import Calibration


def read_calibration(path: Path) -> Calibration:
    """The statistics in the file at `path`; TreeError if it cannot be read or is something else."""
    try:
        return Calibration.from_bytes(read_regular(path), str(path))
    except OSError as error:
        raise TreeError(f"{path}: cannot read the calibration statistics: {error.strerror}; check the path") from error


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` to `path`, replacing any file there; TreeError if that fails."""
    write_out(path, calibration.to_bytes())


def write_out(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all, and the folders above it; TreeError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error


def prepare_out(path: Path) -> None:
    """Make the folders above `path`; TreeError if it cannot be written, before the work of minutes that it is for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():  # a device is written itself
            with TemporaryFile(dir=real_path(path).parent):
                pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> TreeError:
    return TreeError(f"{path}: cannot be written: {error.strerror}; choose another --out")
