"""``draftwood report``: what was evaluated as a page, or two runs held against each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="DIR", help="a folder of evaluate --out; it may be running"
    )
    parser.add_argument("--compare", action="store_true", help="hold two folders against each other, row by row")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE.md", help="also write the tables, as docs/measured.md has"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON what was written or compared")


def main(args: argparse.Namespace) -> int:
    from draftwood.errors import RequestError

    if len(args.runs) != (2 if args.compare else 1):
        raise RequestError(f"report: got {len(args.runs)} folders; expected one, or two with --compare")
    return _compare(args) if args.compare else _draw(args)


def _draw(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.report.markdown import write_markdown
    from draftwood.tools.lab.report.page import PICTURES, write_page

    (folder,) = args.runs
    page = write_page(folder)
    figures = sorted(str(path) for path in (folder / PICTURES).glob("*.png"))
    if args.markdown:
        write_markdown(folder, args.markdown)
    size = page.stat().st_size
    written = {"page": str(page), "bytes": size, "figures": figures}
    print(json.dumps(written) if args.json else f"{page}: {size / 1e6:.2f} MB, {len(figures)} figures")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.report.compare import compare, sentences

    found = compare(*args.runs)
    print(json.dumps(found) if args.json else "\n".join(sentences(found)))
    return 0
