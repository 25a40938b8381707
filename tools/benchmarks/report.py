"""``report``: writes the evaluated results as Markdown with pictures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="a folder of evaluate --out; it may be running")
    parser.add_argument("--json", action="store_true", help="print as JSON what was written")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.benchmarks.contents import contents
    from draftwood.tools.benchmarks.markdown import tables_of, write_report

    run_contents = contents(args.run)
    page, figures = write_report(run_contents, args.run)
    if args.json:
        print(json.dumps({"markdown": str(page), "figures": [*map(str, figures)], "tables": tables_of(run_contents)}))
    else:
        print(f"{page}: {len(figures)} figures, {len(tables_of(run_contents))} tables")
    return 0
