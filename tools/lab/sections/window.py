"""EAGLE-Pangu's truncation: a drafter that sees the last W tokens alone, behind a teacher that sees all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.prefilled import Prefilled
from draftwood.tools.lab.runner import PLAIN, Way, median_seconds, warm_up
from draftwood.tools.lab.runner import measure as measured
from draftwood.tools.lab.section import CACHED, Block, Row, Section, Table, Task, grouped
from draftwood.tools.lab.spread import ratio
from draftwood.tools.lab.suite import Ask, Suite

NAME = "window"
TEXTS = 4


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A text of a length, with a drafter of every window."""
    drafters = [drafter for drafter in ask.drafters if drafter in CACHED]
    for size, drafter, length in product(ask.sizes, drafters, ask.lengths):
        for text in range(ask.limit_of(size) or TEXTS):
            yield Task(NAME, {"size": size, "drafter": drafter, "length": length, "text": text})


def _ways(task: Task, ask: Ask, lab: Lab) -> tuple[dict[str, Way], list[int]]:
    """Plain decoding, then the same tree with each window, 0 for all."""
    size, drafter, reach = task.at["size"], task.at["drafter"], max(ask.lengths) + ask.max_new_tokens
    opened = {window: lab.windowed(size, drafter, window, reach) for window in ask.windows}
    first = next(iter(opened.values()))
    _, ids = lab.text(first.engine, task.at["length"], task.at["text"])
    gears = first.engine.bundle.manifest.gears
    slots = min(gear.slots for gear in gears if gear.slots > len(ids) + 1)
    gear = next(gear.name for gear in gears if gear.draft and gear.slots == slots)
    behind = {window: Prefilled(one.engine, np.array(ids, np.int64), slots) for window, one in opened.items()}
    ways = {PLAIN: Way(next(iter(behind.values())), first.policies(PLAIN))}
    return ways | {str(window): Way(behind[window], one.policies(gear)) for window, one in opened.items()}, ids


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundles and decodes a text with each."""
    if lab.enters(NAME, task.at["size"], task.at["drafter"], task.at["length"]):
        warm_up(*_ways(task, ask, lab), lab.options(ask, 0.0))


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The text with every window."""
    ways, ids = _ways(task, ask, lab)
    found, _ = measured(ways, ids, lab.options(ask, 0.0), ask.rounds, task.at["text"])
    return {"prompt_tokens": len(ids), "ways": found}


def show(rows: list[Row]) -> Iterator[Block]:
    """Accept length and speed-up by window."""
    lines = []
    for place, own in grouped(rows, "size", "drafter", "length").items():
        plain = [median_seconds(row["found"]["ways"][PLAIN]) for row in own]
        for window in sorted((int(w) for w in own[0]["found"]["ways"] if w != PLAIN), key=lambda w: w or 1 << 30):
            figures = [row["found"]["ways"][str(window)] for row in own]
            gained = sum(one["tokens"] - 1 for one in figures) / sum(one["steps"] for one in figures)
            gain = ratio(plain, [median_seconds(one) for one in figures])
            lines.append([*place, window or "all", round(gained, 3), gain])
    note = "EAGLE-Pangu found a loss: at W = 128 its accept length fell from 3.17 to 1.48, to 0.69 of plain speed."
    columns = ("size", "drafter", "tokens before", "window W", "accept length", "speed-up (95 %)")
    yield Table("Window of the drafter", columns, lines, note)


SECTION = Section(
    name=NAME,
    title="Drafter window",
    question="May the drafter forget what lies far back?",
    source="EAGLE-Pangu, drafter-only truncation at W = 128, 256, 512",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
