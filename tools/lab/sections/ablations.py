"""Fused graphs against eager PyTorch, with a step's stages: EAGLE-Pangu's performance and reference modes.

One bundle and one tree, on the CPU's engine, on static graphs as an accelerator runs them, and on the eager reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.tools.lab import draw
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.runner import PLAIN, Way, median_seconds, warm_up
from draftwood.tools.lab.runner import measure as measured
from draftwood.tools.lab.section import Block, Figure, Row, Section, Table, Task, any_bundle, seconds_of
from draftwood.tools.lab.spread import ratio
from draftwood.tools.lab.suite import Ask, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "ablations"
PROMPTS = 4
TOKEN_SECONDS = {"native": 0.03, "110m": 0.25, "500m": 1.2}
# Engines, by what they stand for in EAGLE-Pangu's terms.
MODES = {"cpu": "performance", "static": "static graphs", "eager": "reference"}
STAGES = ("draft", "verify", "accept and commit", "host")

Place = tuple[str, str]


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt on every engine at every size."""
    for size, drafter in product(ask.sizes, ask.drafters):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            at = {"size": size, "drafter": drafter, "prompt": prompt}
            yield Task(NAME, at, seconds_of(TOKEN_SECONDS, size) * ask.max_new_tokens * ask.rounds)


def _way(engine: str, policy: str) -> str:
    return PLAIN if (engine, policy) == ("cpu", PLAIN) else f"{engine} {policy}"


def ways_of(task: Task, lab: Lab) -> dict[str, Way]:
    """Plain decoding and the tree that promises most, on every engine; the CPU's plain decoding first."""
    opened = lab.planned(task.at["size"], task.at["drafter"])
    return {
        _way(engine, policy): Way(lab.on(opened, engine), opened.policies(policy))
        for engine, policy in product(MODES, (PLAIN, "tree"))
    }


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens bundle and engines and decodes a text with each way once."""
    place = (NAME, task.at["size"], task.at["drafter"])
    if lab.warmed != place:
        warm_up(ways_of(task, lab), _ids(task, ask, lab), lab.options(ask, 0.0))
        lab.warmed = place


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The prompt with every way; answers go on past the end token."""
    options, opened = lab.options(ask, 0.0), lab.planned(task.at["size"], task.at["drafter"])
    found, _ = measured(ways_of(task, lab), _ids(task, ask, lab), options, ask.rounds, task.at["prompt"])
    return {"ways": found, "tree": opened.tree, "bundle": opened.digest[:16]}


def _ids(task: Task, ask: Ask, lab: Lab) -> list[int]:
    prompt = lab.prompt(task.at["prompt"], ask.limit_of(task.at["size"]) or PROMPTS)
    return lab.planned(task.at["size"], task.at["drafter"]).ids(prompt)


def show(rows: list[Row]) -> Iterator[Block]:
    """Engines and their stages."""
    yield _engines(rows)
    yield Figure(
        "stages-by-mode", "Where a token's time goes, fused and eager", partial(_draw_stages, rows),
        [row["key"] for row in rows], size=(7.2, 0.9 + 1.5 * len(_places(rows))),
        note="Performance mode is the CPU's engine, one fused graph for every size; static graphs are those of an"
        " accelerator, padded, on onnxruntime; reference mode is eager PyTorch. One bundle, one tree.",
    )  # fmt: skip


def _places(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    found: dict[Place, list[Row]] = {}
    for row in rows:
        found.setdefault((row["at"]["size"], row["at"]["drafter"].removeprefix("demo-")), []).append(row)
    return found


def _engines(rows: list[Row]) -> Table:
    lines, keys = [], []
    for place, own in _places(rows).items():
        for engine, mode in MODES.items():
            plain, tree = ([row["found"]["ways"][_way(engine, policy)] for row in own] for policy in (PLAIN, "tree"))
            fused = [median_seconds(row["found"]["ways"]["cpu tree"]) for row in own]
            seconds = [median_seconds(one) for one in tree]
            equal = sum(one["equal"] for one in (*plain, *tree))
            gained = sum(one["tokens"] - 1 for one in tree)
            lines.append([
                *place, engine, mode, f"{equal} of {2 * len(own)}",
                *(round(gained / sum(map(median_seconds, side)), 1) for side in (plain, tree)),
                round(gained / sum(one["steps"] for one in tree), 3),
                ratio([median_seconds(one) for one in plain], seconds), ratio(seconds, fused),
            ])  # fmt: skip
            keys.append([row["key"] for row in own])
    columns = ("size", "drafter", "engine", "mode", "same text", "plain tokens/s", "tokens/s", "accept length",
               "over its own plain (95 %)", "time over fused (95 %)")  # fmt: skip
    note = "The same texts from the same bundle: what is fused changes the time, neither tokens nor accept length."
    return Table("Fused graphs against eager execution", columns, lines, keys, note)


def _ms_a_token(figures: Sequence[dict[str, Any]], stage: str) -> float:
    return sum(one["stages_us"][stage] for one in figures) / 1e3 / sum(one["tokens"] - 1 for one in figures)


def _draw_stages(rows: list[Row], canvas: Canvas) -> None:
    places = _places(rows)
    drawn = canvas.subplots(len(places), 1, squeeze=False)[:, 0]
    ways = [(engine, policy) for policy in ("tree", PLAIN) for engine in reversed(MODES)]
    for axes, (place, own) in zip(drawn, places.items(), strict=True):
        left = np.zeros(len(ways))
        for stage, ink in zip(STAGES, draw.OTHERS, strict=False):
            figures = [[row["found"]["ways"][_way(*way)] for row in own] for way in ways]
            ms = np.array([_ms_a_token(one, stage) for one in figures])
            axes.barh(range(len(ways)), ms, left=left, color=ink, label=stage, height=0.7)
            left += ms
        draw.label_bars(axes, left.tolist())
        axes.set_title(f"{place[1]}, {place[0]}", loc="left")
        axes.set_yticks(range(len(ways)), [f"{MODES[engine]}, {policy}" for engine, policy in ways])
        axes.set_xlim(0, 1.12 * left.max())
        axes.grid(axis="y", visible=False)
    drawn[-1].set_xlabel("ms a token")
    draw.legend(canvas, drawn[0])


SECTION = Section(
    name=NAME,
    title="Ablations",
    question="What are fused graphs worth, and where does a step's time go?",
    source="EAGLE-Pangu, fused against eager execution, stages in performance and reference mode",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    given=any_bundle,
)
