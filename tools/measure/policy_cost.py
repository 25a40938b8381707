"""What a policy costs a step: `choose` and `observe` together, over random walks.

    python -m draftwood.tools.measure.policy_cost [--rows 4,8,16,64] [--steps 20000] [--json]

The least of the medians of several rounds, since whatever else runs here only ever adds to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.planned import StepTime
from draftwood.runtime.policy import Adaptive, Gears, Outcome
from draftwood.tools.script import refusing
from draftwood.trees import Topology

ROUNDS = 7


def measure(rows: list[int], steps: int) -> dict[str, float]:
    """Microseconds a step while a text is drafted, and while it is decoded plainly."""
    trees = [_nested(count) for count in rows]
    names = ["plain", *(f"tree-{count}" for count in rows)]
    drafts = [None, *("draft" for _ in rows)]
    gears = [
        Gear(name=name, tree=name, slots=1 << 20, graph="", draft=draft, class_trees=())
        for name, draft in zip(names, drafts, strict=True)
    ]
    times = [StepTime(gear=name, length=0, us=1500.0 if i else 1000.0) for i, name in enumerate(names)]
    shared = Gears(gears, [1, *rows], [None, *((tree,) for tree in trees)], times=times)
    return {
        "nodes": shared.forest.nodes,
        "drafting_us": min(_round(shared, steps, 0.8) for _ in range(ROUNDS)),
        "plain_us": min(_round(shared, steps, 0.0) for _ in range(ROUNDS)),
    }


def _nested(rows: int) -> Topology:
    """A backbone of three candidates a level, as deep as the rows go."""
    paths = [(0,) * depth + (rank,) for depth in range(rows) for rank in range(3)]
    return Topology.from_paths(paths[: rows - 1])


def _round(gears: Gears, steps: int, accuracy: float) -> float:
    """The median over the steps of a text: being interrupted is not the policy's doing."""
    policy, random = Adaptive(gears, gears.greedy, steps), np.random.default_rng(0)
    depths = np.minimum(random.geometric(1 - accuracy, steps) - 1, 4).tolist() if accuracy else [0] * steps
    took = np.zeros(steps)
    for step, depth in enumerate(depths):
        began = time.perf_counter_ns()
        gear = policy.choose(step)
        chosen = time.perf_counter_ns()
        assert gear is not None
        tree = gears.forest.shapes[gears.shape[gears.number[gear.name]]] if gear.draft else None
        path = (0,) * min(depth, tree[0].depth) if isinstance(tree, tuple) else ()
        us = 1500.0 if gear.draft else 1000.0
        outcome = Outcome(gear, step, path, len(path) + 1, verify_us=us)
        ran = time.perf_counter_ns()
        policy.observe(outcome)
        took[step] = (time.perf_counter_ns() - ran + chosen - began) / 1000
    return float(np.median(took))


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="4,8,16,64", metavar="T[,T...]", help="of the trees (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20_000, metavar="N")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        rows = sorted({int(part) for part in args.rows.split(",")})
    except ValueError:
        rows = []
    if not rows or rows[0] < 2 or args.steps < 1:
        raise RequestError(f"--rows {args.rows}, --steps {args.steps}: expected rows of 2 or more, and 1 step or more")
    found = measure(rows, args.steps)
    if args.json:
        print(json.dumps(found))
    else:
        drafting, plain = (f"{found[key]:.1f}" for key in ("drafting_us", "plain_us"))
        print(f"{found['nodes']} nodes: {drafting} us a step that drafts, {plain} us a plain one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
