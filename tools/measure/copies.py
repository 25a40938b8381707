"""Shows that no step copies a cache: the time of a step against the capacity of the cache.

    python -m draftwood.tools.measure.copies BUNDLE [--png FILE] [--json]

Runs the plain and the largest tree's step behind the same 100 committed tokens in caches of rising capacity.
A step that copied its caches would take longer the larger they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.tools.comparison import single
from draftwood.tools.script import refusing

CAPACITIES = (256, 1024, 4096, 16384)
COMMITTED, ROUNDS, STEPS = 100, 10, 10


def measure(folder: Path) -> dict[str, Any]:
    """Median step time in ms by capacity, capacities in turn, each warm from steps that are not counted."""
    bundle = Bundle.open(folder)
    share_threads()
    engine = CpuEngine(bundle)
    largest = max(bundle.trees, key=lambda name: bundle.trees[name][1].rows)
    states = {slots: engine.begin(slots) for slots in CAPACITIES}
    for state in states.values():
        engine.prefill(state, np.zeros(COMMITTED, np.int64))
    times: dict[tuple[int, str], list[float]] = {}
    for _ in range(ROUNDS):
        for slots, state in states.items():
            for tree in ("plain", largest):
                times.setdefault((slots, tree), []).append(_step_ms(engine, state, tree))
    rows = [
        {
            "slots": slots,
            "cache_mb": state.bytes / 1e6,
            "plain_ms": float(np.median(times[slots, "plain"])),
            "tree_ms": float(np.median(times[slots, largest])),
        }
        for slots, state in states.items()
    ]
    return {"tree": largest, "committed": COMMITTED, "capacities": rows}


def _step_ms(engine: CpuEngine, state: SequenceState, tree: str) -> float:
    _, buffers = engine.bundle.trees[tree]
    tokens = np.zeros(buffers.rows, np.int64)
    elapsed = []
    for _ in range(STEPS):
        began = time.perf_counter()
        single.verify(engine, state, tokens, buffers)
        elapsed.append(time.perf_counter() - began)
        state.rollback(state.length)
    return 1000 * float(np.median(elapsed[STEPS // 2 :]))


def _draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    slots = [row["slots"] for row in report["capacities"]]
    for key, label in (("plain_ms", "plain step"), ("tree_ms", f"step of {report['tree']}")):
        axes.plot(slots, [row[key] for row in report["capacities"]], marker="o", label=label)
    axes.set(xscale="log", xlabel="capacity of the cache, slots", ylabel="ms a step", ylim=(0, None))
    axes.set_title(f"{report['committed']} tokens committed")
    axes.legend(frameon=False)
    figure.savefig(path, format="png", metadata={"Software": None})


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="time of a step against the capacity of the cache")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = measure(args.bundle)
    if args.png:
        _draw(report, args.png)
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"{report['committed']} tokens committed; the tree is {report['tree']}")
    print(f"{'slots':>6} {'caches MB':>10} {'plain ms':>9} {'tree ms':>9}")
    for row in report["capacities"]:
        print(f"{row['slots']:6} {row['cache_mb']:10.1f} {row['plain_ms']:9.2f} {row['tree_ms']:9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
