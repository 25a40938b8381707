"""What the acceptance that was counted would gain on an NPU: modelled steps of a 7B teacher in place of measured ones.

OpenPangu-Medusa's sweep over L at its own teacher's shape. Nothing here was taken on a device (docs/latency-model.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from draftwood.tools.evaluate import draw
from draftwood.tools.evaluate.section import Block, Figure, Table
from draftwood.tools.evaluate.sections.lengths_shown import Cell, break_even, by_length
from draftwood.trees.latency import LatencyTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

DEVICE, TEACHER = "ascend-910b3", "openpangu-embedded-7b"
# A drafter of the kind that would stand before such a teacher, as ``draftwood profile --drafter`` names sizes.
DRAFTERS = {"medusa": ("5",), "eagle3": ("32000",), "fasteagle": ("5", "32000"), "dspark": ("7", "2", "32000")}
SLOTS = (256, 512, 1024, 2048, 4096, 8192)
ROWS = (1, 4, 8, 16, 32, 64)
PUBLISHED = {128: 1.35, 256: 1.25, 512: 1.10, 1024: 0.93}


@dataclass(frozen=True, slots=True)
class Modelled:
    """The tree of a cell that is fastest on the device: its accept length, and its step over a plain one."""

    cell: Cell
    tree: str
    accept_length: float
    overhead: float

    @property
    def speedup(self) -> float:
        return self.accept_length / self.overhead


@cache
def table_of(drafter: str) -> LatencyTable:
    """The device's steps for the teacher, and a drafter's."""
    from draftwood.compiler.device.devices import device
    from draftwood.compiler.device.table import modelled_table
    from draftwood.compiler.drafters.registry import kind_named
    from draftwood.compiler.teachers.registry import read_config
    from draftwood.tools.demo import resolve

    config = read_config(resolve(f"shape:{TEACHER}"))
    cost = kind_named(drafter).model.cost_of(DRAFTERS[drafter], config)
    return modelled_table(device(DEVICE), config, ROWS, SLOTS, cost)


def modelled(cell: Cell, table: LatencyTable) -> Modelled:
    """By accept lengths that the cell's texts had on this machine, with each tree alone."""
    shapes = cell.rows[0]["found"]["trees"]
    behind = max(row["found"]["prompt_tokens"] + row["found"]["ways"]["plain"]["tokens"] for row in cell.rows)

    def overhead(tree: str) -> float:
        rows, depth, width = shapes[tree]
        slots = behind + 2 * rows + 1
        step = table.step_s(rows, slots) + table.draft_s(depth, width) + table.host_s()
        return step / (table.step_s(1, slots) + table.host_s())

    found = [Modelled(cell, tree, cell.accept_length(tree), overhead(tree)) for tree in cell.trees]
    return max(found, key=lambda one: one.speedup)


def show(cells: Sequence[Cell]) -> Iterator[Block]:
    """The sweep on the device beside the one that was measured here; drafters without a model are left out."""
    found = [modelled(cell, table_of(cell.drafter)) for cell in cells if cell.drafter in DRAFTERS]
    if not found:
        return
    keys = [key for one in found for key in one.cell.keys]
    yield Figure(
        "modelled-by-length", f"Measured here, and modelled for {TEACHER} on {DEVICE}", partial(_draw, found), keys,
        note="Dashed lines are MODELLED: accept lengths as counted here, times of steps by the latency model. Crosses:"
        " OpenPangu-Medusa's published figures, of eager PyTorch.",
    )  # fmt: skip
    yield _table(found)


def _table(found: list[Modelled]) -> Table:
    lines, rows = [], []
    for one in found:
        cell = one.cell
        own = [m for m in found if (m.cell.place, m.cell.drafter) == (cell.place, cell.drafter)]
        own.sort(key=lambda m: m.cell.length)
        slower = break_even([m.cell.length for m in own], [m.speedup for m in own])
        here = [cell.speedup(cell.best), round(cell.overhead(cell.best), 2)]
        there = [one.tree, round(one.accept_length, 2), round(one.overhead, 2), round(one.speedup, 2), slower]
        lines.append([cell.size, cell.drafter, cell.temperature, cell.length, *here, *there])
        rows.append(cell.keys)
    columns = (
        *("acceptance of size", "drafter", "temperature", "tokens before", "measured best tree (95 %)", "its overhead"),
        *("modelled: best tree", "counted accept length", "modelled overhead", "modelled speed-up"),
        "modelled: slower than plain from",
    )
    note = (
        f"MODELLED columns: a step of {TEACHER} on {DEVICE}, bf16, with drafters "
        f"{', '.join(':'.join((kind, *sizes)) for kind, sizes in DRAFTERS.items())}; no figure of them was taken on a"
        " device. The demo pair's accept lengths stand for that teacher's, which nobody has counted. A drafter breaks"
        " even at an accept length that equals the modelled overhead."
    )
    return Table("Modelled on an NPU", columns, lines, rows, note)


def _draw(found: list[Modelled], canvas: Canvas) -> None:
    places = list(dict.fromkeys(one.cell.place for one in found))
    titles = [f"{size}, temperature {temperature:g}" for size, temperature in places]
    for axes, place in zip(draw.panels(canvas, titles), places, strict=True):
        own = [one for one in found if one.cell.place == place]
        for drafter in dict.fromkeys(one.cell.drafter for one in own):
            mine = sorted((one for one in own if one.cell.drafter == drafter), key=lambda one: one.cell.length)
            lengths, ink = [one.cell.length for one in mine], draw.colour(drafter)
            here = [one.cell.speedup(one.cell.best).value for one in mine]
            axes.plot(lengths, here, color=ink, marker="o", markersize=3, label=f"{drafter} measured")
            axes.plot(lengths, [one.speedup for one in mine], "--", color=ink, marker="s", markersize=3,
                      label=f"{drafter} modelled")  # fmt: skip
        axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "x", color=draw.INK, label="published Medusa")
        draw.equal_speed(axes)
        by_length(axes, [one.cell for one in own])
    canvas.axes[0].set_ylabel("times plain decoding")
    draw.legend(canvas, canvas.axes[0], 4)
