"""Does a bundle give the tokens that its teacher gives when transformers runs it?

    python -m draftwood.tools.reference BUNDLE --model DIR [--prompts FILE] [--limit N] [--gear NAME] [--json]

Every prompt is decoded four times: by transformers (eager attention) and by the compiled CPU engine, each plain
and speculative. All four texts must be the same. Numeric ties are excused by the rule of ``draftwood bench``; the
step of any other difference is written to ``--dump``, for ``draftwood.tools.reference.replay``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Options
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.opened import prompt_ids
from draftwood.runtime.policy import policy_for
from draftwood.tools.commands.arguments import add_decoding_arguments, given_prompt, options
from draftwood.tools.demo import resolve
from draftwood.tools.lab.counting import widest_gear
from draftwood.tools.lab.differences import TIES_PER_TOKEN
from draftwood.tools.prompts import first_turns, read_prompts
from draftwood.tools.reference.lockstep import compare_texts
from draftwood.tools.reference.transformers import HfEngine
from draftwood.tools.script import refusing


def measure(
    engine: StagedEngine,
    reference: StagedEngine,
    prompts: dict[str, list[int]],
    chosen: Options,
    gear: str | None,
    dumps: Path,
) -> dict[str, Any]:
    """The report: ``ok``, and for every prompt its tokens and differences. Times in seconds."""
    bundle = reference.bundle
    modes = {"plain": policy_for(bundle), "speculative": policy_for(bundle, gear or widest_gear(bundle))}
    rows = []
    for name, ids in prompts.items():
        began = time.perf_counter()
        tokens, found = compare_texts(engine, reference, ids, chosen, modes, dumps / f"step-{name}")
        rows.append(
            {
                "id": name,
                "tokens": len(tokens),
                "equal": not found,
                "seconds": time.perf_counter() - began,
                "differences": [asdict(difference) for difference in found],
            }
        )
        print(f"{len(rows)}/{len(prompts)} prompts", file=sys.stderr, flush=True)
    ties = [difference["tie"] for row in rows for difference in row["differences"]]
    return {
        "ok": all(ties) and len(ties) <= math.ceil(sum(row["tokens"] for row in rows) * TIES_PER_TOKEN),
        "temperature": chosen.sampling.temperature,
        "seed": chosen.sampling.seed,
        "prompts": len(rows),
        "equal": sum(row["equal"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "per_prompt": rows,
    }


def _print(report: dict[str, Any]) -> None:
    print(f"{'prompt':24} {'tokens':>6}  all four texts")
    for row in report["per_prompt"]:
        print(f"{row['id']:24} {row['tokens']:6}  {'equal' if row['equal'] else 'differ'}")
        for found in row["differences"]:
            kind = "numeric tie" if found["tie"] else "DIFFERENCE"
            where = f", step in {found['dump']}" if found["dump"] else ""
            print(
                f"  {kind}: {found['side']}, {found['mode']}, token {found['position']}: {found['got']}, expected"
                f" {found['expected']}, margin {found['margin']:.2e}, tolerance {found['tolerance']:.2e}{where}"
            )
    print(f"{report['equal']} of {report['prompts']} prompts equal, {report['tokens']} tokens")
    print("ok" if report["ok"] else "FAILED")


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m draftwood.tools.reference", description="compare a bundle's texts with transformers'"
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--model", required=True, metavar="DIR", help="the bundle's teacher, or demo")
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code from the teacher's folder")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--prompt-ids", metavar="1,2,3", help="one prompt as token ids, for a bundle without tokenizer")
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="prompts to use (default 6)")
    parser.add_argument("--gear", metavar="NAME", help="gear to compare with plain decoding (default: largest tree)")
    parser.add_argument(
        "--dump", type=Path, default=Path(), metavar="DIR", help="where failing steps go (default: here)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_decoding_arguments(parser)
    args = parser.parse_args(argv)
    bundle, chosen = Bundle.open(args.bundle), options(args)
    prompts = _prompts(bundle, args)
    share_threads(args.threads)
    reference = HfEngine.open(bundle, resolve(args.model), args.trust_remote_code, args.dump)
    report = measure(CpuEngine(bundle), reference, prompts, chosen, args.gear, args.dump)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _prompts(bundle: Bundle, args: argparse.Namespace) -> dict[str, list[int]]:
    """Token ids by prompt id."""
    if args.prompt_ids is not None:
        return {"ids": prompt_ids(bundle, given_prompt(args))}
    return first_turns(bundle, read_prompts(args.prompts, args.limit))


if __name__ == "__main__":
    sys.exit(main())
