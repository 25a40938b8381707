"""EAGLE-Pangu's budget sweep: M nodes by D levels, with the sweet spot and why it is there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from draftwood.tools import demo
from draftwood.tools.demo import counted
from draftwood.tools.lab import draw
from draftwood.tools.lab.bundles import Trees
from draftwood.tools.lab.given import own_trees
from draftwood.tools.lab.runner import PLAIN
from draftwood.tools.lab.section import Block, Figure, Row, Section, Table, Task, any_bundle
from draftwood.tools.lab.sections import shapes
from draftwood.tools.lab.sections.shapes import WIDTH, Point, points_of
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "budget"


def trees_of(drafter: str, ask: Ask, suite: Suite) -> Trees:
    """M x D: the drafter's own choice within the budget where it follows nodes, else the best counted tree.

    Cells that cannot be filled (fewer nodes are grown, or were ever visited, or the drafter ends above) are left out.
    A bundle of one's own has the trees that it has.
    """
    if drafter in suite.bundles:
        return own_trees(suite.bundles[drafter])[0]
    paths = counted(drafter, sampled=False).rank_paths()
    deepest = max(len(path) for path, _ in paths.items())
    found: list[tuple[str, Topology | Budget]] = [(PLAIN, Topology.plain())]
    for nodes in ask.nodes:
        for depth in ask.depths:
            if demo.follows_nodes(drafter):
                grown = nodes <= WIDTH + (depth - 1) * WIDTH**2
                if grown and demo.can_draft(drafter, budget := Budget(nodes, depth, WIDTH)):
                    found.append((f"M {nodes} D {depth}", budget))
            elif depth <= deepest and (tree := paths.best_tree(nodes, max_depth=depth)).nodes == nodes:
                found.append((f"M {nodes} D {depth}", tree))
    return tuple(found)


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt, with every budget."""
    return shapes.tasks_of(NAME, ask)


def show(rows: list[Row]) -> Iterator[Block]:
    """Heat maps, the table, and the sweet spot in words."""
    points = [point for point in points_of(rows) if point.way != PLAIN]
    if not points:
        return
    yield Figure("budget", "Speed-up by budget: M nodes, D levels", partial(_draw, points))
    for place in dict.fromkeys(point.place for point in points):
        yield _sweet_spot([point for point in points if point.place == place])
    lines = [
        [*point.place, *_sizes(point), round(point.tokens_a_step, 3), round(point.ms_a_step, 3), point.speedup]
        for point in points
    ]
    columns = ("size", "drafter", "temperature", "M", "D", "accept length", "ms a step", "speed-up (95 %)")
    note = "EAGLE-Pangu's best budget was M = 16 with D = 10, at 1.48 times plain decoding; larger trees were slower."
    yield Table("Every budget", columns, lines, note)


def _sizes(point: Point) -> tuple[int, int]:
    _, nodes, _, depth = point.way.split(" ")
    return int(nodes), int(depth)


def _sweet_spot(points: list[Point]) -> str:
    best = max(points, key=lambda point: point.speedup.value)
    longest = max(points, key=lambda point: point.tokens_a_step)
    (nodes, depth), (most, deepest) = _sizes(best), _sizes(longest)
    return (
        f"{best.drafter}, {best.size}, temperature {best.temperature:g}: the sweet spot is M = {nodes}, D = {depth}:"
        f" {best.tokens_a_step:.2f} tokens in {best.ms_a_step:.2f} ms a step, {best.speedup.value:.2f} times plain"
        f" decoding. The longest accept length has M = {most}, D = {deepest}: {longest.tokens_a_step:.2f} tokens, but"
        f" in {longest.ms_a_step:.2f} ms."
    )


def _draw(points: list[Point], canvas: Canvas) -> None:
    places = list(dict.fromkeys(point.place for point in points))
    titles = [f"{drafter}, {size}, T {temperature:g}" for size, drafter, temperature in places]
    for axes, place in zip(draw.panels(canvas, titles, share_y=False), places, strict=True):  # not all reach as deep
        own = {_sizes(point): point for point in points if point.place == place}
        nodes, depths = (sorted({size[at] for size in own}) for at in (0, 1))
        values = np.full((len(depths), len(nodes)), np.nan)
        for (m, d), point in own.items():
            values[depths.index(d), nodes.index(m)] = point.speedup.value
        draw.heat(axes, values, [str(m) for m in nodes], [str(d) for d in depths])
        axes.set(xlabel="M, nodes")
    canvas.axes[0].set_ylabel("D, levels")


SECTION = Section(
    name=NAME,
    title="Budget sweep",
    question="How many nodes and levels pay, and why not more?",
    source="EAGLE-Pangu, M from 16 to 256 and D from 2 to 12",
    tasks=tasks,
    prepare=partial(shapes.prepare, trees_of),
    measure=partial(shapes.measure, trees_of),
    show=show,
    given=any_bundle,
)
