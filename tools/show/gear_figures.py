"""The use of each gear of a bundle: the texts that it fits, and its step's expected gain and time."""

from __future__ import annotations

from typing import Any

from draftwood.planned import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.policy import Gears, Learned
from draftwood.runtime.policy.gains import Ease
from draftwood.runtime.tuned import tuned_times

HEADING = ("gear", "tree", "rows", "KV", "text to", "texts", "greedy", "sampled", "step ms", "from", "graph")


def gear_figures(bundle: Bundle, engine: str) -> list[dict[str, Any]]:
    """A gear at a time: tokens expected of a step and its time, after half of the longest text that it fits.

    Tokens are None if no plan has expectations, times if neither ``tune`` nor a plan has measured.
    """
    tuned = tuned_times(bundle, engine, threads=None)
    learned = Learned(Gears.of(bundle, tuned))
    gears, times = learned.gears, learned.times(1)
    figures = []
    for gear in gears.gears:
        rows = gears.rows[gear.name]
        longest = gear.slots - 1 - rows
        ms = times.us(gear.name, longest // 2) / 1000 if times.absolute and gear.name in gears.timed else None
        figures.append(
            {
                "gear": gear.name,
                "tree": gear.tree,
                "rows": rows,
                "slots": gear.slots,
                "longest_text": longest,
                "texts": _texts(bundle, gear, rows),
                "tokens_greedy": _tokens(learned, True, gear, longest // 2),
                "tokens_sampled": _tokens(learned, False, gear, longest // 2),
                "step_ms": ms,
                "graph": gear.graph,
                "timed": None if ms is None else "this machine" if tuned else "the plan",
            }
        )
    return figures


def _texts(bundle: Bundle, gear: Gear, rows: int) -> list[int]:
    """Numbers of texts that there are graphs for which take the gear's tree of each."""
    graphs = [graph for lowered in bundle.manifest.graph_sets for graph in lowered.graphs]
    static = [graph for graph in graphs if graph.kind == "texts" and graph.slots == gear.slots and graph.rows >= rows]
    return sorted({1, *(graph.batch for graph in [*static, *(graph for graph in graphs if graph.kind == "batch")])})


def _tokens(learned: Learned, greedy: bool, gear: Gear, length: int) -> float | None:
    if not gear.draft:
        return 1.0
    return Ease(learned.gains[greedy, False], length).tokens(gear.tree) if learned.gears.planning else None


def gear_rows(figures: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The figures as rows of a table, the heading first."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows: list[tuple[str, ...]] = [HEADING]
    for gear in figures:
        names, place = (gear["gear"], gear["tree"]), (gear["rows"], gear["slots"], gear["longest_text"])
        texts = ",".join(map(str, gear["texts"]))
        numbers = (number(gear[key], ".2f") for key in ("tokens_greedy", "tokens_sampled", "step_ms"))
        rows.append((*names, *map(str, place), texts, *numbers, gear["timed"] or "-", gear["graph"]))
    return rows
