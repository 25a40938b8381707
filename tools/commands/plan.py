"""``draftwood plan``: the draft trees and gears that calibration statistics and a latency table speak for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.files import read_text, real_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from draftwood.trees.calibration import Calibration
    from draftwood.trees.latency import LatencyTable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument(
        "stats",
        nargs="+",
        type=Path,
        metavar="STATS",
        help="statistics that calibrate made; greedy and sampled text may have a file each",
    )
    parser.add_argument("--latency", type=Path, help="latency table that profile made; without one, trees by size")
    parser.add_argument("--max-nodes", default=63, **number, help="draft nodes, root not counted (default: 63)")
    parser.add_argument("--max-gears", default=4, **number, help="gears, plain decoding counted (default: 4)")
    parser.add_argument(
        "--occupancy",
        metavar="N[=SHARE],...",
        help="numbers of running sequences, and how often each occurs (default: all of the table, equally often)",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="PLAN",
        help="file for the plan, which build --tree plan:PLAN takes; its pictures lie next to it",
    )


def main(args: argparse.Namespace) -> int:
    import draftwood
    from draftwood.tools.show.plan_pictures import draw_plan
    from draftwood.tools.show.plan_text import explanation
    from draftwood.trees.calibration_file import write_out
    from draftwood.trees.occupancy import Occupancy
    from draftwood.trees.plan_file import Limits, format_plan

    _check_paths(args)
    limits = Limits(args.max_nodes, gears=args.max_gears)
    table = read_latency(args.latency) if args.latency else None
    if table and not table.drafts:
        print(
            f"--latency {args.latency}: has no times of drafts, which are taken to cost nothing; profile a BUNDLE with"
            " its drafter, or a MODEL with --device and --drafter",
            file=sys.stderr,
        )
    if args.occupancy and table is None:
        raise RequestError("--occupancy: says how often launches are shared; it goes with --latency")
    occupancy = Occupancy.parse(args.occupancy, max(table.texts)) if args.occupancy and table else None
    stats, sampled = read_statistics(args.stats)
    plan = draftwood.plan(stats, limits, table, sampled, occupancy)
    write_out(args.out, format_plan(plan).encode())
    print(explanation(plan) + "".join(f"\npicture: {path}" for path in draw_plan(plan, args.out)))
    return 0


def _check_paths(args: argparse.Namespace) -> None:
    """Raises RequestError if a file would count twice, or be replaced by the plan that is made of it."""
    named = [*args.stats, *([args.latency] if args.latency else []), args.out]
    real = [real_path(path) for path in named]
    for place, path in enumerate(named):
        if real[place] in real[:place]:
            raise RequestError(f"{path}: is named twice; expected STATS, --latency and --out to be files of their own")


def read_statistics(paths: Sequence[Path]) -> tuple[Calibration, Calibration | None]:
    """The statistics in the files together; or those of greedy text, and those of sampled text in files of its own.

    Raises:
        RequestError: a file has contexts of both, and another has sampled text alone; or two files hold counts of one
            text, which would count twice.
    """
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.calibration_file import read_calibration

    greedy, sampled = Calibration(), Calibration()
    holder: dict[str, Path] = {}
    for path in paths:
        counted = read_calibration(path)
        for source in counted.sources:
            if (other := holder.setdefault(source, path)) != path:
                raise RequestError(
                    f"{path}: holds texts that {other} holds as well, and they would count twice; leave one of the two"
                    " out, or count each text into one file"
                )
        (sampled if 0 < counted.sampled == counted.contexts.total else greedy).merge(counted)
    if not greedy.contexts.total or not sampled.contexts.total:
        return (sampled if sampled.contexts.total else greedy), None
    if greedy.sampled:
        raise RequestError(
            f"STATS: {greedy.sampled} of {greedy.contexts.total} contexts are of sampled text; expected greedy text"
            " alone next to a file of sampled text alone; calibrate at temperature 0 into a file of its own"
        )
    return greedy, sampled


def read_latency(path: Path) -> LatencyTable:
    """The latency table at ``path``; RequestError if it cannot be read, TreeError if it is something else."""
    from draftwood.trees.latency import LatencyTable

    try:
        return LatencyTable.from_json(read_text(path), str(path))
    except OSError as error:
        raise RequestError(f"--latency {path}: cannot be read: {error.strerror}; check the path") from error
