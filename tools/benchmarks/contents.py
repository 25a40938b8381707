"""The content of a report: the first screen's three numbers and one picture, and the blocks of every section."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.tools.benchmarks import draw
from draftwood.tools.benchmarks.record import read_record
from draftwood.tools.benchmarks.registry import SECTIONS
from draftwood.tools.benchmarks.rows import decoded, differences, read_rows
from draftwood.tools.benchmarks.section import Block, Figure, Row, Section, gathered
from draftwood.tools.benchmarks.sections.lengths_shown import ADAPTIVE, cells_of
from draftwood.tools.benchmarks.sections.turn import total_speedup, turns_of
from draftwood.tools.measure.runner import is_plain
from draftwood.tools.measure.spread import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True, slots=True)
class Number:
    """One of the first screen's: the question, the figure, and its subject."""

    question: str
    value: str
    of: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """A section's blocks, and how many rows it has of those asked for."""

    section: Section
    blocks: list[Block]
    rows: list[Row]
    expected: int

    @property
    def busy(self) -> int:
        """How many of its rows were measured while others were busy."""
        return sum(row["load"]["busy"] for row in self.rows)


@dataclass(frozen=True, slots=True)
class Contents:
    """All of a report."""

    record: dict[str, Any]
    rows: list[Row]
    numbers: list[Number]
    picture: Figure | None
    chapters: list[Chapter]

    @property
    def complete(self) -> bool:
        """Whether all that the suite asks for is there."""
        return all(len(chapter.rows) >= chapter.expected for chapter in self.chapters)


@dataclass(frozen=True, slots=True)
class Gain:
    """One way's speed-up somewhere."""

    where: str
    way: str
    speedup: Interval


def contents(folder: Path) -> Contents:
    """The report of a folder as it is now; RequestError if it is none."""
    record, rows = read_record(folder), read_rows(folder)
    chapters = [_chapter(SECTIONS[name], record, rows) for name in SECTIONS if name in record["suite"]["sections"]]
    turns = [*_gains_of_turns(rows)]
    gains = [*turns, *_gains_of_lengths(rows)]
    picture = None
    if pictured := turns or gains:  # one picture for the first screen; lengths have theirs
        size = (7.2, 1.2 + 0.24 * len(pictured))
        picture = Figure("overview", "Speed-up over plain decoding", partial(_draw_overview, pictured), size)
    return Contents(record, rows, list(_numbers(rows, gains)), picture, chapters)


def _chapter(section: Section, record: dict[str, Any], rows: list[Row]) -> Chapter:
    import msgspec

    from draftwood.tools.benchmarks.suite import Suite

    suite = msgspec.convert(record["suite"], Suite)
    measured = [row for row in rows if row["section"] == section.name]
    try:
        tasks = sum(1 for _ in section.tasks(suite.sections[section.name], suite))
    except RequestError:  # the prompts are not here, as on another machine: what is shown comes from the rows
        tasks = len(measured)
    return Chapter(section, list(section.show(measured)) if measured else [], measured, tasks)


def _gains_of_turns(rows: list[Row]) -> Iterable[Gain]:
    turns = turns_of([row for row in rows if row["section"] == "turns"])
    drafted = (turn for turn in turns if not is_plain(turn.way))
    groups = gathered(drafted, lambda turn: (turn.model, turn.temperature, turn.way))
    for (model, temperature, way), group in groups.items():
        yield Gain(f"turns, {model}, T {temperature:g}", way, total_speedup(group))


def _gains_of_lengths(rows: list[Row]) -> Iterable[Gain]:
    for cell in cells_of([row for row in rows if row["section"] == "lengths"]):
        where = f"{cell.length} tokens, {cell.model}, T {cell.temperature:g}"
        yield Gain(where, f"{cell.bundle} adaptive", cell.speedup(ADAPTIVE))


def _numbers(rows: list[Row], gains: list[Gain]) -> Iterable[Number]:
    texts = list(decoded(rows))
    if texts:
        same = sum(text.figures["equal"] for text in texts)
        ties = sum(text.figures.get("difference", {}).get("tie", False) for text in texts)
        # Those of plain texts, of texts that shared launches and of ours beside other programs, too.
        wrong = sum(not difference["tie"] for difference in differences(rows))
        says = f"of {len(texts)} texts are plain decoding's, token for token" + (
            f"; {ties} more by a tie" if ties else ""
        )
        says += f"; {wrong} are NOT" if wrong else ""
        yield Number("Is it exact?", f"{100 * same / len(texts):.1f} %", says)
    default = [gain for gain in gains if gain.way.endswith("adaptive")] or gains
    if default:
        best, worst = (pick(default, key=lambda gain: gain.speedup.value) for pick in (max, min))
        yield Number("How much faster?", f"{best.speedup.value:.2f} x", _words(best, "at best"))
        yield Number("Where not?", f"{worst.speedup.value:.2f} x", _words(worst, "at worst"))


def _words(gain: Gain, rank: str) -> str:
    return f"{rank}: {gain.way}, {gain.where}; 95 % of {gain.speedup.low:.2f} to {gain.speedup.high:.2f}"


def _draw_overview(gains: list[Gain], canvas: Canvas) -> None:
    (axes,) = draw.panels(canvas, [""])
    ordered = gains[::-1]
    for at, gain in enumerate(ordered):
        filled = gain.way.endswith("adaptive")
        ink, value = draw.colour(gain.way), gain.speedup.value
        axes.plot((gain.speedup.low, gain.speedup.high), (at, at), color=ink, linewidth=1.4)
        axes.plot(value, at, "o", color=ink, markersize=5, markerfacecolor=ink if filled else "none")
        axes.annotate(f"{value:.2f}", (gain.speedup.high, at), xytext=(5, 0), textcoords="offset points", va="center",
                      fontsize=8, color=ink)  # fmt: skip
    draw.equal_speed(axes, across=False)
    axes.set_yticks(range(len(ordered)), [f"{gain.way}: {gain.where}" for gain in ordered], fontsize=8)
    axes.set(xlabel="times plain decoding's speed\nlines: 95 % of a bootstrap; hollow: one fixed tree")
    axes.margins(x=0.12, y=0.03)
    axes.grid(axis="y", visible=False)
