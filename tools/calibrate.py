"""``draftwood calibrate``: the rank paths that a teacher's text took, counted into one file of statistics."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.trees.calibration import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--from-paths",
        type=Path,
        metavar="FILE.jsonl",
        help='rank paths found elsewhere, a line each: {"path": [0, 2], "context": 412, "confidence": 0.81}',
    )
    sources.add_argument("--merge", type=Path, nargs="+", metavar="STATS", help="statistics to add up into a new file")
    parser.add_argument("--out", required=True, type=Path, metavar="STATS", help="statistics to make or to add to")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.calibration_file import read_calibration, write_calibration

    if args.merge:
        calibration = merge(args.merge, args.out)
        added = calibration.contexts.total
    else:
        calibration = read_calibration(args.out) if args.out.exists() else Calibration()
        added = import_paths(calibration, args.from_paths)
    write_calibration(calibration, args.out)
    summary = {"out": str(args.out), "added": added, **figures(calibration)}
    print(json.dumps(summary) if args.json else text(summary))
    return 0


def import_paths(calibration: Calibration, file: Path) -> int:
    """Adds the lines of ``file`` that are not counted yet; returns how many.

    Raises:
        RequestError: the file cannot be read.
        TreeError: a line that is no rank path.
    """
    from draftwood.trees.path_lines import add_lines

    try:
        return add_lines(calibration, file.read_bytes(), str(file))
    except OSError as error:
        raise RequestError(f"--from-paths {file}: cannot be read: {error.strerror}; check the path") from error


def merge(files: list[Path], out: Path) -> Calibration:
    """The sum of several statistics.

    Raises:
        RequestError: ``out`` exists, or two of them counted the same source.
        TreeError: one cannot be read.
    """
    from draftwood.trees.calibration import Calibration
    from draftwood.trees.calibration_file import read_calibration

    if out.exists():
        raise RequestError(f"--out {out}: exists; merged statistics go into a new file, so that none counts twice")
    merged = Calibration()
    for file in files:
        one = read_calibration(file)
        if twice := sorted(one.sources.keys() & merged.sources.keys()):
            raise RequestError(f"--merge {file}: counted {twice[0]}, which an earlier file counted too; leave one out")
        merged.merge(one)
    return merged


def figures(calibration: Calibration) -> dict[str, Any]:
    """What the statistics hold, as plain values."""
    from draftwood.trees.calibration import UNKNOWN_BIN

    contexts = calibration.contexts
    return {
        "contexts": contexts.total,
        "distinct": len(contexts.counts_N),
        **{part: calibration.part(part).total for part in ("counted", "tuning", "heldout")},
        "depth": contexts.depth,
        "width": contexts.width,
        "tasks": [task for task in calibration.tasks if task],
        "with_length": int(contexts.counts_N[contexts.steps_N > 0].sum()),
        "with_confidence": int(contexts.counts_N[contexts.bins_N != UNKNOWN_BIN].sum()),
        "grouped": calibration.grouped,
    }


def text(summary: dict[str, Any]) -> str:
    """`figures` for people."""
    return (
        f"{summary['out']}: {summary['added']} contexts added, {summary['contexts']} in all: {summary['counted']}"
        f" counted, {summary['tuning']} for tuning, {summary['heldout']} held out; depth {summary['depth']},"
        f" {summary['width']} ranks; {summary['with_length']} with a length, {summary['with_confidence']} with a"
        f" confidence, tasks: {', '.join(summary['tasks']) or 'none'}"
    )
