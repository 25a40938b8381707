"""``draftwood report``: what was evaluated, as Markdown with pictures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="a folder of evaluate --out; it may be running")
    parser.add_argument("--json", action="store_true", help="print as JSON what was written")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.report.contents import contents
    from draftwood.tools.lab.report.markdown import tables_of, write_report

    found = contents(args.run)
    page, figures = write_report(found, args.run)
    if args.json:
        print(json.dumps({"markdown": str(page), "figures": [*map(str, figures)], "tables": tables_of(found)}))
    else:
        print(f"{page}: {len(figures)} figures, {len(tables_of(found))} tables")
    return 0
