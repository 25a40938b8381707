"""Rows: a line of JSON each, appended whole. What a stopped run has left is read back, so that it goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.files import read_regular, write_whole

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
        raise RequestError(f"{path}: {error.strerror}; expected a folder of draftwood evaluate --out") from error
    return [_row(path, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if missing := [name for name in NEEDED if name not in row]:
            raise ValueError(f"has no {missing[0]!r}")
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{path}, line {number}: not a row ({error}); mend it, or take another --out") from error
    return {**row, "line": number}


class Rows:
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
        self.rows.append({**row, "line": len(self.rows) + 1})
        self.keys.add(row["key"])


def merge(folders: Sequence[Path], out: Path) -> int:
    """Writes the rows of several folders into a new one, with the manifest of the first; returns how many.

    Raises:
        RequestError: ``out`` has rows, two folders measured the same task, or their suites or bundles differ.
    """
    from draftwood.tools.evaluate.record import read_record, write_record

    if (out / FILE).exists():
        raise RequestError(f"--out {out}: has rows; merged ones go into a new folder")
    found: dict[str, dict[str, Any]] = {}
    records = [read_record(folder) for folder in folders]
    for folder, record in zip(folders, records, strict=True):
        if record["suite"]["name"] != records[0]["suite"]["name"]:
            raise RequestError(f"--merge {folder}: another suite than {folders[0]}; merge runs of one suite")
        for row in read_rows(folder):
            if row["key"] in found:
                raise RequestError(f"--merge {folder}: {row['key']} is in an earlier folder, too; leave one out")
            found[row["key"]] = {name: value for name, value in row.items() if name != "line"}
    rows = Rows(out)
    for row in found.values():
        rows.add(row)
    sections = {name: ask for record in records for name, ask in record["suite"]["sections"].items()}
    suite = records[0]["suite"] | {"sections": sections}
    machines = [machine for record in records for machine in record["machines"]]
    write_record(out, records[0] | {"suite": suite, "machines": machines, "merged": [str(f) for f in folders]})
    return len(found)
