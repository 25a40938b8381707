"""Trees by their shape, live: every way of choosing one, at equal rows and at equal milliseconds a step.

The binary tree has been shaped by nothing: it tells what planning is worth.

A task is a prompt; on it all trees take turns with plain decoding. Drafters that rank levels take any tree without a
build; of EAGLE-3 every tree has a draft graph, so its bundle takes minutes to build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from draftwood.tools import demo
from draftwood.tools.demo import counted
from draftwood.tools.lab import draw
from draftwood.tools.lab.bundles import Trees
from draftwood.tools.lab.opened import Lab, Opened
from draftwood.tools.lab.runner import PLAIN, Way, median_seconds, warm_up
from draftwood.tools.lab.runner import measure as measured
from draftwood.tools.lab.section import Block, Figure, Row, Section, Table, Task, grouped
from draftwood.tools.lab.spread import Interval, ratio
from draftwood.tools.lab.suite import Ask, Suite
from draftwood.trees import Topology
from draftwood.trees.baselines import baselines
from draftwood.trees.spec import Budget

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "shapes"
PROMPTS = 6
METHODS = {
    "medusa-greedy": "Medusa's",
    "sequoia": "Sequoia",
    "backbone": "FastEagle's backbone",
    "chain": "chain",
}
PLANNED, CHOSEN, BINARY = "planned", "EAGLE-2's budget", "binary"
# Candidates of a budget tree's node, and the nodes that its levels expand.
WIDTH = 10
DEPTH = 6

TreesOf = Callable[[str, Ask, Suite], Trees]


def tasks_of(name: str, ask: Ask) -> Iterator[Task]:
    """A prompt at a size and temperature, for a drafter."""
    for size, drafter, temperature in product(ask.sizes, ask.drafters, ask.temperatures):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            yield Task(name, {"size": size, "drafter": drafter, "temperature": temperature, "prompt": prompt})


def trees_of(drafter: str, ask: Ask, suite: Suite) -> Trees:
    """A tree of every number of nodes by every method, as far as the drafter reaches; plain decoding first."""
    contexts = counted(drafter, sampled=False).contexts
    paths = counted(drafter, sampled=False).rank_paths()
    found: list[tuple[str, Topology | Budget]] = [(PLAIN, Topology.plain())]
    for nodes in ask.nodes:
        by_method = baselines(contexts, nodes)
        found.append((f"{PLANNED} {nodes}", paths.best_tree(nodes)))
        found += [(f"{name} {nodes}", by_method[method]) for method, name in METHODS.items()]
        found.append((f"{BINARY} {nodes}", binary(nodes)))
        if demo.follows_nodes(drafter):
            found.append((f"{CHOSEN} {nodes}", Budget(nodes, DEPTH, WIDTH)))
    return tuple((name, tree) for name, tree in found if demo.can_draft(drafter, tree))


def binary(nodes: int) -> Topology:
    """Two candidates a node, level by level."""
    levels = (product(range(2), repeat=depth) for depth in range(1, nodes.bit_length() + 1))
    return Topology.from_paths([path for level in levels for path in level][:nodes])


def opened(task: Task, ask: Ask, lab: Lab, trees: TreesOf) -> Opened:
    """The pair with the trees, under names that can stand in a file's."""
    named = tuple((in_file(name), tree) for name, tree in trees(task.at["drafter"], ask, lab.suite))
    return lab.trees(task.at["size"], task.at["drafter"], named)


def in_file(name: str) -> str:
    """A way's name as a gear has it."""
    return name.replace(" ", "-").replace("'", "")


def ways_of(task: Task, ask: Ask, lab: Lab, trees: TreesOf) -> dict[str, Way]:
    """Plain decoding, then every tree by its name."""
    one, found = opened(task, ask, lab, trees), {}
    # Of a tree at several KV lengths the gear of the least.
    by_length = sorted(one.engine.bundle.manifest.gears, key=lambda gear: -gear.slots)
    gears, held = {gear.tree: gear.name for gear in by_length}, lab.own_names(task.at["drafter"])
    first: dict[Topology | Budget, str] = {}  # a tree that two methods find is built once
    for name, tree in trees(task.at["drafter"], ask, lab.suite):
        gear = gears[held.get(name) or in_file(first.setdefault(tree, name))]
        found[name] = Way(one.engine, one.policies(PLAIN if name == PLAIN else gear))
    return found


def prepare(trees: TreesOf, task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle and decodes a text with each way once."""
    if lab.enters(task.section, task.at["size"], task.at["drafter"]):
        ways, ids = ways_of(task, ask, lab, trees), ids_of(task, ask, lab, trees)
        warm_up(ways, ids, lab.options(ask, task.at["temperature"]))


def measure(trees: TreesOf, task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The prompt with every way; answers go on past the end token."""
    ids, ways = ids_of(task, ask, lab, trees), ways_of(task, ask, lab, trees)
    found, _ = measured(ways, ids, lab.options(ask, task.at["temperature"]), ask.rounds, task.at["prompt"])
    rows = {name: tree.rows for name, tree in trees(task.at["drafter"], ask, lab.suite)}
    return {"ways": found, "rows": rows, "bundle": opened(task, ask, lab, trees).digest[:16]}


def ids_of(task: Task, ask: Ask, lab: Lab, trees: TreesOf) -> list[int]:
    """The task's prompt."""
    prompt = lab.prompt(task.at["prompt"], ask.limit_of(task.at["size"]) or PROMPTS)
    return opened(task, ask, lab, trees).ids(prompt)


@dataclass(frozen=True, slots=True)
class Point:
    """A tree at a place: what its steps gain and take, over all prompts."""

    size: str
    drafter: str
    temperature: float
    way: str
    rows: int
    tokens_a_step: float
    ms_a_step: float
    speedup: Interval

    @property
    def place(self) -> tuple[str, str, float]:
        return self.size, self.drafter, self.temperature


def points_of(rows: Sequence[Row]) -> list[Point]:
    """Every tree at every place."""
    found = []
    for (size, drafter, temperature), own in grouped(rows, "size", "drafter", "temperature").items():
        plain = [median_seconds(row["found"]["ways"][PLAIN]) for row in own]
        for way, count in own[0]["found"]["rows"].items():
            figures = [row["found"]["ways"][way] for row in own]
            seconds, steps = [median_seconds(one) for one in figures], sum(one["steps"] for one in figures)
            gained = sum(one["tokens"] - 1 for one in figures) / steps
            ms = 1e3 * sum(seconds) / steps
            found.append(Point(size, drafter, temperature, way, count, gained, ms, ratio(plain, seconds)))
    return found


def show(rows: list[Row]) -> Iterator[Block]:
    """Curves at equal rows and at equal milliseconds."""
    points = points_of(rows)
    yield Figure("shapes-at-equal-rows", "Tokens a step at equal rows", partial(_draw, points, "rows"))
    yield Figure(
        "shapes-at-equal-ms", "Tokens a step at equal milliseconds", partial(_draw, points, "ms_a_step"),
        note="Steps of the text as they were decoded: draft, verify, accept, commit and host.",
    )  # fmt: skip
    lines = [
        [*point.place, _method(point.way), point.rows, round(point.tokens_a_step, 3), round(point.ms_a_step, 3),
         point.speedup]
        for point in points if point.way != PLAIN
    ]  # fmt: skip
    columns = ("size", "drafter", "temperature", "method", "rows", "tokens a step", "ms a step", "speed-up (95 %)")
    note = "Live, over all prompts. Every method saw the same counted contexts, none of them of these prompts."
    yield Table("Every tree", columns, lines, note)


def _method(way: str) -> str:
    return way.rpartition(" ")[0]


def _draw(points: list[Point], of: str, canvas: Canvas) -> None:
    places = list(dict.fromkeys(point.place for point in points))
    methods = list(dict.fromkeys(_method(point.way) for point in points if point.way != PLAIN))
    titles = [f"{drafter}, {size}, T {temperature:g}" for size, drafter, temperature in places]
    for axes, place in zip(draw.panels(canvas, titles), places, strict=True):
        for method, ink in zip(methods, draw.MANY, strict=False):
            own = sorted((p for p in points if p.place == place and _method(p.way) == method), key=lambda p: p.rows)
            if own:
                axes.plot([getattr(p, of) for p in own], [p.tokens_a_step for p in own], color=ink, label=method,
                          marker="o", markersize=3.5, linewidth=2 if method == PLANNED else 1)  # fmt: skip
        axes.set(xlabel="rows of a step, the root counted" if of == "rows" else "ms a step")
    canvas.axes[0].set_ylabel("tokens a step")
    draw.legend(canvas, canvas.axes[-1], 3)


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """See `tasks_of`."""
    return tasks_of(NAME, ask)


SECTION = Section(
    name=NAME,
    title="Tree shapes",
    question="Is the planned tree the better one, at equal rows and at equal milliseconds?",
    source="Draftwood; Medusa (2401.10774), Sequoia (2402.12374), EAGLE-2 (2406.16858), FastEagle's constrained tree",
    tasks=tasks,
    prepare=partial(prepare, trees_of),
    measure=partial(measure, trees_of),
    show=show,
)
