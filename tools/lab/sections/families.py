"""Turns by task family: FastEagle's table, with a picture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from draftwood.tools.lab import draw
from draftwood.tools.lab.runner import is_plain
from draftwood.tools.lab.section import Block, Figure, Table
from draftwood.tools.lab.sections.turn import Turn, total_speedup
from draftwood.tools.lab.spread import mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def show(turns: list[Turn]) -> Iterator[Block]:
    """Speed-up and accept length by family."""
    groups: dict[tuple[Any, ...], list[Turn]] = {}
    for turn in turns:
        if not is_plain(turn.way):
            groups.setdefault((turn.source, turn.size, turn.temperature, turn.way), []).append(turn)
    held = {place: total_speedup(own) for place, own in groups.items()}
    keys = sorted({turn.key for turn in turns})
    count = len({place[0] for place in groups})
    yield Figure(
        "families", "Speed-up by task family", partial(_draw, held), keys, size=(7.2, 1.6 + 0.34 * count),
        note="Lines: 95 % of a bootstrap over conversations. Hollow: one fixed tree.",
    )  # fmt: skip
    lines, rows = [], []
    for place, own in sorted(groups.items()):
        accepted = mean([n for turn in own for n in turn.figures["accepted"]])
        lines.append([*place, len(own), held[place], accepted])
        rows.append(sorted({turn.key for turn in own}))
    columns = ("family", "size", "temperature", "way", "turns", "speed-up (95 %)", "accept length (95 %)")
    yield Table("By task family", columns, lines, rows)


def _draw(held: dict[tuple[Any, ...], Any], canvas: Canvas) -> None:
    places = list(dict.fromkeys(place[1:3] for place in held))
    families, ways = (sorted({place[at] for place in held}, reverse=at == 0) for at in (0, 3))
    titles = [f"{size}, temperature {temperature:g}" for size, temperature in places]
    for axes, place in zip(draw.panels(canvas, titles), places, strict=True):
        for number, way in enumerate(ways):
            ink, filled = draw.colour(way), draw.dashes(way) == "-"
            for row, family in enumerate(families):
                if found := held.get((family, *place, way)):
                    at = row + 0.7 * (0.5 - (number + 0.5) / len(ways))
                    axes.plot((found.low, found.high), (at, at), color=ink, linewidth=1)
                    axes.plot(found.value, at, "o", color=ink, markersize=4, markerfacecolor=ink if filled else "none",
                              label=way if row == 0 else None)  # fmt: skip
        draw.equal_speed(axes, across=False)
        axes.set_yticks(range(len(families)), families)
        axes.set(xlabel="times plain decoding", ylim=(-0.6, len(families) - 0.4))
        axes.grid(axis="y", visible=False)
    draw.legend(canvas, canvas.axes[0], 3)
