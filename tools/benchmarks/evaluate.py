"""``evaluate``: measures a suite into a folder, task by task; existing results are not measured again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.files import cache_home
from draftwood.tools.commands.arguments import add_opening_arguments

if TYPE_CHECKING:
    from draftwood.tools.benchmarks.suite import Suite


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite",
        required=True,
        metavar="quick|turns|cells|full|FILE",
        help="what to measure; FILE.toml is one of your own",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="rows and manifest; kept and resumed")
    parser.add_argument("--sections", metavar="NAME[,NAME...]", help="only these of the suite's sections")
    parser.add_argument(
        "--prompts", action="append", default=[], metavar="[FAMILY=]FILE.jsonl",
        help="may be given again; FAMILY names its figures (default: the suite's, or the built-in prompts)",
    )  # fmt: skip
    parser.add_argument(
        "--bundle", action="append", default=[], metavar="[NAME=]DIR",
        help="what is measured, or demo; again for more of the same teacher (default: the suite's)",
    )  # fmt: skip
    parser.add_argument("--model", metavar="MODEL", help="the teacher's checkpoint, which other programs read; or demo")
    add_opening_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.benchmarks.registry import SECTIONS
    from draftwood.tools.benchmarks.rows import differences
    from draftwood.tools.benchmarks.run import evaluate
    from draftwood.tools.benchmarks.suite import read_suite

    suite = read_suite(args.suite, SECTIONS).only(args.sections.split(",") if args.sections else (), args.prompts)
    suite = _over(suite, args)
    try:
        work = cache_home() / "draftwood" / "evaluate"
    except OSError as error:
        raise RequestError(f"no folder for what other programs read ({error}); set XDG_CACHE_HOME") from error
    rows = evaluate(suite, args.out, work).rows
    busy = sum(row["load"]["busy"] for row in rows)
    differing = sum(not text["tie"] for text in differences(rows))
    if args.json:
        print(json.dumps({"out": str(args.out), "rows": len(rows), "busy": busy, "different": differing}))
    else:
        print(f"{args.out}: {len(rows)} rows, {busy} while others were busy, {differing} texts differ past ties")
        print(f"see them with: python -m draftwood.tools.benchmarks report {args.out}")
    return 1 if differing else 0


def _over(suite: Suite, args: argparse.Namespace) -> Suite:
    """The suite over the bundles that are given, or its own; says which sections are left out."""
    from draftwood.manifest import Manifest
    from draftwood.tools.benchmarks.named_bundles import check_one_text, read_bundles
    from draftwood.tools.benchmarks.registry import SECTIONS
    from draftwood.tools.demo import resolve

    def takes(name: str, manifest: Manifest) -> bool:
        return SECTIONS[name].takes(manifest) and bool(args.model or not SECTIONS[name].needs_checkpoint)

    named = args.bundle or [f"{name}={folder}" for name, folder in suite.bundles.items()]
    if not named:
        raise RequestError("--bundle: is needed, a bundle to measure; draftwood make builds one of a model")
    model = resolve(args.model) if args.model else None
    if model and not model.exists():
        raise RequestError(f"--model {args.model}: no such file or folder")
    bundles = read_bundles(named)
    chosen = suite.over(bundles, takes, args.engine or suite.engine, model)
    for name, ask in chosen.sections.items():
        if SECTIONS[name].one_text:
            check_one_text({bundle: bundles[bundle] for bundle in ask.bundles}, name)
    if left := [name for name in suite.sections if name not in chosen.sections]:
        print(f"left out, for these bundles are not measured so: {', '.join(left)}", file=sys.stderr)
    for name, ask in chosen.sections.items():
        if long := [str(length) for length in suite.sections[name].lengths if length not in ask.lengths]:
            print(f"{name}: left out, for they pass a bundle's context: lengths {', '.join(long)}", file=sys.stderr)
        if not list(SECTIONS[name].tasks(ask, chosen)):
            print(f"{name}: nothing to measure, by the suite's settings and the prompts", file=sys.stderr)
    return chosen
