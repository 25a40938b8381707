"""``python -m draftwood.tests.house.architecture``: the rooms and the imports between them, as a picture.

The top folders are houses, the folders in them rooms. An arrow leads from the imported folder to the importing one, so
the ways read from left to right and from the bottom up. The wider an arrow, the more imports. The picture's own
description says its content, so that a test can hold it against the source.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import textwrap
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from draftwood.errors import RequestError
from draftwood.tests.house.imports import Edges, modules, room, room_imports
from draftwood.tests.house.script import refusing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Where a house stands (left, right, bottom, top) and which way leads through it.
PLACES = {
    "tools": (0, 100, 46, 73),
    "compiler": (4, 64, 17, 41),
    "runtime": (68, 100, 17, 41),
    "kernels": (0, 26, 4, 12),
    "trees": (32, 100, 4, 12),
}
WAYS = {
    "compiler": "checkpoint > model > steps > graphs > bundle",
    "runtime": "bundle > engine > step > text",
    "trees": "rank paths > statistics > plan > gears",
}
# Where an arrow between houses runs upwards; those that pass a house run next to it.
STAIRS = {
    ("kernels", "compiler"): 14,
    ("trees", "compiler"): 48,
    ("trees", "runtime"): 84,
    ("compiler", "tools"): 34,
    ("runtime", "tools"): 84,
    ("trees", "tools"): 66,
    ("kernels", "tools"): 2,
}
COLOURS = {"tools": "#e9edf5", "compiler": "#e6f2ea", "runtime": "#fbefdc", "kernels": "#f3e8f2", "trees": "#f7f3d9"}
INK = "#33415c"


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftwood.tests.house.architecture", allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="write the picture there")
    args = parser.parse_args(argv)
    found = architecture()
    if args.out:
        draw(found, args.out)
    print(as_text(found))
    return 0


def architecture() -> dict[str, Any]:
    """Rooms with their purpose, and imports as [importer, imported, count]."""
    found = modules()
    edges = room_imports(found)
    files = [(name, path) for name, path in found.items() if path.stat().st_size]  # an empty __init__.py is no room
    return {
        "rooms": {name: _purpose(name, found) for name in sorted({room(*item) for item in files})},
        "imports": [[*pair, count] for pair, count in sorted(edges.items())],
    }


def _purpose(name: str, found: dict[str, Path]) -> str:
    """The first sentence of a room's own docstring."""
    path = found.get(name.replace("/", "."))
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path else None
    return " ".join((text or "").split("\n\n")[0].split())


def as_text(found: dict[str, Any]) -> str:
    """The imports for people, the most frequent first."""
    lines = [f"{count:5}  {importer} imports {imported}" for importer, imported, count in found["imports"]]
    return "\n".join([f"{len(found['rooms'])} rooms", *sorted(lines, reverse=True)])


def described(svg: str) -> dict[str, Any]:
    """Findings of ``architecture`` when an SVG file was drawn.

    Raises:
        RequestError: the text is no picture that ``draw`` has written.
    """
    match = re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    if match is None:
        raise RequestError("the picture has no description; draw it anew")
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """Writes the picture as SVG; equal rooms give equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 10.8), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, 101), ylim=(0, 74))
    axes.set_axis_off()
    edges: Edges = Edges({(importer, imported): count for importer, imported, count in found["imports"]})
    for house in PLACES:
        _draw_house(axes, house, {n: text for n, text in found["rooms"].items() if n.split("/")[0] == house}, edges)
    _draw_stairs(axes, edges)
    note = (
        "An arrow leads from what is imported to what imports it; the wider, the more imports. Not drawn: imports of"
        " the root's modules, such as errors.py, and the public surface above all, __init__.py."
    )
    axes.text(0, 1.2, note, fontsize=9, color=INK)
    try:
        with matplotlib.rc_context({"svg.hashsalt": "draftwood", "svg.fonttype": "none"}):
            figure.savefig(path, format="svg", metadata={"Date": None, "Description": json.dumps(found)})
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from error


def _draw_house(axes: Axes, house: str, rooms: dict[str, str], edges: Edges) -> None:
    """A house with its rooms: rooms that others in it import stand further to the left."""
    left, right, bottom, top = PLACES[house]
    _box(axes, (left, right, bottom, top), COLOURS[house], 0.8)
    way = f"   {WAYS[house].replace('>', chr(0x2192))}" if house in WAYS else ""
    axes.text(left + 1, top - 1.7, house, fontsize=14, fontweight="bold", color=INK, va="center")
    axes.text(left + 1 + 1.35 * len(house), top - 1.7, way, fontsize=10.5, style="italic", color=INK, va="center")
    inner = Edges({pair: count for pair, count in edges.items() if set(pair) <= set(rooms)})
    boxes = _places(columns(rooms, inner), (left + 1, right - 1, bottom + 0.8, top - 3.4))
    for name, place in boxes.items():
        _box(axes, place, "white", 0.6)
        _label(axes, name if len(rooms) > 1 else "", rooms[name], place)
    for (importer, imported), count in sorted(inner.items()):
        _draw_arrow(axes, boxes[imported], boxes[importer], count)


def columns(rooms: Iterable[str], edges: Edges) -> list[list[str]]:
    """The rooms in columns, each right of all that it imports; no rooms import each other."""
    imported = {name: {other for importer, other in edges if importer == name} for name in sorted(rooms)}
    return [sorted(column) for column in nx.topological_generations(nx.DiGraph(imported).reverse())]


_Place = tuple[float, float, float, float]


def _places(rooms: list[list[str]], inside: _Place) -> dict[str, _Place]:
    """Boxes of the rooms: columns from left to right, with room for arrows between them."""
    left, right, bottom, top = inside
    width, places = (right - left) / max(len(rooms), 1), {}
    for number, column in enumerate(rooms):
        height = (top - bottom) / len(column)
        for row, name in enumerate(column):
            low = top - height * (row + 1)
            x = left + width * number
            gap = 0.0 if len(rooms) == 1 else 0.11 * width
            places[name] = (x + gap, x + width - gap, low + 0.06 * height, low + 0.94 * height)
    return places


def _box(axes: Axes, place: _Place, colour: str, line: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, right, bottom, top = place
    box = FancyBboxPatch((left, bottom), right - left, top - bottom, boxstyle="round,pad=0,rounding_size=0.6")
    box.set(facecolor=colour, edgecolor=INK, linewidth=line, zorder=1 if colour != "white" else 3)
    axes.add_patch(box)


def _label(axes: Axes, name: str, purpose: str, place: _Place) -> None:
    left, right, bottom, top = place
    title = name.partition("/")[2] or (f"{name}/*.py" if name else "")
    lines = int((top - bottom) / 1.25) - bool(title)
    text = textwrap.fill(purpose, max(int((right - left) * 2.0), 12), max_lines=max(lines, 1), placeholder=" ...")
    x, y = (left + right) / 2, (bottom + top) / 2 - (0.9 if title else 0)
    style: dict[str, Any] = {"ha": "center", "color": INK, "zorder": 4}
    axes.text(x, top - 0.5, title, fontsize=9.5, fontweight="bold", va="top", **style)
    axes.text(x, y, text, fontsize=7.6, va="center", linespacing=1.15, **style)


def _draw_arrow(axes: Axes, start: _Place, end: _Place, count: int) -> None:
    """From the right edge of the imported to the left edge of the importing one, in an arc over the rooms between."""
    far = end[0] - start[1] > 0.7 * (start[1] - start[0])
    y = (start[2] + start[3]) / 2, (end[2] + end[3]) / 2
    _arrow(axes, (start[1], y[0]), (end[0], y[1]), count, -0.28 if far else 0.0)


_Point = tuple[float, float]


def _arrow(axes: Axes, start: _Point, end: _Point, count: int, bend: float = 0.0) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "alpha": 0.55, "linewidth": 0.6 + 0.32 * count**0.5}
    bent = {"connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=style | bent, zorder=2)  # after the rooms, before the houses


def _draw_stairs(axes: Axes, edges: Edges) -> None:
    """Arrows between houses."""
    between: Edges = Edges()
    for (importer, imported), count in edges.items():
        between[imported.split("/")[0], importer.split("/")[0]] += count
    for (lower, upper), count in sorted(between.items()):
        if lower == upper or not {lower, upper} <= set(PLACES):
            continue
        start, end = PLACES[lower], PLACES[upper]
        if (lower, upper) == ("trees", "kernels"):  # they stand side by side
            _arrow(axes, (start[0], 8), (end[1], 8), count)
            continue
        way = STAIRS.get((lower, upper))  # None if no way leads there
        low, high = (way, way) if way is not None else ((start[0] + start[1]) / 2, (end[0] + end[1]) / 2)
        _arrow(axes, (low, start[3]), (high, end[2]), count)


if __name__ == "__main__":
    sys.exit(main())
