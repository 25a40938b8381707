"""Rows: a line of JSON each, appended whole. What a stopped run has left is read back, so that it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.errors import RequestError
from draftwood.files import read_regular, write_whole
from draftwood.tools.measure.runner import is_plain

FILE = "rows.jsonl"
NEEDED = ("key", "section", "at", "found")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's folder; a last line without its end, which a stopped run may leave, is not counted.

    Raises:
        RequestError: no such file, or a line that is no row.
    """
    path = folder / FILE
    try:
        whole = read_regular(path)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; expected a folder of evaluate --out") from error
    return [_row(path, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = dict(json.loads(line))
        if missing := [name for name in NEEDED if name not in row]:
            raise ValueError(f"has no {missing[0]!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{path}, line {number}: not a row ({error}); mend it, or take another --out") from error
    return row


class RunRows:
    """The rows of a run that goes on: those that are there, and what is added."""

    def __init__(self, folder: Path) -> None:
        """Opens or makes the folder's file; half a line at its end is cut off.

        Raises:
            RequestError: a line that is no row, or a folder that cannot be written.
        """
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self.path.touch()
            whole = self.path.read_bytes()
            if whole and not whole.endswith(b"\n"):
                write_whole(self.path, whole[: whole.rfind(b"\n") + 1])
        except OSError as error:
            raise RequestError(f"--out {folder}: {error.strerror}; choose another folder") from error
        self.rows = read_rows(folder)
        self.keys = {row["key"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row, whole."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.rows.append(row)
        self.keys.add(row["key"])


class DecodedText(NamedTuple):
    """One text decoded one way, and the key of its row."""

    key: str
    way: str
    figures: dict[str, Any]


def decoded(rows: Sequence[dict[str, Any]]) -> Iterator[DecodedText]:
    """Every text that was decoded besides a plain one, other plain ones left out."""
    return (text for text in _all(rows) if not is_plain(text.way))


def _all(rows: Sequence[dict[str, Any]]) -> Iterator[DecodedText]:
    for row in rows:
        for turn in row["found"].get("turns", [row["found"]]):
            for way, figures in turn.get("ways", {}).items():
                yield DecodedText(row["key"], way, figures)


def differences(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Differences from the first plain text, those of other bundles' plain texts included. Without an explanation a
    difference is no tie."""
    for text in _all(rows):
        if not text.figures["equal"]:
            yield {"tie": False, **text.figures.get("difference", {}), "key": text.key, "way": text.way}
    for row in rows:
        for difference in row["found"].get("bench", {}).get("differences", ()):  # of texts that shared launches
            yield {**difference, "key": row["key"], "way": "together"}
        for way, figures in row["found"].get("programs", {}).items():  # ours next to other programs
            if not figures.get("equal", True):
                yield {"tie": False, **figures.get("difference", {}), "key": row["key"], "way": way}
