"""``draftwood evaluate``: measures a suite into a folder, task by task; what the folder has is not measured again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.files import cache_home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--suite", metavar="quick|paper|FILE", help="what to measure; FILE.toml is one of your own")
    given.add_argument("--merge", type=Path, nargs="+", metavar="DIR", help="put the rows of several runs into one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="rows and manifest; kept and resumed")
    parser.add_argument("--sizes", metavar="S[,S...]", help="native, 110m, 500m (default: the suite's)")
    parser.add_argument("--sections", metavar="NAME[,NAME...]", help="only these of the suite's sections")
    parser.add_argument(
        "--prompts", action="append", default=[], metavar="[FAMILY=]FILE.jsonl",
        help="may be given again; FAMILY names its figures (default: the suite's, or the built-in prompts)",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps models and bundles (default: a cache folder)")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")
    parser.add_argument("--scheduler", metavar="HOST:PORT", help="measure on the workers of this Dask cluster")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def main(args: argparse.Namespace) -> int:
    summary = _merged(args) if args.merge else _measured(args)
    busy, differing = summary["busy"], summary["different"]
    if args.json:
        print(json.dumps(summary))
    else:
        print(f"{args.out}: {summary['rows']} rows, {busy} while others were busy, {differing} texts differ past ties")
        print(f"see them with: draftwood report {args.out}")
    return 1 if differing else 0


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    from draftwood.tools.evaluate.registry import SECTIONS
    from draftwood.tools.evaluate.run import evaluate
    from draftwood.tools.evaluate.suite import read_suite

    suite = read_suite(args.suite, SECTIONS).only(_names(args.sizes), _names(args.sections), args.prompts)
    try:
        work = args.work or cache_home() / "draftwood" / "evaluate"
    except OSError as error:
        raise RequestError(f"no folder for models and bundles ({error}); give --work DIR") from error
    return _summary(args.out, evaluate(suite, args.out, work, args.threads, args.scheduler).rows)


def _merged(args: argparse.Namespace) -> dict[str, Any]:
    from draftwood.tools.evaluate.rows import merge, read_rows

    merge(args.merge, args.out)
    return _summary(args.out, read_rows(args.out))


def _names(text: str | None) -> tuple[str, ...] | None:
    return tuple(text.split(",")) if text else None


def _summary(out: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from draftwood.tools.evaluate.exact import differences

    return {
        "out": str(out),
        "rows": len(rows),
        "busy": sum(row["load"]["busy"] for row in rows),
        "different": sum(not one["tie"] for one in differences(rows)),
    }
