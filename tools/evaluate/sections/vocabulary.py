"""How many tokens a drafter has to be able to propose: tokens a step by the size of a subset of its vocabulary.

The subset is of the tokens that are most frequent in the prompts of other conversations. A drafter keeps its output
matrix here, and what lies outside of the subset is ruled out before it ranks; what a smaller matrix saves is in the
model card, of drafters that were trained with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.bundle import Bundle
from draftwood.tools.evaluate import asked, draw
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.noises import OtherNoise, Subset
from draftwood.tools.evaluate.protocol import PLAIN, Way, warm_up
from draftwood.tools.evaluate.protocol import measure as measured
from draftwood.tools.evaluate.section import Block, Figure, Row, Section, Table, Task
from draftwood.tools.evaluate.sections.coupled import likeliest_gear
from draftwood.tools.evaluate.spread import Interval, ratio
from draftwood.tools.evaluate.suite import Ask, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from draftwood.tools.prompts import Prompt

NAME = "vocabulary"
PROMPTS = 12
WIDTHS = (256, 512, 1024, 2048, 4096)
ALL = "all"
TOKEN_SECONDS = {"native": 0.02, "110m": 0.15, "500m": 0.8}


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """See `asked.tasks_of`; every prompt with every subset."""
    return asked.tasks_of(NAME, ask, PROMPTS, TOKEN_SECONDS)


def by_frequency(bundle: Bundle, prompts: Sequence[Prompt]) -> NDArray[np.int64]:
    """All ids, those first that the prompts have most often; the others by id, as a BPE's merges come by frequency."""
    assert bundle.tokenizer is not None, "the demo teacher has a tokenizer"
    written = [token for prompt in prompts for token in bundle.tokenizer.encode(prompt.text)]
    counts = np.bincount(written, minlength=bundle.manifest.dims.vocabulary)
    return np.argsort(-counts, kind="stable")


def _ways(task: Task, ask: Ask, lab: Lab) -> tuple[dict[str, Way], list[int]]:
    """Plain decoding, then every drafter with all of its tokens and with each subset, by the tree for 16 rows."""
    opened = {drafter: lab.planned(task.at["size"], drafter) for drafter in ask.drafters}
    first, prompt = next(iter(opened.values())), asked.prompt_of(task, ask, lab, PROMPTS)
    others = [other for other in lab.prompts if other.conversation != prompt.conversation]
    ranked = by_frequency(first.engine.bundle, others)
    found = {PLAIN: Way(first.engine, first.policies(PLAIN))}
    for drafter, one in opened.items():
        bundle, name = one.engine.bundle, drafter.removeprefix("demo-")
        tree = one.policies(likeliest_gear(bundle, drafter, task.at["temperature"] > 0))
        found[f"{name} {ALL}"] = Way(one.engine, tree)
        for width in WIDTHS:
            found[f"{name} {width}"] = Way(OtherNoise(one.engine, Subset(bundle, ranked[:width])), tree)
    return found, asked.ids_of(prompt, first.engine)


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundles of the size, and decodes a text with each way once."""
    if lab.warmed != (NAME, task.at["size"]):
        warm_up(*_ways(task, ask, lab), asked.options_of(task, ask, lab, ignore_eos=False))
        lab.warmed = (NAME, task.at["size"])


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """The prompt with every way, once: tokens a step do not depend on the clock."""
    ways, ids = _ways(task, ask, lab)
    found, _ = measured(ways, ids, asked.options_of(task, ask, lab, ignore_eos=False), 1, task.at["prompt"])
    return {"ways": found, "vocabulary": ways[PLAIN].engine.bundle.manifest.dims.vocabulary}


Line = tuple[str, float, str, int, Interval, float, str, list[str]]


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """Size, temperature, drafter, subset, tokens a step, share of the whole vocabulary's, same texts, rows."""
    found: list[Line] = []
    for size, temperature in dict.fromkeys((row["at"]["size"], row["at"]["temperature"]) for row in rows):
        own = [row for row in rows if (row["at"]["size"], row["at"]["temperature"]) == (size, temperature)]
        own = [row for row in own if row["found"]["ways"][PLAIN]["steps"]]
        for drafter in dict.fromkeys(way.split(" ")[0] for row in own for way in row["found"]["ways"] if way != PLAIN):
            gains = {}
            for width in (*map(str, WIDTHS), ALL):
                figures = [row["found"]["ways"][f"{drafter} {width}"] for row in own]
                gain = ratio([one["tokens"] - 1 for one in figures], [one["steps"] for one in figures])
                gains[width] = gain, f"{sum(one['equal'] for one in figures)} of {len(figures)}"
            for width, (gain, same) in gains.items():
                tokens = own[0]["found"]["vocabulary"] if width == ALL else int(width)
                share = gain.value / gains[ALL][0].value
                found.append((size, temperature, drafter, tokens, gain, share, same, [row["key"] for row in own]))
    return found


def show(rows: list[Row]) -> Iterator[Block]:
    """Tokens a step by the size of the subset."""
    lines = lines_of(rows)
    if not lines:
        return
    keys = [row["key"] for row in rows]
    yield Figure("vocabulary", "Tokens a step by the tokens that may be proposed", partial(_draw, lines), keys)
    cells = [
        [size, temperature, drafter, tokens, same, gain, round(100 * share, 1)]
        for size, temperature, drafter, tokens, gain, share, same, _ in lines
    ]
    columns = ("size", "temperature", "drafter", "tokens", "same text", "tokens a step (95 %)", "% of all tokens'")
    note = (
        "The most frequent tokens of other conversations' prompts, then the rest by id. Of a smaller output matrix a"
        " draft is quicker, too: the model card has drafters that were trained with one."
    )
    yield Table("Subsets of the draft vocabulary", columns, cells, [line[-1] for line in lines], note)


def _draw(lines: list[Line], canvas: Canvas) -> None:
    places = list(dict.fromkeys(line[:2] for line in lines))
    titles = [f"{size}, temperature {temperature:g}" for size, temperature in places]
    for axes, place in zip(draw.panels(canvas, titles), places, strict=True):
        own = [line for line in lines if line[:2] == place]
        for drafter in dict.fromkeys(line[2] for line in own):
            points = [(line[3], line[4]) for line in own if line[2] == drafter]
            widths, ink = [width for width, _ in points], draw.colour(drafter)
            axes.plot(widths, [gain.value for _, gain in points], color=ink, marker="o", markersize=3, label=drafter)
            axes.fill_between(widths, [gain.low for _, gain in points], [gain.high for _, gain in points], color=ink,
                              alpha=0.12, linewidth=0)  # fmt: skip
        ticks = sorted({line[3] for line in own})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="tokens that may be proposed")
    canvas.axes[0].set_ylabel("tokens a step")
    draw.legend(canvas, canvas.axes[0], 3)


SECTION = Section(
    name=NAME,
    title="Draft vocabulary",
    question="How many tokens must a drafter be able to propose?",
    source="EAGLE-Pangu's vocabulary subsets; FR-Spec (arXiv 2502.14856)",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
