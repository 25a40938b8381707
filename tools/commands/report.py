"""``draftwood report``: what was evaluated as a page and as Markdown, or two runs held against each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="a folder of evaluate --out; it may be running. Two are held against each other, row by row",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON what was written or compared")


def main(args: argparse.Namespace) -> int:
    from draftwood.errors import RequestError

    if len(args.runs) > 2:
        raise RequestError(f"report: got {len(args.runs)} folders; expected one, or two to compare")
    return _compare(args) if len(args.runs) == 2 else _draw(args)


def _draw(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.report.markdown import figures_of, write_markdown
    from draftwood.tools.lab.report.page import PICTURES, write_page

    (folder,) = args.runs
    page, tables = write_page(folder), write_markdown(folder)
    figures, size = sorted(str(path) for path in (folder / PICTURES).glob("*.png")), page.stat().st_size
    if args.json:
        found = {
            "page": str(page),
            "bytes": size,
            "markdown": str(tables),
            "figures": figures,
            "tables": figures_of(folder),
        }
        print(json.dumps(found))
    else:
        print(f"{page}: {size / 1e6:.2f} MB, {len(figures)} figures\n{tables}: its tables")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.report.compare import compare, sentences

    found = compare(*args.runs)
    print(json.dumps(found) if args.json else "\n".join(sentences(found)))
    return 0
