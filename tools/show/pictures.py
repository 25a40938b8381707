"""PNG pictures of draft trees."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.trees import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_picture(
    topology: Topology,
    path: Path,
    node_labels: Mapping[int, str] | None = None,
    edge_labels: Mapping[int, str] | None = None,
    title: str | None = None,
) -> None:
    """Write a PNG picture of `topology` to `path`: the root on top, ranks from left to right.

    Args:
        node_labels: the text inside a row's circle, by row; its rank if none is given.
        edge_labels: the text on the edge that leads to a row, by row, such as how often it is taken.
        title: a line above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and drawn without a display
    from matplotlib.figure import Figure

    places = _places(topology)
    leaves = 1 + max(x for x, _ in places)
    figure = Figure(figsize=(min(2 + 0.55 * leaves, 40), min(1.5 + 1.1 * topology.depth, 40)), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.88 if title else 0.96))
    axes.set_axis_off()
    axes.margins(0.08)
    inside = {row: str(topology.ranks[row]) for row in range(1, topology.rows)}
    inside |= {0: "root", **(node_labels or {})}
    _draw_edges(axes, topology, places, edge_labels or {})
    _draw_nodes(axes, places, inside)
    if title:
        axes.set_title(title)
    figure.savefig(path, format="png", metadata={"Software": None})


def _places(topology: Topology) -> list[tuple[float, float]]:
    """The place of each row: leaves side by side, a parent midway above its children, depth downwards."""
    x = [0.0] * topology.rows
    children = [topology.children(row) for row in range(topology.rows)]
    pending, leaves = [0], 0
    while pending:
        row = pending.pop()
        if not children[row]:
            x[row], leaves = float(leaves), leaves + 1
        pending += reversed(children[row])
    for row in reversed(range(topology.rows)):
        if children[row]:
            x[row] = (x[children[row][0]] + x[children[row][-1]]) / 2
    return [(x[row], -float(depth)) for row, depth in enumerate(topology.depths)]


def _draw_edges(
    axes: "Axes",
    topology: Topology,
    places: list[tuple[float, float]],
    labels: Mapping[int, str],
) -> None:
    for row in range(1, topology.rows):
        (x0, y0), (x1, y1) = places[topology.parents[row]], places[row]
        axes.plot((x0, x1), (y0, y1), color="0.6", linewidth=1.2, zorder=1)
        if row in labels:
            # Nearer to the child, because there the edges of one parent lie apart.
            at = (x0 + 0.62 * (x1 - x0), y0 + 0.62 * (y1 - y0))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.text(*at, labels[row], fontsize=7, ha="center", va="center", zorder=2, bbox=box)


def _draw_nodes(axes: "Axes", places: list[tuple[float, float]], labels: Mapping[int, str]) -> None:
    for row, (x, y) in enumerate(places):
        color = "#d9a441" if row == 0 else "#7fb3a2"
        box = {"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "0.3", "linewidth": 0.8}
        axes.text(x, y, labels[row], fontsize=8, ha="center", va="center", zorder=3, bbox=box)
