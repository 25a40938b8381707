"""A latency table for people: as text, and as the picture of its staircase."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftwood.errors import RequestError
from draftwood.trees.latency import LatencyTable


def table_text(table: LatencyTable) -> str:
    """The table for people: for each number of texts ms by rows and KV length, then the draft and the host."""
    machine = table.machine.get("device") or table.machine.get("model")
    lines = [f"{table.source} on {machine}, ms a step"]
    for texts in table.texts:
        lines += [*([f"{texts} texts a launch"] if table.texts != (1,) else []), *_of_texts(table, texts)]
    return "\n".join([*lines, *table.notes])


def _of_texts(table: LatencyTable, texts: int) -> list[str]:
    """The lines of launches of so many texts."""
    rows = sorted({count for length in table.slots for count in table.rows(length, texts)})
    lines = [f"{'rows':>6}" + "".join(f"  kv {c:>6}" for c in table.slots)]
    for count in rows:
        known = (count in table.rows(c, texts) for c in table.slots)
        times = zip(known, table.slots, strict=True)
        cells = (f"{1000 * table.step_s(count, c, texts):11.3f}" if there else " " * 11 for there, c in times)
        lines.append(f"{count:6}" + "".join(cells))
    drafts = [entry for entry in table.entries if entry.kind == "draft" and entry.texts == texts]
    for width in sorted({entry.width for entry in drafts}):
        by_depth = ", ".join(f"{e.depth}: {1000 * e.seconds:.3f}" for e in drafts if e.width == width)
        lines.append(f"draft of width {width}, by depth {by_depth}")
    return [*lines, f"host  {1000 * table.host_s(texts):.3f} ms a step"]


def draw_staircase(table: LatencyTable, path: Path) -> None:
    """Writes a PNG of step time against rows of a text, a line for every KV length and number of texts; measured ones
    with their quartiles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    every = [entry for entry in table.entries if entry.kind in ("decode", "verify")]
    for texts, length in sorted({(entry.texts, entry.slots) for entry in every}):
        steps = [entry for entry in every if (entry.texts, entry.slots) == (texts, length)]
        rows, label = [entry.rows for entry in steps], f"KV length {length}"
        label = f"{texts} texts, {label}" if table.texts != (1,) else label
        # A tree of fewer rows runs the next larger step, so a step reaches back to the one before it.
        (line,) = axes.step(rows, [1000 * entry.seconds for entry in steps], where="pre", label=label)
        if table.source == "measured":
            low, high = 1000 * np.array([entry.quartiles for entry in steps]).T
            axes.fill_between(rows, low, high, step="pre", color=line.get_color(), alpha=0.2, linewidth=0)
        axes.plot(rows, [1000 * entry.seconds for entry in steps], ".", markersize=3, color=line.get_color())
    machine = table.machine.get("device") or table.machine.get("model")
    axes.set(xlabel="rows of the step", ylabel="ms a step", ylim=(0, None), title=f"{table.source}: {machine}")
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise RequestError(f"--png {path}: cannot be written: {error.strerror}") from error
