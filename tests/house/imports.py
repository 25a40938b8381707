"""The project's own files and which of them import which, read from the source without running any of it.

A module is named without the distribution: ``trees.topology``. A *room* is a folder, two levels deep at most:
``trees``, ``compiler/teachers``. Of the files at the root, ``__init__.py`` is the room ``draftwood``: the public
surface on top of all others. The rest is the room ``root``, which all others stand on.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import draftwood

HOUSES = ("trees", "kernels", "compiler", "runtime", "tools")
SURFACE, ROOT_ROOM = "draftwood", "root"

Modules = dict[str, Path]
Edges = Counter[tuple[str, str]]


def modules(root: Path | None = None) -> Modules:
    """Every Python file of the package below ``root`` (default: as installed), by its module's name."""
    root = root or Path(draftwood.__file__).parent
    paths = [*root.glob("*.py"), *(path for house in HOUSES for path in (root / house).rglob("*.py"))]
    return {_name(path.relative_to(root)): path for path in sorted(paths)}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(found: Modules) -> Edges:
    """How often a module imports another: (importer, imported), wherever in the file and for types, too."""
    return Counter((name, other) for name, path in found.items() for other in _imported(path, found) if other != name)


def _imported(path: Path, found: Modules) -> Iterator[str]:
    for statement in _statements(path):
        # A name may be a module of the package or something that the package exports.
        targets = [f"{module}.{name}" if _own(f"{module}.{name}") in found else module for module, name in statement]
        yield from {own for target in targets if (own := _own(target)) is not None and own in found}


@cache  # most of the time of a picture and of several tests
def _statements(path: Path) -> list[list[tuple[str, str]]]:
    """The modules of every import in a file, each with the name that is taken from it, "" if it is taken whole."""
    found = []
    for node in _within(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found.append([(alias.name, "") for alias in names])
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found.append([(module, alias.name) for alias in names])
    return found


def _within(block: ast.AST) -> Iterator[ast.AST]:
    """All statements of a block, at any level; their expressions, which are most of a file, are not looked at."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(block, name, ()):
            yield statement
            yield from _within(statement)


def _own(target: str) -> str | None:
    """The project's name of a dotted name, None if it is another distribution's."""
    top, _, rest = target.partition(".")
    return rest if top == "draftwood" else None


def room(name: str, path: Path) -> str:
    """The folder that a module lies in, two levels deep at most."""
    folders = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    return "/".join(folders[:2]) or (ROOT_ROOM if name else SURFACE)


def room_imports(found: Modules) -> Edges:
    """How often files of a room import files of another: (importer, imported)."""
    edges: Edges = Counter()
    for (importer, imported), count in imports(found).items():
        pair = room(importer, found[importer]), room(imported, found[imported])
        if pair[0] != pair[1]:
            edges[pair] += count
    return edges


def circles(edges: Edges) -> list[list[str]]:
    """Groups of names that import each other over any number of steps; empty if imports run one way."""
    import networkx as nx

    return sorted(
        sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(edges.keys())) if len(group) > 1
    )
