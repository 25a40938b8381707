"""Calibration statistics on disk: written whole or not at all."""

from pathlib import Path

from draftwood.errors import TreeError
from draftwood.files import read_regular, write_whole
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
        raise TreeError(f"{path}: cannot be written: {error.strerror}; choose another --out") from error
