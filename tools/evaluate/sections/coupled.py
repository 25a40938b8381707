"""Drafts that share the teacher's noise against drafts that do not: tokens a step of sampled text, at 16 rows.

A task is a prompt at a temperature. Tokens do not depend on the clock, so one round does; texts must be plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from draftwood.runtime.bundle import Bundle
from draftwood.tools.demo import counted
from draftwood.tools.evaluate import asked, draw
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.noises import NoNoise, OtherNoise
from draftwood.tools.evaluate.protocol import PLAIN, Way, warm_up
from draftwood.tools.evaluate.protocol import measure as measured
from draftwood.tools.evaluate.section import Block, Figure, Row, Section, Table, Task
from draftwood.tools.evaluate.spread import Interval, ratio
from draftwood.tools.evaluate.suite import Ask, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "coupled"
PROMPTS = 24
MOST_ROWS = 16
COUPLED, UNCOUPLED, GREEDYS = "coupled", "uncoupled", "uncoupled, greedy text's tree"
# Tokens a step that were set out for, at 0.8; at 1.0 they are within 15 %.
GOALS = {"eagle3": 3.0, "fasteagle": 2.5, "medusa": 1.8}
SHARE = {0.8: 1.0, 1.0: 0.85}
TOKEN_SECONDS = {"native": 0.006, "110m": 0.04, "500m": 0.2}


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """See `asked.tasks_of`."""
    return asked.tasks_of(NAME, ask, PROMPTS, TOKEN_SECONDS)


def likeliest_gear(bundle: Bundle, drafter: str, sampled: bool) -> str:
    """The gear of at most `MOST_ROWS` rows whose tree promises most tokens a step by the counted paths."""
    paths = counted(drafter, sampled=sampled).rank_paths()
    slots = min(gear.slots for gear in bundle.manifest.gears)
    fits = [
        gear
        for gear in bundle.manifest.gears
        if gear.draft and gear.slots == slots and gear.tree in bundle.trees
        and bundle.trees[gear.tree][0].rows <= MOST_ROWS
    ]  # fmt: skip
    return max(fits, key=lambda gear: paths.expected_accept_length(bundle.trees[gear.tree][0])).name


def ways_of(lab: Lab, ask: Ask, size: str, temperature: float) -> dict[str, Way]:
    """Plain decoding, then every drafter with and without the noise; without it also by the tree for greedy text.

    Greedy text has no noise: there every drafter decodes by its tree alone.
    """
    found: dict[str, Way] = {}
    for drafter in ask.drafters:
        one = lab.planned(size, drafter)
        found = found or {PLAIN: Way(one.engine, one.policies(PLAIN))}
        name, alone = drafter.removeprefix("demo-"), OtherNoise(one.engine, NoNoise(one.engine.bundle))
        tree, greedys = (likeliest_gear(one.engine.bundle, drafter, sampled) for sampled in (True, False))
        found[f"{name} {COUPLED}"] = Way(one.engine, one.policies(tree if temperature else greedys))
        if not temperature:
            continue
        found[f"{name} {UNCOUPLED}"] = Way(alone, one.policies(tree))
        if greedys != tree:
            found[f"{name} {GREEDYS}"] = Way(alone, one.policies(greedys))
    return found


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundles of the size, and decodes a text with each way once."""
    place = (NAME, task.at["size"], task.at["temperature"])
    if lab.warmed != place:
        ways = ways_of(lab, ask, *place[1:])
        warm_up(ways, _ids(task, ask, lab, ways), asked.options_of(task, ask, lab, ignore_eos=False))
        lab.warmed = place


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The prompt with every way, once."""
    ways = ways_of(lab, ask, task.at["size"], task.at["temperature"])
    ids, options = _ids(task, ask, lab, ways), asked.options_of(task, ask, lab, ignore_eos=False)
    found, _ = measured(ways, ids, options, 1, task.at["prompt"])
    digests = {drafter: lab.planned(task.at["size"], drafter).digest[:16] for drafter in ask.drafters}
    return {"ways": found, "bundles": digests}


def _ids(task: Task, ask: Ask, lab: Lab, ways: dict[str, Way]) -> list[int]:
    return asked.ids_of(asked.prompt_of(task, ask, lab, PROMPTS), ways[PLAIN].engine)


@dataclass(frozen=True, slots=True)
class Line:
    """A drafter's way at a place: tokens a step over all texts."""

    size: str
    temperature: float
    drafter: str
    way: str
    same: str
    tokens_a_step: Interval
    keys: list[str]

    @property
    def place(self) -> tuple[str, float]:
        return self.size, self.temperature

    @property
    def goal(self) -> float | None:
        """Of coupled drafts, where one was set out for."""
        known = self.way == COUPLED and self.temperature in SHARE and self.drafter in GOALS
        return round(GOALS[self.drafter] * SHARE[self.temperature], 2) if known else None


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """Every drafter and way at every place; a text without a step counts nowhere."""
    found = []
    for place in dict.fromkeys((row["at"]["size"], row["at"]["temperature"]) for row in rows):
        own = [row for row in rows if (row["at"]["size"], row["at"]["temperature"]) == place]
        own = [row for row in own if row["found"]["ways"][PLAIN]["steps"]]
        for name in (name for name in own[0]["found"]["ways"] if name != PLAIN) if own else ():
            drafter, _, way = name.partition(" ")
            figures = [row["found"]["ways"][name] for row in own]
            same = f"{sum(one['equal'] for one in figures)} of {len(figures)}"
            gained = ratio([one["tokens"] - 1 for one in figures], [one["steps"] for one in figures])
            found.append(Line(*place, drafter, way, same, gained, [row["key"] for row in own]))
    return found


def show(rows: list[Row]) -> Iterator[Block]:
    """Tokens a step with and without the noise, beside the goals."""
    lines = lines_of(rows)
    if not lines:
        return
    keys = sorted({key for line in lines for key in line.keys})
    yield Figure(
        "coupled", "Tokens a step of sampled text, with the teacher's noise and without", partial(_draw, lines), keys,
        note="Lines: 95 % of a bootstrap over texts. Short strokes: the goals.",
    )  # fmt: skip
    cells = [
        [line.size, line.temperature, line.drafter, line.way, line.same, line.tokens_a_step, line.goal]
        for line in lines
    ]
    columns = ("size", "temperature", "drafter", "drafts", "same text", "tokens a step (95 %)", "goal")
    note = (
        f"Trees of at most {MOST_ROWS} rows, the likeliest by paths counted on other text: of sampled text with"
        " shared noise, or of greedy text. Without the noise a drafter proposes its most probable tokens."
    )
    yield Table("Coupled against uncoupled drafts", columns, cells, [line.keys for line in lines], note)


def _draw(lines: list[Line], canvas: Canvas) -> None:
    places = list(dict.fromkeys(line.place for line in lines))
    titles = [f"{size}, temperature {temperature:g}" for size, temperature in places]
    for axes, place in zip(draw.panels(canvas, titles), places, strict=True):
        own = [line for line in lines if line.place == place][::-1]
        for at, line in enumerate(own):
            ink, held = draw.colour(line.drafter), line.tokens_a_step
            axes.plot((held.low, held.high), (at, at), color=ink, linewidth=1.4)
            axes.plot(held.value, at, "o", color=ink, markersize=5.5,
                      markerfacecolor=ink if line.way == COUPLED else "none")  # fmt: skip
            axes.annotate(f"{held.value:.2f}", (held.value, at), xytext=(0, 6), textcoords="offset points",
                          ha="center", fontsize=8, color=ink)  # fmt: skip
            if line.goal:
                axes.plot((line.goal, line.goal), (at - 0.35, at + 0.35), color=draw.INK, linewidth=1.6)
        axes.set_yticks(range(len(own)), [f"{line.drafter} {line.way}" for line in own])
        axes.set(xlabel="tokens a step", xlim=(1, None))
        axes.margins(x=0.16, y=0.08)
        axes.grid(axis="y", visible=False)


SECTION = Section(
    name=NAME,
    title="Coupled drafts",
    question="What do drafts gain by seeing the noise that the teacher draws with?",
    source="Draftwood; Gumbel coupling (arXiv 2408.07978)",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
