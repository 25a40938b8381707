"""Tree files: the forms that people already have, and our own.

| form | looks like | used by |
|---|---|---|
| draftwood | ``{"format": "draftwood.tree", "version": 1, "paths": [[0], [0, 0]]}`` | Draftwood |
| medusa | ``[[0], [0, 0]]``, in Python also as an assignment | Medusa, NxDI's Medusa, TensorRT-LLM |
| tuples | ``[(0,), (0, 0)]`` | vLLM's speculative_token_tree, EAGLE's choices |
| nxdi | ``{"0": ["1"], "1": ["2"]}`` | NeuronX Distributed Inference |
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from draftwood import files
from draftwood.errors import TreeError
from draftwood.trees._json import load_json, read_form
from draftwood.trees.adjacency import parse_nxdi
from draftwood.trees.topology import Topology

TREE_FORMAT: Final = "draftwood.tree"
TREE_VERSION: Final = 1


class _TreeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal["draftwood.tree"] = TREE_FORMAT
    version: Literal[1] = TREE_VERSION
    paths: tuple[tuple[int, ...], ...]


def read_tree(path: Path) -> Topology:
    """The tree in the file at `path`, in whichever form; TreeError if it cannot be read."""
    return parse_tree(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The UTF-8 text of a tree file; TreeError if there is no such file or it holds no text."""
    try:
        return files.read_text(path)
    except OSError as error:
        raise TreeError(f"{path}: cannot read the tree file: {error.strerror}; check the path") from error


def parse_tree(text: str, where: str) -> Topology:
    """The tree in `text`, by the first of FORMATS that knows it; `where` names the source in errors.

    Raises:
        TreeError: the form is unknown, or the text breaks its rules.

    Example:
        >>> parse_tree("[(0,), (1,), (0, 0)]", "example").parents
        (0, 0, 0, 1)
    """
    return next(form for form in FORMATS if form.knows(text)).parse(text, where)


def parse_draftwood(text: str, where: str) -> Topology:
    """The tree in our own JSON; an unknown version or key is refused, and one that occurs twice."""
    load_json(text, where)
    return _from_lists(read_form(text, _TreeFile, TREE_FORMAT, TREE_VERSION, where).paths, where)


def parse_medusa(text: str, where: str, name: str | None = None) -> Topology:
    """The tree in Medusa choices: a list of rank lists, in JSON or as in ``medusa_choices.py``.

    Args:
        name: the assignment to read if the file has several.
    """
    values = _literals(text, where)
    if name is not None and name not in values:
        raise TreeError(f"{where}: no tree named {name!r}; the file has {sorted(values)}")
    if name is None and len(values) > 1:
        raise TreeError(f"{where}: expected one tree, got {sorted(values)}; say which, as in FILE#{min(values)}")
    return _from_lists(values[name] if name is not None else next(iter(values.values())), where)


def _literals(text: str, where: str) -> dict[str, object]:
    """The list literals in Python (or JSON) text by name; a bare one has the name ''. Nothing is run."""
    try:
        body = ast.parse(text.strip()).body
        named = [(name, ast.literal_eval(value)) for node in body for name, value in _list_nodes(node)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise TreeError(f"{where}: not a tree: {error}; expected a form such as [[0], [0, 0]]") from error
    if not named:
        raise TreeError(f"{where}: no tree found; expected a form such as [[0], [0, 0]]")
    values = dict(named)
    for name in values:
        if (count := sum(other == name for other, _ in named)) > 1:
            which = f"are named {name!r}" if name else "have no name"
            raise TreeError(f"{where}: {count} trees {which}; keep one, or give each a name of its own")
    return values


def _list_nodes(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.List, ast.Tuple)):
        return [("", node.value)]
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Tuple)):
        return [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, (ast.List, ast.Tuple)):
        return [(node.target.id, node.value)] if isinstance(node.target, ast.Name) else []
    return []


def _from_lists(paths: object, where: str) -> Topology:
    if not isinstance(paths, (list, tuple)):
        raise TreeError(f"{where}: expected a list of rank paths, got {type(paths).__name__}")
    try:
        return Topology.from_paths(paths)
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from error


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{")


class TreeFormat(NamedTuple):
    """A form of tree files: whether a text looks like it, and how the tree of a text is read, given its source."""

    knows: Callable[[str], bool]
    parse: Callable[[str, str], Topology]


# The first that knows a text reads it, so the last one knows every text.
FORMATS: Final = [
    TreeFormat(lambda text: _is_object(text) and '"format"' in text, parse_draftwood),
    TreeFormat(_is_object, parse_nxdi),
    TreeFormat(lambda _: True, parse_medusa),
]
