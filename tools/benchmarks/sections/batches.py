"""Texts that share launches: goodput and what a text waits for a token, over how many there are; what was chosen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from draftwood.manifest import Manifest
from draftwood.tools.benchmarks import draw
from draftwood.tools.benchmarks.open_bundles import Lab
from draftwood.tools.benchmarks.section import Block, Figure, Row, Section, Table, Task, grouped
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.measure.batches import TURNS_A_PLACE, bench_batches

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NAME = "batches"


def tasks(ask: SectionSettings, suite: Suite) -> Iterator[Task]:
    """A bundle at a temperature, with so many texts at a time."""
    for bundle, temperature, texts in product(ask.bundles, ask.temperatures, ask.texts):
        yield Task(NAME, {"model": suite.model, "bundle": bundle, "temperature": temperature, "texts": texts})


def prepare(task: Task, ask: SectionSettings, lab: Lab) -> None:
    """Opens the bundle; the bench itself warms up."""
    lab.opened(task.at["bundle"])


def measure(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Any]:
    """`bench --batch-size`, its report."""
    opened, texts = lab.opened(task.at["bundle"]), task.at["texts"]
    if texts > (most := opened.engine.max_batch):
        lab.say(f"{texts} texts: left out: bundle {task.at['bundle']} has graphs for 1 to {most}")
        return {"bench": {}}
    prompts = [prompt for conversation in lab.conversations(None) for prompt in conversation]
    prompts = prompts[: max(ask.limit or 0, TURNS_A_PLACE * texts)]  # a round at least
    options = lab.options(ask, task.at["temperature"])
    ways = opened.policies("plain"), opened.policies("adaptive")
    return {"bench": bench_batches(opened.engine, prompts, options, *ways, texts)}


def show(rows: list[Row]) -> Iterator[Block]:
    """A picture for each bundle and temperature, and all as a table."""
    lines = []
    rows = [row for row in rows if row["found"]["bench"]]
    for row in rows:
        at, bench = row["at"], row["found"]["bench"]
        full = bench["occupancies"][-1]
        gains = [bench[name]["mean"] for name in ("plain_over_alone", "speedup")]
        waits = [full[f"{way}_ms_per_token"] for way in ("plain", "speculative")]
        equal = f"{bench['identical']} of {2 * bench['turns']}"
        lines.append([at["model"], at["bundle"], at["temperature"], at["texts"], *gains, *waits, equal])
    columns = (
        "model",
        "bundle",
        "temperature",
        "texts",
        "plain over alone",
        "adaptive over plain",
        "plain ms a token",
        "adaptive ms a token",
        "texts equal",
    )
    note = "Steps with every place taken; ms that a text waits for its next token."
    yield Table("Texts that share launches", columns, lines, note)
    for (model, bundle, temperature), group in grouped(rows, "model", "bundle", "temperature").items():
        title = f"Texts that share launches, {bundle}, {model}, temperature {temperature:g}"
        name = f"batches-{model}-{bundle}-{temperature:g}"
        yield Figure(name, title, partial(_draw, group))


def _draw(rows: list[Row], canvas: Canvas) -> None:
    """By texts: tokens a second, ms a text waits for a token, and the gears of full steps."""
    goodput, waiting, chosen = draw.panels(canvas, ("tokens a second", "ms a token", "chosen"), share_y=False)
    texts = [row["at"]["texts"] for row in rows]
    full = [row["found"]["bench"]["occupancies"][-1] for row in rows]
    alone = rows[0]["found"]["bench"]["alone_tokens_per_s"]
    goodput.axhline(alone, color=draw.INK, linewidth=0.9, linestyle=":", label="plain, one text at a time")
    for way, label, drawn in (("plain", "plain", "plain"), ("speculative", "adaptive", rows[0]["at"]["bundle"])):
        style: Any = {"marker": "o", "markersize": 4, "color": draw.colour(drawn)}
        goodput.plot(texts, [occupancy[f"{way}_tokens_per_s"] for occupancy in full], label=label, **style)
        waiting.plot(texts, [occupancy[f"{way}_ms_per_token"] for occupancy in full], **style)
    shares = [_shares(row) for row in rows]
    below = [0.0] * len(rows)
    for colour, gear in zip(draw.OTHERS, sorted({gear for share_of in shares for gear in share_of}), strict=False):
        heights = [share_of.get(gear, 0.0) for share_of in shares]
        chosen.bar([str(count) for count in texts], heights, bottom=below, color=colour, label=gear)
        below = [low + high for low, high in zip(below, heights, strict=True)]
    for axes in (goodput, waiting, chosen):
        axes.set(xlabel="texts", ylim=(0, None))
    for axes in (goodput, waiting):
        axes.set_xticks(texts)
    draw.legend(canvas, goodput)
    chosen.legend(fontsize=7)


def _shares(row: Row) -> dict[str, float]:
    """The share of texts' full steps with each gear, by its tree."""
    shares: dict[str, float] = {}
    for choice in row["found"]["bench"]["occupancies"][-1]["chosen"]:
        tree = choice["gear"].rpartition("-kv")[0]
        shares[tree] = shares.get(tree, 0.0) + choice["share"]
    return shares


def shares_launches(manifest: Manifest) -> bool:
    """Whether a bundle has graphs of several texts."""
    return max(graph.batch for graph_set in manifest.graph_sets for graph in graph_set.graphs) > 1


SECTION = Section(
    name=NAME,
    title="Many texts",
    question="What do texts gain that share launches, and what is chosen for them?",
    source="Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    takes=shares_launches,
)
