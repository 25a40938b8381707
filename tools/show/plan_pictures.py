"""Pictures of a plan: its trees with how often each edge is taken, the gain by size, and the cost's staircase."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.tools.show.pictures import draw_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from draftwood.trees.plan_file import Cost, Plan, PlannedTree, Stair


def draw_plan(plan: Plan, out: Path) -> list[Path]:
    """Write PNG pictures next to the plan file ``out``, named after it; returns their paths.

    Raises:
        RequestError: one cannot be written.
    """
    figures = out.with_name(f"{out.stem}-figures.png")
    written = [figures]
    try:
        _draw_figures(plan, figures)
        for tree in plan.trees:
            if tree.paths:
                written.append(out.with_name(f"{out.stem}-{tree.name}.png"))
                _draw_tree(tree, written[-1])
    except OSError as error:
        raise RequestError(f"{written[-1]}: cannot be written: {error.strerror}; choose another --out") from error
    return written


def _draw_tree(tree: PlannedTree, path: Path) -> None:
    numbered = enumerate(tree.counted_shares, 1)
    shares = {row: f"{share:.0%}" if share >= 0.1 else f"{share:.1%}" for row, share in numbered}
    heldout = tree.promise.heldout
    promised = f"{tree.promise.counted.tokens:.2f} counted"
    promised += f", {heldout.tokens:.2f} held out" if heldout else ""
    draw_picture(tree.topology, path, edge_labels=shares, title=f"{tree.name}: accept length {promised}")


def _draw_figures(plan: Plan, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and drawn without a display
    from matplotlib.figure import Figure

    panels = 2 if plan.cost is None else 4
    figure = Figure(figsize=(10, 3.6 * panels / 2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels // 2, 2).ravel()
    _draw_curve(axes[0], plan)
    _draw_gains(axes[1], plan)
    if plan.cost is not None:
        _draw_stairs(axes[2], plan.cost)
        _draw_optimum(axes[3], plan.cost)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_curve(axes: Axes, plan: Plan) -> None:
    axes.plot(plan.curve, label="best, counted contexts")
    if plan.curve_heldout:
        axes.plot(plan.curve_heldout, label="planned, held-out contexts")
    for baseline in plan.baselines:
        axes.plot(baseline.nodes, baseline.promise.counted.tokens, "o", markersize=5, label=f"{baseline.name}, counted")
    axes.set(xlabel="draft nodes", ylabel="expected accept length", title="accept length by size")
    axes.legend(frameon=False, fontsize=7)


def _draw_gains(axes: Axes, plan: Plan) -> None:
    for curve, label in ((plan.curve, "counted"), (plan.curve_heldout, "held out")):
        gains = [after - before for before, after in pairwise(curve)]
        if gains:
            axes.plot(range(1, len(curve)), gains, drawstyle="steps-mid", label=label)
    # A node that nobody passes gains nothing, which a logarithmic scale does not show.
    axes.set(xlabel="draft node, best first", ylabel="gain, tokens a step", title="marginal gain", yscale="log")
    axes.legend(frameon=False, fontsize=7)


def _staircases(cost: Cost) -> Iterator[tuple[str, list[Stair]]]:
    """The stairs of each number of texts and KV length, by its name."""
    for texts, slots in sorted({(stair.texts, stair.slots) for stair in cost.stairs}):
        name = f"KV length {slots}" + (f", {texts} texts" if texts > 1 else "")
        yield name, [stair for stair in cost.stairs if (stair.texts, stair.slots) == (texts, slots)]


def _draw_stairs(axes: Axes, cost: Cost) -> None:
    for name, level in _staircases(cost):
        edges = [0, *(stair.rows for stair in level)]
        axes.stairs([stair.us / 1000 for stair in level], edges, baseline=None, label=name)
    axes.set(xlabel="rows, root counted", ylabel="ms a step", title=f"cost of a step, {cost.source}")
    axes.legend(frameon=False, fontsize=7)


def _draw_optimum(axes: Axes, cost: Cost) -> None:
    for name, level in _staircases(cost):
        best = min(level, key=lambda stair: stair.us_per_token)
        (line,) = axes.plot([s.rows for s in level], [s.us_per_token / 1000 for s in level], marker=".")
        axes.plot(best.rows, best.us_per_token / 1000, "o", color=line.get_color(), label=name)
    axes.set(xlabel="rows, root counted", ylabel="ms a token", title="time per token; the ring is the least")
    axes.legend(frameon=False, fontsize=7)
