"""What was set out for, and what a run reached: measured where it is missing, printed as a table.

    python -m draftwood.tools.evaluate.goals --prompts eval240.jsonl --sizes 110m --out DIR

What the figures are says `draftwood.tools.evaluate.goal_figures`. A run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from draftwood.errors import RequestError
from draftwood.files import cache_home
from draftwood.tools.evaluate.goal_figures import Line, lines_of
from draftwood.tools.evaluate.registry import SECTIONS
from draftwood.tools.evaluate.run import evaluate
from draftwood.tools.evaluate.sections import bitwise, steps, turns
from draftwood.tools.evaluate.suite import Suite, read_suite
from draftwood.tools.script import refusing

# Sections whose figures depend on the size; the others are counted at the suite's own.
TIMED = (steps.NAME, turns.NAME, bitwise.NAME)


def asked_suite(sizes: str | None, prompts: Sequence[str], limit: int | None = None) -> Suite:
    """The suite, with other sizes where a size matters; with ``limit`` conversations of every kind."""
    suite = read_suite("goals", SECTIONS).only(None, None, prompts)
    timed = suite.only(tuple(sizes.split(",")) if sizes else None, TIMED, ())
    sections = suite.sections | timed.sections
    if limit is not None:
        if limit < 1:
            raise RequestError(f"--limit {limit}: expected 1 or more")
        sections = {name: msgspec.structs.replace(ask, limit=limit, limits={}) for name, ask in sections.items()}
    return msgspec.structs.replace(suite, sections=sections)


def shown(lines: Sequence[Line]) -> str:
    """A table for people."""
    found = [f"{'figure':30} {'size':7} {'T':>4} {'drafter':10} {'value':>8}  {'95 %':14} goal"]
    for line in lines:
        spread = "" if line.low is None else f"{line.low:.2f} to {line.high:.2f}"
        temperature = "" if line.temperature is None else f"{line.temperature:g}"
        goal = "" if line.goal is None else f"{line.goal:g}: {'met' if line.met else 'missed'}"
        found.append(
            f"{line.what:30} {line.size:7} {temperature:>4} {line.drafter:10} {line.value:8.3f}  {spread:14} {goal}"
        )
    return "\n".join(line.rstrip() for line in found)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", action="append", default=[], metavar="FILE.jsonl", help="(the built-in ones)")
    parser.add_argument("--sizes", metavar="S[,S...]", help="of what is timed: native, 110m, 500m (110m)")
    parser.add_argument("--limit", type=int, metavar="N", help="conversations at a size and temperature (the suite's)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="rows; kept and resumed")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps models and bundles (default: a cache folder)")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    work = args.work or cache_home() / "draftwood" / "evaluate"
    lines = list(
        lines_of(evaluate(asked_suite(args.sizes, args.prompts, args.limit), args.out, work, args.threads).rows)
    )
    found = [{**asdict(line), "goal": line.goal, "met": line.met} for line in lines]
    print(json.dumps(found) if args.json else shown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
