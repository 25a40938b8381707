"""The engine whose rows have plain decoding's bits (``--bitwise``) against the ordinary one: bits, ties, cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from draftwood.tools.evaluate import asked, draw
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.section import Block, Figure, Row, Section, Table, Task
from draftwood.tools.evaluate.sections import pairs
from draftwood.tools.evaluate.suite import Ask, Suite
from draftwood.tools.measure import bits

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "bitwise"
ORDINARY, BITWISE = NAMES = ("ordinary", "bitwise")
# Behind so many new tokens of a text every row of every step is held against plain decoding of its own path.
COUNTED = 6
KINDS = {
    "root": "root",
    "principal": "ancestors in\nconsecutive slots",
    "other": "other",
    "prompt": "last of\na prompt",
}


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """See `pairs.tasks_of`."""
    return pairs.tasks_of(NAME, ask)


def _pair(task: Task, lab: Lab) -> pairs.Pair:
    return {name: lab.bitwise(task.at["size"], task.at["drafter"], name == BITWISE) for name in NAMES}


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle with both engines, and decodes a text with each."""
    pairs.prepare(task, ask, lab, _pair(task, lab))


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Texts and steps of both engines, and how many rows have the bits of plain decoding."""
    pair = _pair(task, lab)
    found = pairs.measure(task, ask, lab, pair)
    ids, sampling = pairs.ids_of(task, ask, lab, pair), asked.options_of(task, ask, lab).sampling
    counts = {}
    for name, one in pair.items():
        gear = next(gear for gear in one.engine.bundle.manifest.gears if gear.draft)
        counts[name] = bits.measure(one.engine, [ids], sampling, gear, COUNTED)
    return found | {"bits": counts}


def show(rows: list[Row]) -> Iterator[Block]:
    """Bits by the kind of row, the cost by rows, and texts."""
    keys = [row["key"] for row in rows]
    yield Figure("bitwise", "Rows that have plain decoding's bits, and what that costs", partial(_draw, rows), keys)
    yield _bits(rows)
    yield pairs.texts_table(rows, NAMES, "Each engine's texts are held against its own plain decoding.")
    yield pairs.steps_table(rows, NAMES)


def counted(rows: list[Row], size: str, engine: str, kind: str) -> dict[str, float]:
    """Rows of a kind over all texts of a size; how many have the bits of a plain step, and how far off others are."""
    held = [row["found"]["bits"][engine][kind] for row in rows if row["at"]["size"] == size]
    sums = {of: sum(one[of] for one in held) for of in ("rows", "equal_one", "equal_two")}
    return sums | {"apart": max(one["apart"] for one in held)}


def _bits(rows: list[Row]) -> Table:
    lines, sources = [], []
    for size in pairs.sizes_of(rows):
        for engine in NAMES:
            for kind, words in KINDS.items():
                count = counted(rows, size, engine, kind)
                whole = [int(count[of]) for of in ("rows", "equal_one", "equal_two")]
                lines.append([size, engine, words.replace("\n", " "), *whole, float(f"{count['apart']:.1e}")])
                sources.append([row["key"] for row in rows if row["at"]["size"] == size])
    columns = ("size", "engine", "row", "of", "as a step of one row", "as a row beside an idle one", "apart at most")
    note = "Every row of every step, accepted or not, against plain decoding of its own path; apart is in logits."
    return Table("Rows with the bits of plain decoding", columns, lines, sources, note)


def _draw(rows: list[Row], canvas: Canvas) -> None:
    left, right = draw.panels(canvas, ["rows with plain decoding's bits", "time of a step"], share_y=False)
    sizes = pairs.sizes_of(rows)
    for number, engine in enumerate(NAMES):
        counts = [[counted(rows, size, engine, kind) for size in sizes] for kind in KINDS]
        shares = [100 * sum(c["equal_one"] for c in of) / max(sum(c["rows"] for c in of), 1) for of in counts]
        at = [place + 0.4 * (number - 0.5) for place in range(len(KINDS))]
        left.bar(at, shares, 0.38, color=draw.OTHERS[2 - 2 * number], label=engine)
        for x, share in zip(at, shares, strict=True):
            left.annotate(f"{share:.0f}", (x, share), ha="center", va="bottom", fontsize=8)
    left.set_xticks(range(len(KINDS)), list(KINDS.values()), fontsize=7)
    left.set(ylabel="%, of plain steps of one row", ylim=(0, 132), yticks=range(0, 101, 20))
    left.grid(axis="x", visible=False)
    for size, ink in zip(sizes, pairs.INKS, strict=False):
        first, second = (pairs.step_ms(rows, size, name) for name in NAMES)
        right.plot(list(first), [second[n] / first[n] for n in first], color=ink, marker="o", markersize=4, label=size)
        pairs.by_rows(right, list(first))
    draw.equal_speed(right)
    right.set(ylabel="bitwise over ordinary")
    left.legend(fontsize=8, loc="upper left", ncols=2)
    right.legend(fontsize=8)


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
