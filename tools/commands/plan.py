"""``draftwood plan``: the draft trees and gears that calibration statistics and a latency table speak for."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError, TreeError
from draftwood.files import read_text

if TYPE_CHECKING:
    from draftwood.trees.latency import LatencyTable
    from draftwood.trees.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--stats", required=True, type=Path, help="statistics that calibrate made, or rank paths")
    parser.add_argument(
        "--sampled", type=Path, metavar="STATS", help="statistics of sampled text, where --stats has greedy text alone"
    )
    parser.add_argument("--latency", type=Path, help="latency table that profile made; without one, trees by size")
    parser.add_argument("--max-nodes", default=63, **number, help="draft nodes, root not counted (default: 63)")
    parser.add_argument("--max-depth", **number, help="default: as deep as the statistics")
    parser.add_argument("--max-children", **number, help="candidates per node: ranks below this are used")
    parser.add_argument("--max-gears", default=4, **number, help="plain decoding counted (default: 4)")
    parser.add_argument("--graph-memory", **number, help="bytes that all graphs together may take")
    parser.add_argument(
        "--classes", default=1, **number, help="confidence classes with trees of their own (default: 1)"
    )
    parser.add_argument(
        "--realised", type=Path, metavar="TRACE", help="trace of a run, to compare with what was expected"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="PLAN", help="for build --tree plan:PLAN")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write each tree in every form that trees are read in"
    )
    parser.add_argument("--explain", action="store_true", help="say why, and draw pictures beside PLAN")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def main(args: argparse.Namespace) -> int:
    import draftwood
    from draftwood.tools.show.plan_text import explanation, summary
    from draftwood.trees.calibration_file import read_calibration, write_out
    from draftwood.trees.gears import Limits
    from draftwood.trees.plan_file import format_plan, plan_value

    limits = Limits(args.max_nodes, args.max_depth, args.max_children, args.max_gears, args.graph_memory)
    table = read_latency(args.latency) if args.latency else None
    realised = realised_figures(args.realised) if args.realised else []
    sampled = read_calibration(args.sampled) if args.sampled else None
    stats = read_calibration(args.stats)
    if sampled is not None and stats.sampled:
        raise RequestError(
            f"--stats {args.stats}: {stats.sampled} of {stats.contexts.total} contexts are of sampled text; expected"
            " greedy text alone beside --sampled; calibrate at temperature 0 into a file of its own"
        )
    plan = draftwood.plan(stats, limits, table, args.classes, sampled)
    write_out(args.out, format_plan(plan).encode())
    if args.export:
        export(plan, args.export)
    found = plan_value(plan) | ({"realised": realised} if args.realised else {})
    if args.explain:
        from draftwood.tools.show.plan_pictures import draw_plan

        pictures = draw_plan(plan, args.out)
        words = explanation(found) + "".join(f"\npicture: {path}" for path in pictures)
        print(words, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(found))
    elif not args.explain:
        print(summary(found))
    return 0


def read_latency(path: Path) -> LatencyTable:
    """The latency table at ``path``; RequestError if it cannot be read, TreeError if it is something else."""
    from draftwood.trees.latency import LatencyTable

    try:
        return LatencyTable.from_json(read_text(path), str(path))
    except OSError as error:
        raise RequestError(f"--latency {path}: cannot be read: {error.strerror}; check the path") from error


def realised_figures(path: Path) -> list[dict[str, Any]]:
    """Of each gear in a trace: its steps, and the tokens and seconds of one on average."""
    from draftwood.runtime.trace import Trace

    steps = defaultdict(list)
    for event in Trace.read(path).events:
        if event.kind != "prefill":
            steps[event.gear].append(event)
    if not steps:
        raise RequestError(f"--realised {path}: has no decoding steps; trace a run that decodes")
    return [
        {
            "gear": gear,
            "steps": len(events),
            "accept_length": sum(event.accepted for event in events) / len(events),
            "seconds": sum(event.total_us for event in events) / 1e6 / len(events),
        }
        for gear, events in sorted(steps.items())
    ]


def export(plan: Plan, folder: Path) -> None:
    """Writes every tree with draft nodes to ``folder`` as NAME.FORM.json, in each form that can express it."""
    from draftwood.trees import write_tree
    from draftwood.trees.calibration_file import write_out

    for tree in plan.trees:
        if not tree.topology.nodes:
            continue
        for form in ("draftwood", "medusa", "tuples", "nxdi"):
            try:
                text = write_tree(tree.topology, form)
            except TreeError as error:  # nxdi has no ranks, so it cannot leave one out
                print(f"--export: {tree.name}: {error}", file=sys.stderr)
                continue
            write_out(folder / f"{tree.name}.{form}.json", text.encode())
