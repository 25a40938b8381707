"""What sharing the noise gains: tokens a step of the best trees, ranked with the teacher's noise and without.

    python -m draftwood.tools.measure.coupling [--prompts FILE] [--limit N] [--temperature T[,T...]] [--json]

The teacher answers at a temperature, and the rank paths of its answers are counted through every drafter's candidates
at the contexts where a decoding would stand. Tokens do not depend on the machine, so neither does the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.environment import hide_torch_npu
from draftwood.errors import RequestError
from draftwood.tools.demo import DRAFTERS, resolve
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.trees.calibration import Calibration

# Rows of a verify step, root counted.
ROWS = (4, 8, 16)


def measure(
    prompts: Sequence[Prompt], teacher: str, drafters: Sequence[str], temperature: float, new: int, levels: int,
    factor: float = 1.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """A record for each drafter: the accept length of the best trees by rows, the bonus counted.

    ``factor`` is of the noise that drafters are given.
    """
    from draftwood.tools.measure.counting import count, jobs

    found = []
    for drafter in drafters:
        record: dict[str, Any] = {"drafter": drafter, "temperature": temperature}
        (job,) = jobs(
            prompts, resolve(teacher), resolve(drafter), temperatures=(temperature,), max_new_tokens=new, seed=0,
            levels=levels, size=len(prompts),
        )  # fmt: skip
        for name, given in (("alone", 0.0), ("coupled", factor)):
            paths = Calibration.from_bytes(count(job, given)).rank_paths()
            trees = {rows: paths.best_tree(rows - 1) for rows in ROWS}
            record[name] = {rows: round(paths.expected_accept_length(tree), 3) for rows, tree in trees.items()}
        found.append(record)
        print(line(record), file=sys.stderr, flush=True)
    return found


def line(record: dict[str, Any]) -> str:
    """A record for people."""
    alone, coupled = (" / ".join(f"{record[name][rows]:.2f}" for rows in ROWS) for name in ("alone", "coupled"))
    return f"{record['drafter']:<16} at {record['temperature']}: {alone} alone, {coupled} with the teacher's noise"


@refusing
def main(arguments: list[str] | None = None) -> int:
    from draftwood.tools.commands.calibrate import parse_temperatures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", metavar="DIR", help="the teacher (default: demo)")
    parser.add_argument("--drafter", nargs="+", default=list(DRAFTERS), metavar="DIR", help="default: all shipped ones")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines (default: built in)")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts to use (default: all)")
    parser.add_argument("--temperature", default="0.8", metavar="T[,T...]")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens an answer at most")
    parser.add_argument("--levels", type=int, default=5, metavar="D", help="how deep an EAGLE-3 layer is followed")
    parser.add_argument("--factor", type=float, default=1.0, metavar="F", help="of the noise in the draft (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    if min(args.max_new_tokens, args.levels) < 1 or not 0 < args.factor < float("inf"):
        raise RequestError("--max-new-tokens, --levels: expected 1 or more of each, and of --factor a positive number")
    hide_torch_npu()
    prompts = read_prompts(args.prompts, args.limit)
    found = [
        record
        for temperature in parse_temperatures(args.temperature)
        for record in measure(
            prompts, args.model, args.drafter, temperature, args.max_new_tokens, args.levels, args.factor
        )
    ]
    print(json.dumps(found) if args.json else "\n".join(map(line, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
