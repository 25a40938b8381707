"""The engine whose rows have plain decoding's bits (``--bitwise``) beside the ordinary one: bits, texts and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from draftwood.tools.lab import bits
from draftwood.tools.lab.opened import Lab, Opened
from draftwood.tools.lab.runner import PLAIN, Way, median_seconds, warm_up
from draftwood.tools.lab.runner import measure as measured
from draftwood.tools.lab.section import Block, Row, Section, Table, Task
from draftwood.tools.lab.spread import ratio
from draftwood.tools.lab.suite import Ask, Suite

NAME = "bitwise"
ORDINARY, BITWISE = NAMES = ("ordinary", "bitwise")
TREE = "tree"
PROMPTS = 4
# Behind so many new tokens of a text every row of every step is compared with plain decoding of its own path.
COUNTED = 6
KINDS = {
    "root": "root",
    "principal": "ancestors in consecutive slots",
    "other": "other",
    "prompt": "last of a prompt",
}
TOKEN_SECONDS = {"native": 0.03, "110m": 0.25, "500m": 1.0}


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt at a size and a temperature, for a drafter."""
    for size, drafter, temperature in product(ask.sizes, ask.drafters, ask.temperatures):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            at = {"size": size, "drafter": drafter, "temperature": temperature, "prompt": prompt}
            yield Task(NAME, at, TOKEN_SECONDS[size] * ask.max_new_tokens)


def _opened(task: Task, lab: Lab) -> dict[str, Opened]:
    return {name: lab.bitwise(task.at["size"], task.at["drafter"], name == BITWISE) for name in NAMES}


def _gear(one: Opened) -> Any:
    return next(gear for gear in one.engine.bundle.manifest.gears if gear.draft)


def _ways(name: str, one: Opened) -> dict[str, Way]:
    return {
        f"{PLAIN} {name}": Way(one.engine, one.policies(PLAIN)),
        f"{name} {TREE}": Way(one.engine, one.policies(_gear(one).name)),
    }


def _ids(task: Task, ask: Ask, lab: Lab, one: Opened) -> list[int]:
    return one.ids(lab.prompt(task.at["prompt"], ask.limit_of(task.at["size"]) or PROMPTS))


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle with both engines, and decodes a text with each."""
    place = (NAME, task.at["size"], task.at["drafter"])
    if lab.warmed != place:
        for name, one in _opened(task, lab).items():
            options = lab.options(ask, task.at["temperature"])
            warm_up(_ways(name, one), _ids(task, ask, lab, one), options)
        lab.warmed = place


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Texts of both engines, and how many rows have the bits of plain decoding; each engine has its own plain text."""
    options, opened = lab.options(ask, task.at["temperature"]), _opened(task, lab)
    turns, counts = [], {}
    for name, one in opened.items():
        ids = _ids(task, ask, lab, one)
        found, _ = measured(_ways(name, one), ids, options, ask.rounds, task.at["prompt"])
        turns.append({"of": name, "ways": found})
        counts[name] = bits.measure(one.engine, ids, options.sampling, _gear(one), COUNTED)
    return {"turns": turns, "bits": counts, "bundles": {name: one.digest[:16] for name, one in opened.items()}}


def show(rows: list[Row]) -> Iterator[Block]:
    """Bits by the kind of row, then texts."""
    yield _bits(rows)
    yield _texts(rows)


def _bits(rows: list[Row]) -> Table:
    lines, sources = [], []
    for size, engine in product(dict.fromkeys(row["at"]["size"] for row in rows), NAMES):
        own = [row for row in rows if row["at"]["size"] == size]
        for kind, words in KINDS.items():
            held = [row["found"]["bits"][engine][kind] for row in own]
            counts = [sum(one[of] for one in held) for of in ("rows", "equal", "redrawn")]
            lines.append([size, engine, words, *counts, float(f"{max(one['apart'] for one in held):.1e}")])
            sources.append([row["key"] for row in own])
    columns = ("size", "engine", "row", "rows", "with plain decoding's bits", "drawn otherwise", "apart at most")
    note = "Every row of every step, accepted or not, beside plain decoding of its own path; apart is in logits."
    return Table("Rows with the bits of plain decoding", columns, lines, sources, note)


def _texts(rows: list[Row]) -> Table:
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        at = row["at"]
        places.setdefault((at["size"], at["drafter"].removeprefix("demo-"), at["temperature"]), []).append(row)
    lines, sources = [], []
    for place, own in places.items():
        ordinary = _seconds(own, f"{PLAIN} {ORDINARY}")
        for name in NAMES:
            plain, tree, trees = (
                _seconds(own, f"{PLAIN} {name}"),
                _seconds(own, f"{name} {TREE}"),
                _held(own, f"{name} {TREE}"),
            )
            same = f"{sum(figures['equal'] for figures in trees)} of {len(trees)}"
            ties = sum(figures.get("difference", {}).get("tie", False) for figures in trees)
            lines.append([*place, name, same, ties, ratio(plain, tree), ratio(plain, ordinary)])
            sources.append([row["key"] for row in own])
    columns = (
        *("size", "drafter", "temperature", "engine", "same text", "ties", "speed-up over its plain (95 %)"),
        "plain decoding's time over the ordinary engine's (95 %)",
    )
    return Table("Texts", columns, lines, sources, "Each engine's texts are compared with its own plain decoding.")


def _held(rows: Sequence[Row], way: str) -> list[dict[str, Any]]:
    return [turn["ways"][way] for row in rows for turn in row["found"]["turns"] if way in turn["ways"]]


def _seconds(rows: Sequence[Row], way: str) -> list[float]:
    return [median_seconds(figures) for figures in _held(rows, way)]


SECTION = Section(
    name=NAME,
    title="Bits",
    question="How many rows have the bits of plain decoding, and what does it cost that all have?",
    source="Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
