"""The style of pictures: one colour for a drafter everywhere, which the colour-blind can distinguish (Okabe and Ito),
and few lines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2a37"
DPI = 130
COLOURS = {
    "plain": "#7a7a7a",
    "medusa": "#e69f00",
    "eagle3": "#0072b2",
    "fasteagle": "#009e73",
    "peagle": "#cc79a7",
    "dflash": "#d55e00",
    "dspark": "#56b4e9",
    # In eight bits: the same, darker.
    "medusa-w8a8": "#8f6300",
    "eagle3-w8a8": "#003f66",
    "fasteagle-w8a8": "#005c43",
    "dspark-w8a8": "#2a6f97",
}
# Colours of things that are no drafter (methods, stages, gears), in the order of their appearance.
OTHERS = ("#4c3a86", "#8d80c0", "#cbbfe8", "#a35a1f", "#dba66b", "#56b4e9", "#8a8a8a", "#b8a500")
# Of a step's time.
STAGES = ("draft", "verify", "accept and commit", "host")
# Of bundles by other names.
MANY = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
# Panels side by side at most; what a further row of them takes, of a picture's height.
ABREAST, ROW_HEIGHT = 3, 0.75
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def save(drawing: Callable[[Figure], None], size: tuple[float, float], path: Path) -> Path:
    """Draws on a canvas of ``size`` inches, without a display, and writes it as PNG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(cast("Any", STYLE)):
        canvas = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(canvas)
        drawing(canvas)
        canvas.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def colour(way: str) -> str:
    """A bundle's colour, by the first word of its way: that of the drafter in its name, or one that its name
    decides."""
    name = way.split(" ")[0]
    return COLOURS.get(name) or MANY[zlib.crc32(name.encode()) % len(MANY)]


def dashes(way: str) -> str:
    """The adaptive policy's lines are whole, a fixed tree's dashed."""
    return "-" if way.endswith("adaptive") or " " not in way else "--"


def panels(canvas: Figure, titles: Sequence[str], share_y: bool = True) -> Iterator[Axes]:
    """Axes side by side with their titles, in enough rows to be read; the canvas grows with the rows."""
    count = max(len(titles), 1)
    rows = -(-count // ABREAST)
    columns = -(-count // rows)
    width, height = canvas.get_size_inches()
    canvas.set_size_inches(width, height * (1 + ROW_HEIGHT * (rows - 1)))
    drawn = canvas.subplots(rows, columns, squeeze=False, sharey=share_y).flat
    for axes in drawn[count:]:
        axes.remove()
    for axes, title in zip(drawn, titles, strict=False):
        axes.set_title(title, loc="left")
        yield axes


def equal_speed(axes: Axes, across: bool = True) -> None:
    """The line on which speculation gains nothing."""
    (axes.axhline if across else axes.axvline)(1, color=INK, linewidth=0.9, linestyle=":")


def stages(axes: Axes, ways: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A bar a way, by the figures of its texts: milliseconds a token, stage by stage."""
    left, tokens = (
        np.zeros(len(ways)),
        [max(sum(text["tokens"] - 1 for text in decoded), 1) for decoded in ways.values()],
    )
    for stage, ink in zip(STAGES, OTHERS, strict=False):
        us = np.array([sum(text["stages_us"][stage] for text in decoded) for decoded in ways.values()])
        axes.barh(range(len(ways)), us / 1e3 / tokens, left=left, color=ink, label=stage, height=0.7)
        left += us / 1e3 / tokens
    for at, value in enumerate(left):
        axes.annotate(f"{value:.2f}", (value, at), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(ways)), [*ways])
    axes.set_xlim(0, 1.18 * left.max())
    axes.grid(axis="y", visible=False)


def legend(canvas: Figure, axes: Axes, columns: int = 4) -> None:
    """One legend above all panels, of the first panel's names."""
    handles, names = axes.get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=8)
