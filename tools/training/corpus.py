"""Reads training text: chat and text rows from a folder, functions from Python's standard library.

A row is one JSON object a line, plain or gzip: ``{"id", "messages": [{"role", "content"}, ...]}`` or
``{"id", "text"}``. A tenth of the rows, chosen by a hash of the id, is held out for validation.
"""

from __future__ import annotations

import ast
import gzip
import json
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from draftwood.errors import RequestError

# Sources whose licence lets weights trained on them be shipped; see the model card.
SHIPPABLE = (
    "gsm8k_train",
    "mbpp_train",
    "svamp",
    "sgd_dialogues",
    "xquad_de_en",
    "wikitext2",
    "wikipedia_sample",
    "books",
    "tinyshakespeare",
)
_STDLIB_SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip"}


class Message(TypedDict):
    role: str
    content: str


class Row(TypedDict, total=False):
    id: str
    messages: list[Message]
    text: str


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of one ``.jsonl`` or ``.jsonl.gz`` file; names the line of a malformed one."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                assert isinstance(row["id"], str) and ("messages" in row or "text" in row)
            except (ValueError, KeyError, AssertionError, TypeError):
                raise RequestError(
                    f'{path}, line {number}: expected {{"id", "messages"}} or {{"id", "text"}}, got {line[:60]!r}'
                ) from None
            yield row


def read_folder(folder: Path, sources: tuple[str, ...] = SHIPPABLE) -> list[Row]:
    """Reads ``<source>.jsonl[.gz]`` for every source, in the order given; ``source:3`` reads its rows three times.

    Raises:
        RequestError: a file is missing, a row malformed, or a number of times no positive integer.
    """
    rows: list[Row] = []
    for named in sources:
        source, colon, times = named.partition(":")
        if colon and not (times.isdecimal() and int(times) > 0):
            raise RequestError(f"source {named!r}: expected NAME or NAME:TIMES, a positive integer")
        found = [p for p in (folder / f"{source}.jsonl", folder / f"{source}.jsonl.gz") if p.is_file()]
        if not found:
            raise RequestError(f"{folder}: no {source}.jsonl or {source}.jsonl.gz; name other files with --sources")
        rows.extend(list(read_rows(found[0])) * int(times or 1))
    return rows


def stdlib_rows() -> Iterator[Row]:
    """The interpreter's own standard library: whole modules as text, documented functions as chat.

    A documented function becomes a question (signature and docstring) and its body the answer.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _STDLIB_SKIP & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        for number, piece in enumerate(_pieces(source)):
            yield {"id": f"stdlib/{name}/{number}", "text": piece}
        yield from _functions(name, source, tree)


def _pieces(source: str, limit: int = 4000) -> Iterator[str]:
    """Cuts text at blank lines into pieces of about ``limit`` characters."""
    piece: list[str] = []
    size = 0
    for block in source.split("\n\n"):
        if size + len(block) > limit and piece:
            yield "\n\n".join(piece)
            piece, size = [], 0
        piece.append(block[:limit])
        size += len(block)
    if piece:
        yield "\n\n".join(piece)


def _functions(name: str, source: str, tree: ast.Module) -> Iterator[Row]:
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or ast.get_docstring(node) is None:
            continue
        split, end = node.body[0].end_lineno, node.end_lineno
        if split is None or end is None or end - split > 40:
            continue
        stub = textwrap.dedent("\n".join(lines[node.lineno - 1 : split]))
        indent = " " * node.col_offset
        body = "\n".join(line.removeprefix(indent) for line in lines[split:end])
        if stub.strip() and body.strip():
            yield {
                "id": f"stdlib/{name}/{node.name}/{node.lineno}",
                "messages": [{"role": "user", "content": stub}, {"role": "assistant", "content": body}],
            }


def held_out(row: Row) -> bool:
    """True for the fixed validation tenth."""
    return zlib.crc32(row["id"].encode()) % 10 == 0
