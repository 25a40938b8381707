"""Calibration statistics on disk: written whole or not at all."""

import os
import tempfile
from pathlib import Path

from draftwood.errors import TreeError
from draftwood.files import read_regular
from draftwood.trees.calibration import Calibration


def read_calibration(path: Path) -> Calibration:
    """The statistics in the file at `path`; TreeError if it cannot be read or is something else."""
    try:
        return Calibration.from_bytes(read_regular(path), str(path))
    except OSError as error:
        raise TreeError(f"{path}: cannot read the calibration statistics: {error.strerror}; check the path") from error


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` to `path`, in place of what may lie there; TreeError if that fails."""
    write_whole(path, calibration.to_bytes())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file beside `path` and rename it, so that `path` never holds half of it; TreeError if that fails."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except OSError as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        raise TreeError(f"{path}: cannot be written: {error.strerror}; choose another --out") from error
