"""What a step of the graphs for an NPU moves between host and device: launches, and bytes each way.

Counted from the graphs' signatures, so it is the same on every machine and no device is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from draftwood.runtime.bundle import Bundle
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.section import Block, Row, Section, Table, Task
from draftwood.tools.evaluate.suite import Ask, Suite
from draftwood.tools.show.host_traffic import host_traffic

NAME = "launches"


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A pair at a size."""
    for size, drafter in product(ask.sizes, ask.drafters):
        yield Task(NAME, {"size": size, "drafter": drafter}, 1.0)


def _lowered(task: Task, lab: Lab) -> Bundle:
    return lab.lowered(task.at["size"], task.at["drafter"])


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Lowers the pair."""
    _lowered(task, lab)


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Every gear's step, greedy and sampled, whole and in its parts."""
    manifest = _lowered(task, lab).manifest
    rows = {gear.name: tree.rows for gear in manifest.gears for tree in manifest.trees if tree.name == gear.tree}
    found = host_traffic(manifest, manifest.graphs_of("ge"))
    return {"steps": [{**step, "rows": rows[step["gear"]]} for step in found]}


def show(rows: list[Row]) -> Iterator[Block]:
    """A table of all steps."""
    lines, sources = [], []
    for row in rows:
        for step in row["found"]["steps"]:
            apart, place = step["apart"], (row["at"]["size"], row["at"]["drafter"].removeprefix("demo-"))
            moved = [step[of] for of in ("launches", "read_bytes", "written_bytes")]
            parts = [apart[of] for of in ("launches", "read_bytes", "written_bytes")]
            lines.append([*place, step["rows"], step["draws"], *moved, *parts, step["host_acceptance_read_bytes"]])
            sources.append([row["key"]])
    of = ("launches", "bytes read", "bytes written")
    columns = ("size", "drafter", "rows", "text", *of, *(f"{one}, in parts" for one in of), "read if the host accepted")
    note = "A step as one graph, and its parts launched one by one; by the signatures of the graphs for an NPU."
    yield Table("A step between host and device", columns, lines, sources, note)


SECTION = Section(
    name=NAME,
    title="Launches",
    question="What does a step of an NPU's graphs move between host and device?",
    source="Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    needs=("torch_npu",),
)
