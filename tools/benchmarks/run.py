"""Runs a suite: the tasks that have no row yet, one by one."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from draftwood.runtime.tuned import machine_name
from draftwood.tools.benchmarks.busy import Meter
from draftwood.tools.benchmarks.open_bundles import Lab
from draftwood.tools.benchmarks.record import begin, make_folder
from draftwood.tools.benchmarks.registry import SECTIONS
from draftwood.tools.benchmarks.rows import RunRows
from draftwood.tools.benchmarks.section import Row, Task
from draftwood.tools.benchmarks.suite import Suite
from draftwood.tools.made_from import alone_in

QUIET_SECONDS = 5.0  # between lines of progress where nobody watches a terminal


def evaluate(suite: Suite, out: Path, work: Path) -> RunRows:
    """Measures what ``out`` does not have yet; every row is there as soon as it is measured.

    Raises:
        RequestError: ``out`` holds another run.
    """
    tasks = tasks_of(suite)
    make_folder(out)
    with alone_in(out):
        begin(out, suite)
        rows, lab = RunRows(out), Lab(suite, work)
        missing = [task for task in tasks if task.key not in rows.keys]
        progress = RunProgress(missing, len(tasks))
        for task in missing:
            progress.begins(task)
            row = measure(task, suite, lab)
            rows.add(row)
            progress.done(task, row)
    return rows


def tasks_of(suite: Suite) -> list[Task]:
    """All tasks of a suite, in order."""
    return [task for name, ask in suite.sections.items() for task in SECTIONS[name].tasks(ask, suite)]


def measure(task: Task, suite: Suite, lab: Lab) -> Row:
    """One row. If other processes were busy it is measured again; the last try is kept and marked."""
    section, ask = SECTIONS[task.section], suite.sections[task.section]
    section.prepare(task, ask, lab)
    tries, busy = 0, True
    while busy and tries < suite.tries:
        meter = Meter()
        measured = section.measure(task, ask, lab)
        load = meter.stop()
        tries, busy = tries + 1, load.above(suite.busy_cores)
    return {
        "key": task.key,
        "section": task.section,
        "at": task.at,
        "machine": machine_name(),
        "load": {**asdict(load), "tries": tries, "busy": busy},
        "found": measured,
    }


class RunProgress:
    """Says on stderr what is measured now, and how long the rest would take at the mean of the rows so far."""

    def __init__(self, missing: Sequence[Task], total: int) -> None:
        self._before = self._done = total - len(missing)
        self._total = total
        # Seconds of the rows that were measured here, without the time to prepare them.
        self._seconds = self._said = 0.0
        if self._done:
            print(f"{self._done} of {total} rows are there", file=sys.stderr, flush=True)

    def begins(self, task: Task) -> None:
        """Before a task; a terminal shows it at once."""
        self._say(f"now {task.key}")

    def done(self, task: Task, row: Row) -> None:
        """After a task."""
        self._done += 1
        self._seconds += row["load"]["seconds"] * row["load"]["tries"]
        if self._done == self._total:
            self._said = 0.0
        busy = ", the machine was busy" if row["load"]["busy"] else ""
        self._say(f"{task.key} {row['load']['seconds']:.1f} s{busy}")

    def _say(self, what: str) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() and self._said and now - self._said < QUIET_SECONDS:
            return
        self._said = now
        measured, missing = self._done - self._before, self._total - self._done
        left = f", {_minutes(self._seconds * missing / measured)} left" if measured else ""
        print(f"{self._done}/{self._total}{left}: {what}", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 0):.0f} s"
