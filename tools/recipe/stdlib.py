"""Text of Python's own standard library, for the teacher to learn code from.

``python -m draftwood.tools.recipe.stdlib DATA`` writes DATA/stdlib.jsonl: whole modules as text, and documented
functions as chat, where signature and docstring are the question and the body is the answer.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from draftwood.tools.training.rows import Row

_SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "ensurepip"}


def stdlib_rows() -> Iterator[Row]:
    """The rows of every module as installed, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIP & set(path.relative_to(root).parts):
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


if __name__ == "__main__":
    with Path(sys.argv[1], "stdlib.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in stdlib_rows())
