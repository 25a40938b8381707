"""Two ways of computing a teacher's step, side by side: texts decoded plainly and with a tree, steps by their rows.

What `bitwise` (two engines) and `quantised` (two precisions) have in common.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from draftwood.tools.evaluate import asked, draw
from draftwood.tools.evaluate.lab import Lab, Opened
from draftwood.tools.evaluate.protocol import PLAIN, Way, median_seconds, warm_up
from draftwood.tools.evaluate.protocol import measure as measured
from draftwood.tools.evaluate.section import Row, Table, Task
from draftwood.tools.evaluate.spread import ratio
from draftwood.tools.evaluate.suite import Ask
from draftwood.tools.measure import w8a8

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Both of a pair by name, the one that the other is held against first.
Pair = Mapping[str, Opened]

PROMPTS = 4
TREE = "tree"
INKS = (draw.OTHERS[0], draw.OTHERS[3], draw.OTHERS[5])  # of sizes
TOKEN_SECONDS = {"native": 0.03, "110m": 0.25, "500m": 1.0}


def tasks_of(name: str, ask: Ask) -> Iterator[Task]:
    """A prompt at a size and a temperature, for a drafter."""
    for size, drafter, temperature in product(ask.sizes, ask.drafters, ask.temperatures):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            at = {"size": size, "drafter": drafter, "temperature": temperature, "prompt": prompt}
            yield Task(name, at, TOKEN_SECONDS[size] * ask.max_new_tokens)


def ids_of(task: Task, ask: Ask, lab: Lab, pair: Pair) -> list[int]:
    """The task's prompt."""
    return asked.ids_of(asked.prompt_of(task, ask, lab, PROMPTS), next(iter(pair.values())).engine)


def ways_of(name: str, one: Opened) -> dict[str, Way]:
    """Plain decoding and the bundle's tree."""
    gear = next(gear.name for gear in one.engine.bundle.manifest.gears if gear.draft)
    return {
        f"{PLAIN} {name}": Way(one.engine, one.policies(PLAIN)),
        f"{name} {TREE}": Way(one.engine, one.policies(gear)),
    }


def prepare(task: Task, ask: Ask, lab: Lab, pair: Pair) -> None:
    """Decodes a text with each way of both once."""
    place = (task.section, task.at["size"], task.at["drafter"])
    if lab.warmed != place:
        for name, one in pair.items():
            warm_up(ways_of(name, one), ids_of(task, ask, lab, pair), asked.options_of(task, ask, lab))
        lab.warmed = place


def measure(task: Task, ask: Ask, lab: Lab, pair: Pair) -> dict[str, Any]:
    """The prompt with both, one after the other, the order alternating; then steps of both, in turns."""
    number, ids = task.at["prompt"], ids_of(task, ask, lab, pair)
    names = list(pair)[:: -1 if number % 2 else 1]
    turns = []
    for name in names:
        found, _ = measured(ways_of(name, pair[name]), ids, asked.options_of(task, ask, lab), ask.rounds, number)
        turns.append({"of": name, "ways": found})
    steps: dict[str, list[dict[int, float]]] = {name: [] for name in pair}
    for name in (*names, *names[::-1]):
        steps[name].append(w8a8.step_ms(pair[name].engine))
    ms = {name: {rows: min(one[rows] for one in held) for rows in held[0]} for name, held in steps.items()}
    digests = {name: one.digest[:16] for name, one in pair.items()}
    return {"turns": turns, "step_ms": ms, "bundles": digests}


def places_of(rows: Sequence[Row]) -> dict[tuple[str, str, float], list[Row]]:
    """Rows by size, drafter and temperature."""
    found: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        at = row["at"]
        found.setdefault((at["size"], at["drafter"].removeprefix("demo-"), at["temperature"]), []).append(row)
    return found


def figures_of(rows: Sequence[Row], name: str, way: str) -> list[dict[str, Any]]:
    """The figures of one of a pair: of its plain decoding (`PLAIN`) or its tree (`TREE`), a text each."""
    full = f"{PLAIN} {name}" if way == PLAIN else f"{name} {way}"
    return [held["ways"][full] for row in rows for held in row["found"]["turns"] if held["of"] == name]


def seconds_of(rows: Sequence[Row], name: str, way: str) -> list[float]:
    """Medians of the rounds, a text each."""
    return [median_seconds(figures) for figures in figures_of(rows, name, way)]


def texts_table(rows: Sequence[Row], names: Sequence[str], note: str) -> Table:
    """Tokens a second and speed-ups of both."""
    lines, sources = [], []
    for place, own in places_of(rows).items():
        first = seconds_of(own, names[0], PLAIN)
        for name in names:
            plain, tree = seconds_of(own, name, PLAIN), seconds_of(own, name, TREE)
            trees = figures_of(own, name, TREE)
            tokens = sum(figures["tokens"] - 1 for figures in trees)
            ties = sum(figures.get("difference", {}).get("tie", False) for figures in trees)
            same = f"{sum(figures['equal'] for figures in trees)} of {len(trees)}"
            speeds = [round(tokens / sum(side), 1) for side in (plain, tree)]
            length = round(tokens / sum(figures["steps"] for figures in trees), 2)
            lines.append([*place, name, same, ties, *speeds, length, ratio(plain, tree), ratio(first, plain)])
            sources.append([row["key"] for row in own])
    columns = (
        *("size", "drafter", "temperature", "with", "same text", "ties", "plain tokens/s", "tree tokens/s"),
        *("accept length", "speed-up over its plain (95 %)", f"plain over {names[0]}'s plain (95 %)"),
    )
    return Table("Texts", columns, lines, sources, note)


def step_ms(rows: Sequence[Row], size: str, name: str) -> dict[int, float]:
    """Milliseconds of a step by its rows, the median over a size's texts."""
    held = [row["found"]["step_ms"][name] for row in rows if row["at"]["size"] == size]
    return {int(count): statistics.median(one[count] for one in held) for count in held[0]}


def sizes_of(rows: Sequence[Row]) -> list[str]:
    """In the order of the run."""
    return list(dict.fromkeys(row["at"]["size"] for row in rows))


def steps_table(rows: Sequence[Row], names: tuple[str, str]) -> Table:
    """A step of both by its rows, and over one row of the same."""
    lines, sources = [], []
    for size in sizes_of(rows):
        first, second = (step_ms(rows, size, name) for name in names)
        for count in first:
            ms = [round(first[count], 3), round(second[count], 3), round(second[count] / first[count], 3)]
            over_one = [round(side[count] / side[min(side)], 2) for side in (first, second)]
            lines.append([size, count, *ms, *over_one])
            sources.append([row["key"] for row in rows if row["at"]["size"] == size])
    columns = ("size", "rows", *(f"{name} ms" for name in names), f"{names[1]} over {names[0]}")
    columns += tuple(f"{name}, over one row" for name in names)
    note = f"Chains behind {w8a8.TEXT} tokens; of a text the best of ten, over texts the median."
    return Table("A step by its rows", columns, lines, sources, note)


def by_rows(axes: Axes, counts: Sequence[int]) -> None:
    """Rows of a step along the axis, doubling."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set(xlabel="rows of a step, the root counted")
