"""``draftwood report``: what was evaluated, as a page and as Markdown."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="DIR", help="a folder of evaluate --out; it may be running")
    parser.add_argument("--json", action="store_true", help="print as JSON what was written")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.report.markdown import figures_of, write_markdown
    from draftwood.tools.lab.report.page import PICTURES, write_page

    page, tables = write_page(args.run), write_markdown(args.run)
    figures, size = sorted(str(path) for path in (args.run / PICTURES).glob("*.png")), page.stat().st_size
    if args.json:
        found = {
            "page": str(page),
            "bytes": size,
            "markdown": str(tables),
            "figures": figures,
            "tables": figures_of(args.run),
        }
        print(json.dumps(found))
    else:
        print(f"{page}: {size / 1e6:.2f} MB, {len(figures)} figures\n{tables}: its tables")
    return 0
