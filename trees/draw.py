"""A draft tree as text."""

from collections.abc import Mapping, Sequence

from draftwood.trees.topology import Topology


def draw_text(topology: Topology, labels: Mapping[int, str] | Sequence[str] | None = None) -> str:
    """`topology` as lines of text: branches, rank path and depth of every node.

    Args:
        labels: a note for each row, or for some rows by number; it stands after the depth.

    Example:
        >>> print(draw_text(Topology.from_paths([(0,), (1,), (0, 0)]), {1: "61%"}))
        4 rows, depth 2, width 2
        root         depth 0
        ├─ (0,)      depth 1  61%
        │  └─ (0, 0) depth 2
        └─ (1,)      depth 1
    """
    rows, stems = _branches(topology)
    depths, notes = topology.depths, _notes(labels)
    column = max(map(len, stems))
    lines = [f"{topology.rows} rows, depth {topology.depth}, width {topology.width}"]
    for row, stem in zip(rows, stems, strict=True):
        lines.append(f"{stem:<{column}} depth {depths[row]}  {notes.get(row, '')}".rstrip())
    return "\n".join(lines)


def _notes(labels: Mapping[int, str] | Sequence[str] | None) -> Mapping[int, str]:
    if labels is None:
        return {}
    return labels if isinstance(labels, Mapping) else dict(enumerate(labels))


def _branches(topology: Topology) -> tuple[list[int], list[str]]:
    """The rows in the order in which they are drawn, and each row's branch with its name."""
    names = ("root", *map(str, topology.paths))
    rows: list[int] = []
    stems: list[str] = []
    pending = [(0, "", "")]  # row, what stands before its own branch, what stands before its children's
    while pending:
        row, stem, indent = pending.pop()
        rows.append(row)
        stems.append(stem + names[row])
        children = topology.children(row)
        for child in reversed(children):
            last = child == children[-1]
            pending.append((child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")))
    return rows, stems
