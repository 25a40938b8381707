"""Reads the rows that a teacher learns from and gets its prompts from.

A row is one JSON object a line, plain or gzip: ``{"id", "messages": [{"role", "content"}, ...]}`` or
``{"id", "text"}``. A line of a prompt file (`draftwood.tools.prompts`) is a row of its first user message.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from draftwood.errors import RequestError
from draftwood.tools.prompts import prompt_id, user_turns


class WrittenMessage(TypedDict):
    role: str
    content: str


class Row(TypedDict, total=False):
    id: str
    messages: list[WrittenMessage]
    text: str


def read_data(named: Sequence[str]) -> list[Row]:
    """Reads files, and all files of folders, in the order given; ``FILE:3`` reads its rows three times.

    Raises:
        RequestError: there is no such file, none in a folder, or a row is malformed.
    """
    return [row for name in named for row in _read(name)]


def _read(name: str) -> list[Row]:
    path, times = Path(name), 1
    if not path.exists():
        before, colon, after = name.rpartition(":")
        if colon and after.isdecimal() and int(after):
            path, times = Path(before), int(after)
    files = sorted((*path.glob("*.jsonl"), *path.glob("*.jsonl.gz"))) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise RequestError(
            f"--data {name}: no such file, and no folder with .jsonl or .jsonl.gz files;"
            " expected PATH or PATH:TIMES, TIMES a positive integer"
        )
    return [row for file in files for row in read_rows(file)] * times


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of one ``.jsonl`` or ``.jsonl.gz`` file of any size; names the line of a malformed one."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            yield from (_row(line, number, path) for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise RequestError(f"{path}: cannot be read ({error}); expected lines of JSON in UTF-8") from None


def _row(line: str, number: int, path: Path) -> Row:
    try:
        row: Row = _said(json.loads(line))
        if not {"messages", "text"} & row.keys():
            row = _of_prompt(row, number)
        row["id"].encode()
        if {"messages", "text"} <= row.keys():
            raise RequestError(f"{path}, line {number}: has messages and a text; leave one of the fields out")
        # What a message holds is the chat template's to judge.
        chat = row.get("messages")
        assert isinstance(row.get("text"), str) or (chat and all(isinstance(message["role"], str) for message in chat))
    except (ValueError, LookupError, AssertionError, TypeError, AttributeError, RecursionError):
        raise RequestError(
            f'{path}, line {number}: expected {{"id", "messages"}}, {{"id", "text"}} or {{"prompt"}}, got {line[:60]!r}'
        ) from None
    return row


def _said(row: dict[str, Any]) -> Any:
    """The line's fields that hold something: exporters of tables write null for what a line lacks."""
    return {name: value for name, value in row.items() if value is not None}


def _of_prompt(row: Any, number: int) -> Row:
    """The row of a prompt file's line: its first turn alone, since a later one follows an answer that is not there."""
    return {"id": prompt_id(row, number), "messages": [{"role": "user", "content": user_turns(row)[0]}]}
