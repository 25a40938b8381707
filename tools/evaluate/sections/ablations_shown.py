"""What `ablations` shows: engines beside each other with their stages, and trees of equal rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.tools.evaluate import draw
from draftwood.tools.evaluate.protocol import PLAIN, median_seconds
from draftwood.tools.evaluate.section import Block, Figure, Row, Table
from draftwood.tools.evaluate.sections.shapes import points_of
from draftwood.tools.evaluate.spread import ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ENGINES, TREES = "engines", "trees"
# Engines, by what they stand for in EAGLE-Pangu's terms.
MODES = {"cpu": "performance", "static": "static graphs", "eager": "reference"}
FIXED, BUDGET, PLANNED = "fixed binary tree", "EAGLE-2's budget", "planned"
STAGES = ("draft", "verify", "accept and commit", "host")

Place = tuple[str, str]


def show(rows: list[Row]) -> Iterator[Block]:
    """Engines, their stages, trees."""
    engines, trees = ([row for row in rows if row["at"]["ablation"] == kind] for kind in (ENGINES, TREES))
    if engines:
        yield _engines(engines)
        yield Figure(
            "stages-by-mode", "Where a token's time goes, fused and eager", partial(_draw_stages, engines),
            [row["key"] for row in engines], size=(7.2, 0.9 + 1.5 * len(_places(engines))),
            note="Performance mode is the CPU's engine, one fused graph for every size; static graphs are those of an"
            " accelerator, padded, on onnxruntime; reference mode is eager PyTorch. One bundle, one tree.",
        )  # fmt: skip
    if trees:
        yield Figure(
            "trees-of-equal-rows", "Trees of equal rows", partial(_draw_trees, trees), [row["key"] for row in trees]
        )
        yield _trees(trees)


def _places(rows: Sequence[Row]) -> dict[Place, list[Row]]:
    found: dict[Place, list[Row]] = {}
    for row in rows:
        found.setdefault((row["at"]["size"], row["at"]["drafter"].removeprefix("demo-")), []).append(row)
    return found


def _way(engine: str, policy: str) -> str:
    return PLAIN if (engine, policy) == ("cpu", PLAIN) else f"{engine} {policy}"


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


def _trees(rows: list[Row]) -> Table:
    points = [point for point in points_of(rows) if point.way != PLAIN]
    lines = [
        [point.size, point.drafter, point.way, point.rows, round(point.tokens_a_step, 3), round(point.ms_a_step, 3),
         point.speedup]
        for point in points
    ]  # fmt: skip
    columns = ("size", "drafter", "tree", "rows", "accept length", "ms a step", "speed-up (95 %)")
    note = (
        "The fixed tree gives every node two candidates, level by level; the budget's shape is chosen by the drafter at"
        " every step (EAGLE-2; of drafters whose candidates depend on the nodes above); the planned one was found"
        " ahead of time over counted paths, none of them of these prompts."
    )
    return Table("Fixed, budget and planned trees", columns, lines, [point.keys for point in points], note)


def _draw_trees(rows: list[Row], canvas: Canvas) -> None:
    points = [point for point in points_of(rows) if point.way != PLAIN]
    drafters = list(dict.fromkeys(point.drafter for point in points))
    ways = [way for way in (FIXED, BUDGET, PLANNED) if any(point.way == way for point in points)]
    left, right = draw.panels(canvas, ["accept length", "speed-up"], share_y=False)
    for at, (way, ink) in enumerate(zip(ways, draw.OTHERS, strict=False)):
        own = {point.drafter: point for point in points if point.way == way}
        here = [drafters.index(drafter) + 0.27 * (at - (len(ways) - 1) / 2) for drafter in own]
        for axes, values in (
            (left, [point.tokens_a_step for point in own.values()]),
            (right, [point.speedup.value for point in own.values()]),
        ):
            bars = axes.bar(here, values, 0.25, color=ink, label=way)
            axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            axes.set_xticks(range(len(drafters)), drafters)
            axes.margins(y=0.12)
            axes.grid(axis="x", visible=False)
    left.set(ylabel="tokens a step")
    right.set(ylabel="times plain decoding")
    draw.equal_speed(right)
    draw.legend(canvas, left, 3)
