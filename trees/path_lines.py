"""Rank paths that were found elsewhere, one JSON object a line, as calibration statistics.

``{"path": [0, 2, 0], "context": 412, "confidence": 0.81, "task": "math", "group": "text 7"}``: the list ends
where the truth left the candidates; all but ``path`` may be left out. Lines of one text share a ``group``; a
line without one stands for itself.
"""

import hashlib

import msgspec

from draftwood.errors import TreeError
from draftwood.trees.calibration import Calibration

_SOURCE = "lines sha256:"
_EXAMPLE = '{"path": [0, 2], "group": "text 7"}'


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: tuple[int, ...]
    context: int | None = None
    confidence: float | None = None
    task: str = ""
    group: str | int | msgspec.UnsetType = msgspec.UNSET


def add_lines(calibration: Calibration, data: bytes, where: str) -> int:
    """Count the lines of the file contents `data`, beginning behind what `calibration` already has of them.

    A file that was counted before and has grown since is known by the digest of its beginning, so importing
    again adds what is new and nothing twice.

    Returns:
        the lines that were added.

    Raises:
        TreeError: a line that is something else, named by its number; some lines may have been added by then.
    """
    done = _counted(calibration, data)
    lines = data.splitlines()
    first = len(data[:done].splitlines())
    added = 0
    for number, line in enumerate(lines[first:], first + 1):
        if line.strip():
            _add(calibration, line, number, f"{where}: line {number}")
            added += 1
    calibration.sources.pop(_name(data[:done]), None)
    calibration.sources[_name(data)] = len(data)
    return added


def _counted(calibration: Calibration, data: bytes) -> int:
    """The bytes of `data` that have been counted."""
    sizes = (size for name, size in calibration.sources.items() if name.startswith(_SOURCE) and size <= len(data))
    known = [size for size in sizes if _name(data[:size]) in calibration.sources and _whole(data, size)]
    return max(known, default=0)


def _whole(data: bytes, size: int) -> bool:
    """Whether what follows byte `size` begins a line: a line that has grown is another line."""
    return size == len(data) or data[:size].endswith(b"\n") or data[size : size + 1] in (b"\n", b"\r")


def _name(data: bytes) -> str:
    return _SOURCE + hashlib.sha256(data).hexdigest()


def _add(calibration: Calibration, line: bytes, number: int, where: str) -> None:
    try:
        found = msgspec.json.decode(line, type=_Line)
        group = number if isinstance(found.group, msgspec.UnsetType) else str(found.group)
        calibration.add(found.path, group=group, context=found.context, confidence=found.confidence, task=found.task)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TreeError) as error:
        raise TreeError(f"{where}: {error}; expected a line such as {_EXAMPLE}") from error
