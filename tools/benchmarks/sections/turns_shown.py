"""The page of `turns`: distributions over turns, acceptance, stages, families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.tools.benchmarks import draw
from draftwood.tools.benchmarks.section import Block, Figure, Row, Table, gathered
from draftwood.tools.benchmarks.sections.turn import (
    ComparedTurn,
    bundle_factors,
    plain_rounds,
    texts_of,
    total_speedup,
    turns_of,
)
from draftwood.tools.measure.runner import is_plain
from draftwood.tools.measure.spread import Interval, ratio, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Place = tuple[str, float]
# The classes of tokens a step; the last stands for all above.
LONG = ("1", "2", "3", "4", "5", "6", "7", "8+")


def show(rows: list[Row]) -> Iterator[Block]:
    """All tables and figures."""
    turns = turns_of(rows)
    places = list(dict.fromkeys((turn.model, turn.temperature) for turn in turns))
    if not turns:
        return
    yield _summary(turns, places)
    yield _accepted(turns, places)
    yield _bundles(rows)
    yield Figure(
        "speedup-of-turns",
        "Speed-up of turns, from the slowest to the fastest",
        partial(_draw_speedups, turns, places),
        note="A line above 1 everywhere would mean that no turn was slower than plain decoding.",
    )
    yield Figure("accept-by-position", "Steps that accept a draft at each depth", partial(_draw_depths, turns, places))
    yield Figure("stages", "Where a token's time goes", partial(_draw_stages, turns, places), size=(7.2, 4.2))
    yield _families(turns)
    if (chosen := _gears(turns)).lines:
        yield chosen
    yield (
        "EAGLE-Pangu reports, for a 7B teacher on one NPU and 240 turns, a mean speed-up of 1.27, 1.84 at p90 and 2.46"
        " at p99, at a mean accept length of 3.17: its figures on its machine; the table above has ours on this one."
    )


def _of(turns: Sequence[ComparedTurn], place: Place, way: str | None = None) -> list[ComparedTurn]:
    return [t for t in turns if (t.model, t.temperature) == place and (way is None or t.way == way)]


def _ways(turns: Sequence[ComparedTurn]) -> list[str]:
    return [way for way in dict.fromkeys(turn.way for turn in turns) if not is_plain(way)]


def _title(place: Place) -> str:
    return f"{place[0]}, temperature {place[1]:g}"


def _summary(turns: list[ComparedTurn], places: list[Place]) -> Table:
    lines = []
    for place in places:
        for way in _ways(turns):
            if measured := _of(turns, place, way):
                lines.append([*place, way, *_figures(measured)])
    columns = (
        *("model", "temperature", "way", "turns", "same text", "plain tokens/s", "tokens/s", "speed-up (95 %)", "mean"),
        *("p1", "p10", "p50", "p90", "p99", "accept length", "median", "p99 "),
        *("first token ms", "plain's", "ms a token", "host %"),
    )
    note = (
        "Speed-up: seconds of plain decoding with the same bundle over seconds of the way, all turns together, with the"
        " 95 % interval of a bootstrap over conversations; mean and percentiles are of turns. Accept length: tokens of"
        " a step."
    )
    return Table("Every drafter against plain decoding", columns, lines, note)


def _figures(turns: list[ComparedTurn]) -> list[Any]:
    tokens = sum(turn.figures["tokens"] - 1 for turn in turns)
    seconds, plain = sum(turn.seconds for turn in turns), sum(turn.plain_seconds for turn in turns)
    of_turns = spread([turn.speedup for turn in turns])
    accepted = [n for turn in turns for n in turn.figures["accepted"]]
    first, plain_first = (
        np.median([np.median(figures["first_seconds"]) for figures in side])
        for side in ([turn.figures for turn in turns], [turn.plain for turn in turns])
    )
    host = sum(turn.figures["host_share"] * turn.seconds for turn in turns) / seconds
    return [
        len(turns),
        f"{sum(turn.figures['equal'] for turn in turns)} of {len(turns)}",
        round(tokens / plain, 1),
        round(tokens / seconds, 1),
        total_speedup(turns),
        *(round(of_turns[name], 2) for name in ("mean", "p1", "p10", "p50", "p90", "p99")),
        round(float(np.mean(accepted)), 2),
        *(round(float(np.percentile(accepted, p)), 1) for p in (50, 99)),
        round(1e3 * float(first), 1),
        round(1e3 * float(plain_first), 1),
        round(1e3 * seconds / tokens, 3),
        round(100 * host, 1),
    ]


def _accepted(turns: list[ComparedTurn], places: list[Place]) -> Table:
    """The histogram of accept lengths, EAGLE-Pangu's L_k."""
    lines = []
    for place in places:
        for way in _ways(turns):
            if measured := _of(turns, place, way):
                counts = Counter(min(n, len(LONG)) for turn in measured for n in turn.figures["accepted"])
                total = sum(counts.values())
                lines.append(
                    [*place, way, total, *(round(100 * counts[n] / total, 1) for n in range(1, len(LONG) + 1))]
                )
    columns = ("model", "temperature", "way", "steps", *(f"{name}, %" for name in LONG))
    note = "Steps by the tokens that they gained, the bonus counted: EAGLE-Pangu's histogram of L_k."
    return Table("Tokens of a step", columns, lines, note)


def _bundles(rows: list[Row]) -> Table:
    """Plain decoding with each bundle, and against itself: the noise floor of the speed-ups above."""
    lines = []
    for model in dict.fromkeys(row["at"]["model"] for row in rows):
        texts = texts_of(rows, model)
        factors = bundle_factors(texts)
        rounds = [plain_rounds(ways, factors) for ways in texts]
        floor = spread([second / float(np.median(seconds)) for seconds in rounds for second in seconds])
        for name, factor in factors.items():
            lines.append([model, name, round(factor, 3), *(round(floor[p], 3) for p in ("p1", "p50", "p99"))])
    columns = ("model", "way", "its time over the bundles' mean", "a round over its text's median, p1", "p50", "p99")
    note = (
        "Bundles of a model hold one teacher; what its features and caches cost a step over another's is in the first"
        " figure. Percentiles are of all plain rounds of the model, each over its bundle's figure: the noise floor."
    )
    return Table("Plain decoding by bundle", columns, lines, note)


def _accept_length(turns: list[ComparedTurn]) -> Interval:
    """Tokens a step; conversations are resampled, since steps of one resemble each other."""
    conversations = gathered(turns, lambda turn: (turn.key,)).values()
    accepted = [[n for turn in group for n in turn.figures["accepted"]] for group in conversations]
    return ratio([sum(steps) for steps in accepted], [len(steps) for steps in accepted])


def _families(turns: list[ComparedTurn]) -> Table:
    """FastEagle's table."""
    drafted = (turn for turn in turns if not is_plain(turn.way))
    groups = gathered(drafted, lambda turn: (turn.source, turn.model, turn.temperature, turn.way))
    lines = []
    for place, family_turns in sorted(groups.items()):
        lines.append([*place, len(family_turns), total_speedup(family_turns), _accept_length(family_turns)])
    columns = ("family", "model", "temperature", "way", "turns", "speed-up (95 %)", "accept length (95 %)")
    return Table("By task family", columns, lines)


def _draw_speedups(turns: list[ComparedTurn], places: list[Place], canvas: Canvas) -> None:
    axes = None
    for axes, place in zip(draw.panels(canvas, [_title(p) for p in places]), places, strict=True):
        for way in _ways(turns):
            ratios = sorted(turn.speedup for turn in _of(turns, place, way))
            share = [100 * (i + 0.5) / len(ratios) for i in range(len(ratios))]
            axes.plot(share, ratios, draw.dashes(way), color=draw.colour(way), label=way, linewidth=1.6)
        draw.equal_speed(axes)
        axes.set(xlabel="turns, % (slowest first)")
    canvas.axes[0].set_ylabel("speed-up over plain decoding")
    draw.legend(canvas, canvas.axes[0], 3)


def _draw_depths(turns: list[ComparedTurn], places: list[Place], canvas: Canvas) -> None:
    for axes, place in zip(draw.panels(canvas, [_title(p) for p in places]), places, strict=True):
        for way in _ways(turns):
            if shares := depth_shares(_of(turns, place, way)):
                depths = range(1, len(shares) + 1)
                axes.plot(depths, shares, draw.dashes(way), color=draw.colour(way), marker="o", markersize=3, label=way)
        axes.set(xlabel="depth in the draft tree", ylim=(0, 105))
        locator: Any = axes.xaxis.get_major_locator()
        locator.set_params(integer=True)
    canvas.axes[0].set_ylabel("% of drafted steps")
    draw.legend(canvas, canvas.axes[0], 3)


def depth_shares(turns: Sequence[ComparedTurn]) -> list[float]:
    """% of the steps that drafted which accepted a draft at depth 1, 2, ..."""
    counts: Counter[int] = Counter()
    for turn in turns:
        counts.update(dict(enumerate(turn.figures["depths"])))
    return [100 * counts[d] / counts[0] for d in range(1, max(counts, default=0) + 1)] if counts[0] else []


def _draw_stages(turns: list[ComparedTurn], places: list[Place], canvas: Canvas) -> None:
    for axes, place in zip(draw.panels(canvas, [_title(p) for p in places]), places, strict=True):
        ways = list(dict.fromkeys(turn.way for turn in turns))[::-1]
        draw.stages(axes, {way: [turn.figures for turn in _of(turns, place, way)] for way in ways})
        axes.set(xlabel="ms a token")
    draw.legend(canvas, canvas.axes[0])


def _gears(turns: list[ComparedTurn]) -> Table:
    lines = []
    adaptive = (turn for turn in turns if turn.way.endswith("adaptive"))
    for place, chosen in gathered(adaptive, lambda turn: (turn.model, turn.temperature, turn.way)).items():
        steps = sum((Counter(turn.figures["gears"]) for turn in chosen), Counter())
        total = sum(steps.values())
        shares = ", ".join(f"{gear} {100 * count / total:.0f} %" for gear, count in steps.most_common())
        lines.append([*place, total, shares])
    return Table("What the adaptive policy chose", ("model", "temperature", "way", "steps", "gears"), lines)
