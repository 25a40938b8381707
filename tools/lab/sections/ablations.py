"""Fused graphs against eager PyTorch, mode by mode and budget by budget: EAGLE-Pangu's performance and reference modes.

One bundle with its trees, on the CPU's engine, on static graphs as an accelerator runs them, and on the eager
reference, whose every step is held to its invariants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from draftwood.manifest import Gear
from draftwood.tools.lab import draw
from draftwood.tools.lab.opened import Lab, Opened
from draftwood.tools.lab.runner import PLAIN, Way, median_seconds, warm_up
from draftwood.tools.lab.runner import measure as measured
from draftwood.tools.lab.section import Block, Figure, Row, Section, Table, Task, any_bundle, grouped
from draftwood.tools.lab.spread import ratio
from draftwood.tools.lab.suite import Ask, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "ablations"
PROMPTS = 4
# Engines, by what they stand for in EAGLE-Pangu's terms.
MODES = {"cpu": "performance", "static": "static graphs", "eager": "reference"}

Place = tuple[str, str]


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt on every engine at every size."""
    for size, drafter in product(ask.sizes, ask.drafters):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            yield Task(NAME, {"size": size, "drafter": drafter, "prompt": prompt})


def _way(engine: str, tree: str) -> str:
    return PLAIN if (engine, tree) == ("cpu", PLAIN) else f"{engine} {tree}"


def trees_of(opened: Opened) -> dict[str, Gear]:
    """A gear of every tree of the drafter's, at the least KV length, the smallest tree first."""
    manifest = opened.engine.bundle.manifest
    rows, slots = {tree.name: tree.rows for tree in manifest.trees}, min(gear.slots for gear in manifest.gears)
    own = sorted((gear for gear in manifest.gears if gear.neural and gear.slots == slots), key=lambda g: rows[g.tree])
    return {gear.tree: gear for gear in own}


def ways_of(task: Task, lab: Lab) -> dict[str, Way]:
    """Plain decoding and every tree, on every engine; the CPU's plain decoding first."""
    opened = lab.planned(task.at["size"], task.at["drafter"])
    policies = {PLAIN: PLAIN, **{tree: gear.name for tree, gear in trees_of(opened).items()}}
    return {
        _way(engine, tree): Way(lab.on(opened, engine), opened.policies(policy))
        for engine, (tree, policy) in product(MODES, policies.items())
    }


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens bundle and engines and decodes a text with each way once."""
    if lab.enters(NAME, task.at["size"], task.at["drafter"]):
        warm_up(ways_of(task, lab), _ids(task, ask, lab), lab.options(ask, 0.0))


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The prompt with every way; answers go on past the end token."""
    options, opened = lab.options(ask, 0.0), lab.planned(task.at["size"], task.at["drafter"])
    found, _ = measured(ways_of(task, lab), _ids(task, ask, lab), options, ask.rounds, task.at["prompt"])
    rows = {tree.name: tree.rows for tree in opened.engine.bundle.manifest.trees}
    nodes = {tree: rows[tree] - 1 for tree in trees_of(opened)}
    best = next((tree for tree, gear in trees_of(opened).items() if gear.name == opened.tree), next(iter(nodes)))
    return {"ways": found, "nodes": nodes, "tree": best, "bundle": opened.digest[:16]}


def _ids(task: Task, ask: Ask, lab: Lab) -> list[int]:
    prompt = lab.prompt(task.at["prompt"], ask.limit_of(task.at["size"]) or PROMPTS)
    return lab.planned(task.at["size"], task.at["drafter"]).ids(prompt)


def show(rows: list[Row]) -> Iterator[Block]:
    """Engines and their stages."""
    yield _engines(rows)
    yield Figure(
        "stages-by-mode", "Where a token's time goes, fused and eager", partial(_draw_stages, rows),
        size=(7.2, 0.9 + 1.5 * len(_places(rows))),
        note="Performance mode is the CPU's engine, one fused graph for every size; static graphs are those of an"
        " accelerator, padded, on onnxruntime; reference mode is eager PyTorch. The tree that promises most.",
    )  # fmt: skip


def _places(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    return grouped(rows, "size", "drafter")


def _engines(rows: list[Row]) -> Table:
    lines = []
    for place, own in _places(rows).items():
        for (tree, nodes), (engine, mode) in product({PLAIN: 0, **own[0]["found"]["nodes"]}.items(), MODES.items()):
            by_way = {way: [row["found"]["ways"][way] for row in own] for way in own[0]["found"]["ways"]}
            plain, ours, fused = (by_way[_way(*way)] for way in ((engine, PLAIN), (engine, tree), ("cpu", tree)))
            seconds, steps = [median_seconds(one) for one in ours], sum(one["steps"] for one in ours)
            gained = sum(one["tokens"] - 1 for one in ours)
            lines.append([
                *place, nodes, engine, mode, f"{sum(one['equal'] for one in ours)} of {len(own)}",
                f"{sum(one['held'] for one in ours)} of {steps}", round(gained / steps, 3),
                round(gained / sum(seconds), 1), ratio([median_seconds(one) for one in plain], seconds),
                ratio(seconds, [median_seconds(one) for one in fused]),
            ])  # fmt: skip
    columns = ("size", "drafter", "M", "engine", "mode", "same text", "steps held to invariants", "accept length",
               "tokens/s", "over its own plain (95 %)", "time over fused (95 %)")  # fmt: skip
    note = (
        "M 0 is plain decoding. The same texts from the same bundle: what is fused changes the time, neither tokens nor"
        " accept length. The reference holds every step to the invariants of its tree and caches, and ends at the first"
        " that is broken."
    )
    return Table("Modes by budgets", columns, lines, note)


def _draw_stages(rows: list[Row], canvas: Canvas) -> None:
    places = _places(rows)
    drawn = canvas.subplots(len(places), 1, squeeze=False)[:, 0]
    for axes, (place, own) in zip(drawn, places.items(), strict=True):
        best = own[0]["found"]["tree"]
        ways = [(engine, tree) for tree in (best, PLAIN) for engine in reversed(MODES)]
        named = {f"{MODES[engine]}, {tree}": _way(engine, tree) for engine, tree in ways}
        draw.stages(axes, {name: [row["found"]["ways"][way] for row in own] for name, way in named.items()})
        axes.set_title(f"{place[1]}, {place[0]}", loc="left")
    drawn[-1].set_xlabel("ms a token")
    draw.legend(canvas, drawn[0])


SECTION = Section(
    name=NAME,
    title="Ablations",
    question="What are fused graphs worth, and where does a step's time go?",
    source="EAGLE-Pangu, fused against eager execution by budget, stages in performance and reference mode",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    given=any_bundle,
)
