"""Rank paths that were found elsewhere, one JSON object a line, as calibration statistics.

``{"path": [0, 2, 0], "context": 412, "confidence": 0.81, "task": "math", "group": "text 7"}``: the list ends
where the truth left the candidates; all but ``path`` may be left out. Lines of one text share a ``group``; a
line without one stands for itself.
"""

import hashlib
from typing import cast

from draftwood.errors import TreeError
from draftwood.trees._json import load_json
from draftwood.trees.calibration import Calibration

_KEYS = {"path", "context", "confidence", "task", "group"}
_SOURCE = "lines sha256:"


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
        value = load_json(line.decode(), where)
    except UnicodeDecodeError as error:
        raise TreeError(f"{where}: not UTF-8 text") from error
    if not isinstance(value, dict) or "path" not in value or not set(value) <= _KEYS:
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise TreeError(f"{where}: expected an object with path and at most {sorted(_KEYS - {'path'})}, got {got}")
    fields = cast(dict[str, object], value)
    group = fields.get("group", number)
    try:
        calibration.add(
            fields["path"],  # type: ignore[arg-type]  # checked by add, like the others
            group=str(group) if type(fields.get("group")) is int else group,  # type: ignore[arg-type]
            context=fields.get("context"),  # type: ignore[arg-type]
            confidence=fields.get("confidence"),  # type: ignore[arg-type]
            task=fields.get("task", ""),  # type: ignore[arg-type]
        )
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from error
