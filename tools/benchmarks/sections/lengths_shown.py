"""The page of `lengths`: speed-up, overhead and accept length against the text's length, break-even, gears, regret."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood.tools.benchmarks import draw
from draftwood.tools.benchmarks.section import Block, Figure, Row, Table, grouped
from draftwood.tools.measure.runner import PLAIN, median_seconds
from draftwood.tools.measure.spread import Interval, ratio, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

AGAIN, ADAPTIVE = "plain again", "adaptive"


@dataclass(frozen=True, slots=True)
class Cell:
    """The texts of a model, bundle, temperature and length; seconds by way, a text each."""

    model: str
    bundle: str
    temperature: float
    length: int
    rows: list[Row]

    @property
    def place(self) -> tuple[str, float]:
        return self.model, self.temperature

    @property
    def trees(self) -> list[str]:
        return [way for way in self.rows[0]["found"]["ways"] if way not in (PLAIN, AGAIN, ADAPTIVE)]

    def ways(self, way: str) -> list[dict[str, Any]]:
        return [row["found"]["ways"][way] for row in self.rows]

    def seconds(self, way: str) -> np.ndarray:
        return np.array([median_seconds(figures) for figures in self.ways(way)])

    @property
    def base(self) -> np.ndarray:
        """Either of the two plain decodings may be the luckier one; their mean stands for both."""
        return (self.seconds(PLAIN) + self.seconds(AGAIN)) / 2

    def speedup(self, way: str) -> Interval:
        return ratio(self.base, self.seconds(way))

    @property
    def best(self) -> str:
        """The fastest tree alone, in hindsight."""
        return min(self.trees, key=lambda tree: self.seconds(tree).sum())

    def accept_length(self, way: str) -> float:
        texts = self.ways(way)
        return sum(figures["tokens"] - 1 for figures in texts) / sum(figures["steps"] for figures in texts)

    @property
    def host_share(self) -> float:
        """Time of the policy's steps that no graph runs in."""
        return float(np.mean([figures["host_share"] for figures in self.ways(ADAPTIVE)]))

    def overhead(self, way: str) -> float:
        """Time of a step over time of a plain one (OpenPangu-Medusa): speed-up is accept length over it."""
        return self.accept_length(way) / self.speedup(way).value


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """Texts by cell, in the order of the run; a cell for which its bundle has no tree says nothing."""
    places = grouped(rows, "model", "bundle", "temperature", "length")
    cells = (Cell(model, bundle, heat, length, texts) for (model, bundle, heat, length), texts in places.items())
    return [cell for cell in cells if cell.trees]


def show(rows: list[Row]) -> Iterator[Block]:
    """All tables and figures."""
    cells = cells_of(rows)
    if not cells:
        return
    yield _summary(cells)
    yield Figure("speedup-by-length", "Speed-up against the text's length", partial(_draw_speedups, cells))
    yield Figure(
        "overhead-by-length",
        "What a tree's step takes against what it gains",
        partial(_draw_overhead, cells),
        note="Best tree of the cell in hindsight. It pays where the accept length (whole lines) is above the overhead"
        " ratio (dotted), the time of its step over a plain one's.",
    )
    yield _break_even(cells)


def _summary(cells: list[Cell]) -> Table:
    lines = []
    for cell in cells:
        adaptive, best = cell.speedup(ADAPTIVE), cell.speedup(cell.best)
        floor = spread((cell.seconds(PLAIN) / cell.seconds(AGAIN)).tolist())
        regret = adaptive_regret(cell)
        speedups = spread((cell.base / cell.seconds(ADAPTIVE)).tolist())
        lines.append(
            [
                *(cell.model, cell.bundle, cell.temperature, cell.length, len(cell.rows), adaptive),
                *(round(speedups["p1"], 2), round(floor["p1"], 2), best, cell.best),
                *(round(cell.accept_length(cell.best), 2), round(cell.overhead(cell.best), 2), round(100 * regret, 1)),
                round(100 * cell.host_share, 1),
            ]
        )
    columns = (
        *("model", "bundle", "temperature", "tokens before", "texts", "adaptive (95 %)", "its p1", "plain's own p1"),
        *("best tree alone (95 %)", "which", "its accept length", "its overhead", "regret %", "host %"),
    )
    note = (
        "Adaptive: the default policy. Plain's own p1: plain decoding against itself, the noise floor. Regret: how much"
        " longer the policy took than the best gear in hindsight, plain decoding among them. Host: its"
        " time outside graphs."
    )
    return Table("By length", columns, lines, note)


def adaptive_regret(cell: Cell) -> float:
    """Time of the policy over that of the best gear alone, less one."""
    best = min(float(cell.base.sum()), *(float(cell.seconds(tree).sum()) for tree in cell.trees))
    return float(cell.seconds(ADAPTIVE).sum()) / best - 1


def _places(cells: list[Cell]) -> list[tuple[str, float]]:
    return list(dict.fromkeys(cell.place for cell in cells))


def _lines(cells: list[Cell], place: tuple[str, float]) -> Iterator[tuple[str, list[Cell]]]:
    for bundle in dict.fromkeys(cell.bundle for cell in cells):
        if line := sorted((c for c in cells if c.place == place and c.bundle == bundle), key=lambda c: c.length):
            yield bundle, line


def _titles(cells: list[Cell]) -> list[str]:
    return [f"{model}, temperature {temperature:g}" for model, temperature in _places(cells)]


def by_length(axes: Any, cells: Sequence[Cell]) -> None:
    """Lengths of texts along the axis, doubling."""
    lengths = sorted({cell.length for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens before the answer")


def _draw_speedups(cells: list[Cell], canvas: Canvas) -> None:
    for axes, place in zip(draw.panels(canvas, _titles(cells)), _places(cells), strict=True):
        for bundle, line in _lines(cells, place):
            lengths = [cell.length for cell in line]
            for name, intervals in (
                ("adaptive", [cell.speedup(ADAPTIVE) for cell in line]),
                ("best tree", [cell.speedup(cell.best) for cell in line]),
            ):
                way, ink = f"{bundle} {name}", draw.colour(bundle)
                axes.plot(lengths, [i.value for i in intervals], draw.dashes(way), color=ink, label=way, marker="o",
                          markersize=3)  # fmt: skip
                axes.fill_between(lengths, [i.low for i in intervals], [i.high for i in intervals], color=ink,
                                  alpha=0.12, linewidth=0)  # fmt: skip
        draw.equal_speed(axes)
        by_length(axes, cells)
    canvas.axes[0].set_ylabel("speed-up over plain decoding")
    draw.legend(canvas, canvas.axes[0], 3)


def _draw_overhead(cells: list[Cell], canvas: Canvas) -> None:
    for axes, place in zip(draw.panels(canvas, _titles(cells)), _places(cells), strict=True):
        for bundle, line in _lines(cells, place):
            lengths, ink = [cell.length for cell in line], draw.colour(bundle)
            gain = [cell.accept_length(cell.best) for cell in line]
            cost = [cell.overhead(cell.best) for cell in line]
            axes.plot(lengths, gain, color=ink, marker="o", markersize=3, label=f"{bundle} accept length")
            axes.plot(lengths, cost, ":", color=ink, marker="s", markersize=3, label=f"{bundle} overhead")
        axes.set_ylim(bottom=0)
        by_length(axes, cells)
    canvas.axes[0].set_ylabel("tokens a step; plain steps a step")
    draw.legend(canvas, canvas.axes[0], 3)


def _break_even(cells: list[Cell]) -> Table:
    lines = []
    for place in _places(cells):
        for bundle, line in _lines(cells, place):
            for name, ratios in (
                ("adaptive", [cell.speedup(ADAPTIVE).value for cell in line]),
                ("best tree", [cell.speedup(cell.best).value for cell in line]),
            ):
                lines.append([place[0], bundle, place[1], name, break_even([c.length for c in line], ratios)])
    note = "OpenPangu-Medusa reports 1.35, 1.25, 1.10 and below 1 at 128, 256, 512 and 1024 tokens: break-even at 1024."
    columns = ("model", "bundle", "temperature", "way", "slower than plain from")
    return Table("Break-even length", columns, lines, note)


def break_even(lengths: Sequence[int], ratios: Sequence[float]) -> str:
    """The first measured length from which every longer one is slower than plain decoding."""
    slower = [length for length, ratio in zip(lengths, ratios, strict=True) if ratio < 1]
    after = next((length for at, length in enumerate(lengths) if all(r < 1 for r in ratios[at:])), None)
    if after is not None:
        return f"{after} tokens"
    return f"nowhere up to {lengths[-1]}" + (f" (but at {slower[0]})" if slower else "")
