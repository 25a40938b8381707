"""EAGLE-Pangu's invariants of memory and commits: caches behind tree steps equal those of a fresh prefill.

Equal texts and their ties are counted over all rows of a run, and stand on the report's first screen.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from draftwood.runtime.proof import TOLERANCE
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.section import Block, Row, Section, Table, Task
from draftwood.tools.lab.suite import Ask, Suite

NAME = "exactness"
STEPS = 24


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """The caches of every drafter at every size."""
    for size, drafter in product(ask.sizes, ask.drafters):
        yield Task(NAME, {"size": size, "drafter": drafter}, 3.0)


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle."""
    lab.planned(task.at["size"], task.at["drafter"])


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Rows of the teacher's caches behind tree steps and their commits, against a fresh prefill of the same text."""
    opened = lab.planned(task.at["size"], task.at["drafter"])
    engine, bundle = opened.engine, opened.engine.bundle
    plain = next(gear for gear in bundle.manifest.gears if gear.draft is None)
    ids, worst, cases = opened.ids(lab.prompts[0]), 0.0, 0
    for gear in (gear for gear in bundle.manifest.gears if gear.draft and gear.slots == plain.slots):
        state = engine.begin(plain.slots)
        text = [*ids, *engine.start(state, np.array(ids, np.int64)).tokens]
        for _ in range(STEPS):
            text += engine.step([state], [gear])[0].tokens
        engine.step([state], [plain])  # writes what the last tree's commit has chosen
        fresh, held = engine.begin(plain.slots), len(text) - 1
        engine.prefill(fresh, np.array(text[:held], np.int64))
        for ours, theirs in zip(state.kv.buffers, fresh.kv.buffers, strict=True):
            worst = max(worst, float(np.abs(ours[:, :held] - theirs[:, :held]).max()))
            cases += held * ours.shape[0]
    return {"cases": cases, "failed": int(worst > TOLERANCE), "worst": worst, "allowed": TOLERANCE}


def show(rows: list[Row]) -> Iterator[Block]:
    """A line a pair."""
    lines = [
        [row["at"]["size"], row["at"]["drafter"].removeprefix("demo-")]
        + [row["found"]["cases"], row["found"]["failed"]]
        + [f"{row['found'][of]:.1e}" for of in ("worst", "allowed")]
        for row in rows
    ]
    columns = ("size", "drafter", "cache rows", "failed", "largest difference", "limit")
    note = "Cache rows behind tree steps and commits, compared with those of a fresh prefill of the same text."
    yield Table("Caches", columns, lines, [[row["key"]] for row in rows], note)


SECTION = Section(
    name=NAME,
    title="Exactness",
    question="Are the caches behind tree steps those of a fresh prefill?",
    source="EAGLE-Pangu's invariants; Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
