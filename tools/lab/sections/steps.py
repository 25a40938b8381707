"""What a step takes: rows of a verify step, tree mask against causal mask, a draft against its depth.

A task times all trees of a pair in turns, behind one text, with the bound on their speed-up that follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from draftwood.tools.demo import counted
from draftwood.tools.lab import draw
from draftwood.tools.lab.bundles import Trees
from draftwood.tools.lab.opened import Lab, Opened
from draftwood.tools.lab.section import Block, Figure, Row, Section, Table, Task, short
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.tools.lab.timer import weigh
from draftwood.trees import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "steps"
# Nodes of one level, all children of the root: a mask that is not causal, with as many rows as a chain.
STAR, CHAIN = "star", "chain"


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A pair at a size."""
    for size, drafter in product(ask.sizes, ask.drafters):
        yield Task(NAME, {"size": size, "drafter": drafter})


def trees_of(drafter: str, ask: Ask) -> Trees:
    """Chains of every depth that the drafter reaches, and stars of as many rows as ``nodes`` says."""
    deepest = max(len(path) for path, _ in counted(drafter, sampled=False).rank_paths().items())
    chains = [(f"{CHAIN}-{depth}", Topology.chain(depth)) for depth in ask.depths if depth <= deepest]
    stars = [(f"{STAR}-{nodes}", Topology.full((nodes,))) for nodes in ask.nodes]
    return (("plain", Topology.plain()), *chains, *stars)


def _opened(task: Task, ask: Ask, lab: Lab) -> Opened:
    return lab.trees(task.at["size"], task.at["drafter"], trees_of(task.at["drafter"], ask))


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle."""
    _opened(task, ask, lab)


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Every gear's draft and verify, medians of steps that took turns."""
    opened = _opened(task, ask, lab)
    paths = counted(task.at["drafter"], sampled=False).rank_paths()
    asked = {name for name, _ in trees_of(task.at["drafter"], ask)}
    gears = [one for one in weigh(opened.engine, paths) if one["tree"] in asked]
    return {"gears": gears, "bundle": opened.digest[:16]}


def show(rows: list[Row]) -> Iterator[Block]:
    """Drafts by depth, verify steps by rows, and all of it as a table."""
    yield Figure("draft-by-depth", "A draft against its depth", partial(_draw_drafts, rows))
    lines = []
    for row in rows:
        plain = _plain(row)
        for gear in row["found"]["gears"]:
            ms = gear["draft_ms"] + gear["verify_ms"]
            counts = [gear["tree"], gear["rows"], round(gear["draft_ms"], 3), round(gear["verify_ms"], 3)]
            bound = [round(gear["expected_accept_length"], 2), round(ms / plain, 2), round(gear["bound"], 2)]
            lines.append([row["at"]["size"], short(row["at"]["drafter"]), *counts, *bound])
    columns = (
        "size",
        "drafter",
        "tree",
        "rows",
        "draft ms",
        "verify ms",
        "counted accept length",
        "overhead ratio",
        "bound",
    )
    note = "Bound: the speed-up if the host took nothing, counted accept length over the overhead ratio."
    yield Table("Every step", columns, lines, note)


def _plain(row: Row) -> float:
    return min(float(gear["verify_ms"]) for gear in row["found"]["gears"] if gear["rows"] == 1)


def _sizes(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["at"]["size"] for row in rows))


def _gears(row: Row, kind: str) -> list[dict[str, Any]]:
    own = [gear for gear in row["found"]["gears"] if gear["tree"].startswith(f"{kind}-")]
    return sorted(own, key=lambda gear: gear["rows"])


def _draw_drafts(rows: list[Row], canvas: Canvas) -> None:
    for axes, size in zip(draw.panels(canvas, _sizes(rows), share_y=False), _sizes(rows), strict=True):
        for row in (row for row in rows if row["at"]["size"] == size):
            drafter, own = short(row["at"]["drafter"]), _gears(row, CHAIN)
            axes.plot([gear["rows"] - 1 for gear in own], [gear["draft_ms"] for gear in own], marker="o", markersize=4,
                      color=draw.colour(drafter), label=drafter)  # fmt: skip
        step = min(_plain(row) for row in rows if row["at"]["size"] == size)
        axes.axhline(step, color=draw.COLOURS["plain"], linestyle="--", label="plain step")
        axes.set(xlabel="depth of the chain", ylim=(0, None))
    canvas.axes[0].set_ylabel("ms a draft")
    draw.legend(canvas, canvas.axes[0])


SECTION = Section(
    name=NAME,
    title="Steps",
    question="What does a step take, and what does its mask cost?",
    source="FastEagle, draft latency against depth; OpenPangu-Medusa, tree mask against causal, overhead ratio",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
