"""A teacher in W8A8 against fp32, the same drafter before both: tokens a second, and what rows of a step cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from draftwood.tools.evaluate import draw
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.protocol import PLAIN
from draftwood.tools.evaluate.section import Block, Figure, Row, Section, Task
from draftwood.tools.evaluate.sections import pairs
from draftwood.tools.evaluate.spread import ratio
from draftwood.tools.evaluate.suite import Ask, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "quantised"
NAMES = ("fp32", "w8a8")


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """See `pairs.tasks_of`."""
    return pairs.tasks_of(NAME, ask)


def _pair(task: Task, lab: Lab) -> pairs.Pair:
    return {name: lab.precise(task.at["size"], task.at["drafter"], name) for name in NAMES}


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens a bundle of each precision, and decodes a text with each."""
    pairs.prepare(task, ask, lab, _pair(task, lab))


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Texts and steps of both precisions."""
    return pairs.measure(task, ask, lab, _pair(task, lab))


def show(rows: list[Row]) -> Iterator[Block]:
    """Speed by precision, with and without drafts, and steps by their rows."""
    keys = [row["key"] for row in rows]
    yield Figure("quantised", "W8A8 against fp32", partial(_draw, rows), keys)
    note = (
        "A precision's texts are held against its own plain decoding, for a rounded teacher is another model. It is"
        " calibrated with the built-in prompts; at sizes other than native its weights hold zeros, so only times count."
    )
    yield pairs.texts_table(rows, NAMES, note)
    yield pairs.steps_table(rows, NAMES)


def _draw(rows: list[Row], canvas: Canvas) -> None:
    left, right = draw.panels(canvas, ["tokens a second", "verify over one row"], share_y=False)
    sizes = pairs.sizes_of(rows)
    bars = [("w8a8", PLAIN), ("fp32", pairs.TREE), ("w8a8", pairs.TREE)]
    for number, (name, way) in enumerate(bars):
        for place, size in enumerate(sizes):
            own = [row for row in rows if row["at"]["size"] == size]
            held = ratio(pairs.seconds_of(own, "fp32", PLAIN), pairs.seconds_of(own, name, way))
            at, label = place + 0.27 * (number - 1), f"{way}, {name}" if place == 0 else None
            left.bar(at, held.value, 0.25, color=draw.OTHERS[number], label=label)
            left.plot((at, at), (held.low, held.high), color=draw.INK, linewidth=1)
            left.annotate(f"{held.value:.2f}", (at, held.high), xytext=(0, 2), textcoords="offset points", ha="center",
                          fontsize=8)  # fmt: skip
    draw.equal_speed(left)
    left.set_xticks(range(len(sizes)), sizes)
    left.set(ylabel="times plain fp32")
    left.margins(y=0.35)
    left.legend(fontsize=8, loc="upper left")
    left.grid(axis="x", visible=False)
    for size, ink in zip(sizes, pairs.INKS, strict=False):
        for name, line in zip(NAMES, ("--", "-"), strict=True):
            ms = pairs.step_ms(rows, size, name)
            right.plot(list(ms), [one / ms[min(ms)] for one in ms.values()], line, color=ink, marker="o", markersize=4,
                       label=f"{size}, {name}")  # fmt: skip
            pairs.by_rows(right, list(ms))
    right.set(ylabel="steps of one row", ylim=(0, None))
    right.legend(fontsize=8)


SECTION = Section(
    name=NAME,
    title="Precision",
    question="What do int8 linear layers gain, plainly and with drafts?",
    source="Draftwood; LLM.int8 (arXiv 2208.07339), SmoothQuant (arXiv 2211.10438)",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
