"""How thoroughly a command looks at the bundle that it opens."""

from __future__ import annotations

import argparse


def add_verify_argument(parser: argparse.ArgumentParser) -> None:
    """``args.verify`` is what ``Bundle.open`` takes."""
    parser.add_argument(
        "--verify",
        choices=("full", "fast"),
        help="full: hash every file and look at every weight; fast: what can be said without reading them (default:"
        " full once on this machine for files that have not changed since)",
    )
