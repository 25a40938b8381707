"""EAGLE-Pangu's picture of a drafter's attention: how much of it goes how far back, level by level."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from draftwood.runtime.decoding import Decoding, Options
from draftwood.tools.lab import draw
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.runner import PLAIN
from draftwood.tools.lab.section import CACHED, Block, Figure, Row, Section, Table, Task, grouped, has_cache
from draftwood.tools.lab.suite import Ask, Suite

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

    from draftwood.tools.reference.eager import EagerEngine

NAME = "attention"
TEXTS, CONTEXTS, LEVELS = 4, 8, 5
# Distances from powers of two on; all further ones belong to the last.
BUCKETS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256+")


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A text of a length, for a drafter; a wider model computes the same, so one size is enough."""
    for drafter in (one for one in ask.drafters if one in CACHED or one in suite.bundles):
        for length, text in product(ask.lengths, range(ask.limit or TEXTS)):
            yield Task(NAME, {"size": ask.sizes[0], "drafter": drafter, "length": length, "text": text})


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle."""
    lab.on(lab.planned(task.at["size"], task.at["drafter"]), "eager")


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Shares of attention by level and bucket, and of heads whose largest weight lies there, means over contexts inside
    the teacher's own greedy answer."""
    from draftwood.tools.lab.attended import by_distance, features_of

    opened = lab.planned(task.at["size"], task.at["drafter"])
    eager = cast("EagerEngine", lab.on(opened, "eager"))
    _, prompt = lab.text(opened.engine, task.at["length"], task.at["text"])
    options = Options(max_new_tokens=ask.max_new_tokens, ignore_eos=True)
    answer = (
        Decoding(opened.engine, prompt, options, opened.policies(PLAIN).new(True, options.max_new_tokens))
        .run()
        .token_ids
    )
    ids = [*prompt, *answer]
    features, ends = features_of(eager, ids), np.linspace(len(prompt) + 1, len(ids), CONTEXTS).astype(int)
    weights = [by_distance(eager, ids[:end], features, LEVELS) for end in ends]
    shares = [[bucketed(one.mean(0)) for one in levels] for levels in weights]
    tops = [[bucketed(largest(one)) for one in levels] for levels in weights]
    return {
        "prompt_tokens": len(prompt),
        "contexts": CONTEXTS,
        "shares": np.mean(shares, axis=0).round(6).tolist(),
        "tops": np.mean(tops, axis=0).round(6).tolist(),
        "bundle": opened.digest[:16],
    }


def bucketed(weights_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights by distance, summed into the buckets."""
    edges = [0, 1, *(1 << power for power in range(1, len(BUCKETS) - 1))]
    return np.array([weights_S[low:high].sum() for low, high in zip(edges, [*edges[1:], None], strict=True)])


def largest(weights_NS: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of heads whose largest weight lies at each distance, [S]."""
    return np.bincount(weights_NS.argmax(1), minlength=weights_NS.shape[1]) / len(weights_NS)


def show(rows: list[Row]) -> Iterator[Block]:
    """A line a level, and the table."""
    groups = grouped(rows, "drafter", "length")
    shares, tops = (
        {place: 100 * np.mean([row["found"][of] for row in own], axis=0) for place, own in groups.items()}
        for of in ("shares", "tops")
    )
    yield Figure(
        "attention-by-distance", "How far back a drafter looks", partial(_draw, shares),
        note="Mean over heads. A level of EAGLE-3 is one pass of its layer, along its own first choices; a level of"
        " FastEagle is one layer, at the root.",
    )  # fmt: skip
    note = "What lies 256 tokens back and more is what a window of 256 would hide, and the section on windows prices."
    yield _table("Share of a drafter's attention by distance", shares, note)
    note = (
        "The distance of a head's largest weight, over heads and contexts: EAGLE-Pangu's location of top-1 attention."
    )
    yield _table("Where a head looks most", tops, note)


def _table(title: str, found: dict[tuple[Any, ...], Any], note: str) -> Table:
    lines = [
        [*place, level, *(round(float(share), 1) for share in own)]
        for place, levels in found.items()
        for level, own in enumerate(levels, 1)
    ]
    columns = ("drafter", "tokens before", "level", *(f"{bucket} back, %" for bucket in BUCKETS))
    return Table(title, columns, lines, note)


def _draw(shares: dict[tuple[Any, ...], Any], canvas: Canvas) -> None:
    titles = [f"{drafter}, {length} tokens before" for drafter, length in shares]
    for axes, levels in zip(draw.panels(canvas, titles), shares.values(), strict=True):
        for level, (own, ink) in enumerate(zip(levels, draw.MANY, strict=False), 1):
            axes.plot(range(len(BUCKETS)), own, color=ink, marker="o", markersize=3.5, label=f"level {level}")
        axes.set_xticks(range(len(BUCKETS)), BUCKETS, rotation=45, ha="right")
        axes.set(xlabel="positions back")
    canvas.axes[0].set(ylabel="% of attention", ylim=(0, None))
    draw.legend(canvas, canvas.axes[0], LEVELS)


SECTION = Section(
    name=NAME,
    title="Drafter attention",
    question="What does the drafter look at, and how far back?",
    source="EAGLE-Pangu, the drafter's attention by distance",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    given=has_cache,
)
