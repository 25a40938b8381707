"""``python -m draftwood.tests.house.lines``: source lines by folder, the longest functions and the longest files.

A line is one that is not blank. A function is counted with its decorators and inner definitions.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.tests.house.imports import HOUSES, modules, room
from draftwood.tests.house.script import refusing

LONGEST = 5


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftwood.tests.house.lines", allow_abbrev=False)
    parser.add_argument("--root", type=Path, metavar="DIR", help="a checkout to count (default: what is installed)")
    args = parser.parse_args(argv)
    print(as_text(figures(args.root)))
    return 0


def figures(root: Path | None = None) -> dict[str, Any]:
    """Files, lines and functions of every room, and the longest of all.

    Raises:
        RequestError: ``root`` is no checkout of the project.
    """
    found = modules(root)
    if root is not None and not all((root / house).is_dir() for house in HOUSES):
        raise RequestError(f"--root {root}: expected a checkout with the folders {', '.join(HOUSES)}")
    rooms: dict[str, list[int]] = defaultdict(list)
    files, functions = [], []
    for name, path in found.items():
        text = path.read_text(encoding="utf-8")
        files.append((_lines(text), name))
        rooms[room(name, path)].append(files[-1][0])
        functions += [(length, f"{name}.{function}") for function, length in _functions(text)]
    lengths = [length for length, _ in functions]
    return {
        "rooms": {name: {"files": len(counts), "lines": sum(counts)} for name, counts in sorted(rooms.items())},
        "files": len(files),
        "lines": sum(count for count, _ in files),
        "functions": len(functions),
        "function_lines": {"median": statistics.median(lengths), "p90": statistics.quantiles(lengths, n=10)[-1]},
        "longest_functions": [[name, count] for count, name in sorted(functions, reverse=True)[:LONGEST]],
        "longest_files": [[name, count] for count, name in sorted(files, reverse=True)[:LONGEST]],
    }


def _lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def _functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and lines of every function, methods and inner ones among them."""
    source = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, _lines("\n".join(source[begin - 1 : node.end_lineno]))


def as_text(found: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [f"{name:<22}{facts['files']:>6}{facts['lines']:>8}" for name, facts in found["rooms"].items()]
    lengths = found["function_lines"]
    about = f"{found['functions']} functions, lines: median {lengths['median']:g}, nine in ten under {lengths['p90']:g}"
    longest = [f"{count:6}  {name}" for key in ("longest_functions", "longest_files") for name, count in found[key]]
    total = f"{'all':<22}{found['files']:>6}{found['lines']:>8}"
    return "\n".join([f"{'folder':<22}{'files':>6}{'lines':>8}", *rows, total, "", about, *longest])


if __name__ == "__main__":
    sys.exit(main())
