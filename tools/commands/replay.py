"""``draftwood replay``: policies over recorded texts, without a model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.tools.commands.arguments import options

# Gears are timed before texts are recorded.
TUNE_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="recorded texts, .jsonl")
    parser.add_argument("--record", type=Path, metavar="BUNDLE", help="first record prompts with this bundle, to --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where recorded texts go, one file each")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="to record (default: the built-in prompts)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of what is recorded (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.lab.replay import read_surveys, report

    if (args.record is None) != (args.out is None):
        raise RequestError("--record BUNDLE and --out DIR go together: what to record with, and where to")
    traces = [*args.traces, *(record(args) if args.record else ())]
    if not traces:
        raise RequestError("replay: expected recorded texts, or --record BUNDLE --out DIR to make some")
    gears, texts = read_surveys(traces)
    found = report(gears, texts)
    print(json.dumps(found) if args.json else _text(found))
    return 0


def record(args: argparse.Namespace) -> list[Path]:
    """Times the gears and records every prompt; returns the files."""
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines import StagedEngine, open_engine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.tools.lab.conversations import turn_prompts
    from draftwood.tools.lab.survey import survey
    from draftwood.tools.lab.timer import tune
    from draftwood.tools.prompts import read_prompts

    bundle = Bundle.open(args.record)
    prompts, chosen = read_prompts(args.prompts), options(args)
    if bundle.tokenizer is None or any(tree.file is None for tree in bundle.manifest.trees):
        raise RequestError(f"{args.record}: recording needs a tokenizer, and trees whose shape is known beforehand")
    share_threads()
    engine = open_engine(bundle)
    assert isinstance(engine, StagedEngine)
    times = tune(engine, TUNE_SECONDS)
    args.out.mkdir(parents=True, exist_ok=True)
    made = []
    for number, (prompt, ids) in enumerate(turn_prompts(engine, prompts, {})):
        trace = survey(engine, ids, chosen, times)
        if not trace.events:
            continue
        made.append(args.out / f"{number:04}-{prompt.id}.jsonl".replace("/", "-"))
        trace.write(made[-1])
        print(f"{number + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    return made


def _text(found: dict[str, Any]) -> str:
    """The report for people."""
    heading = f"{found['texts']} texts, {found['tokens']} tokens; speed-up over plain decoding, by the tables' times"
    lines = [heading, f"{'':28} {'total':>6} {'mean':>6} {'p1':>6} {'regret':>8}"]
    for name, one in (found["policies"] | found["gears"]).items():
        speedups = " ".join(f"{one[key]:6.2f}" for key in ("speedup", "speedup_mean", "speedup_p1"))
        mark = "  <- best gear in hindsight" if name == found["best_single"] else ""
        lines.append(f"{name:28} {speedups} {100 * one['regret']:6.1f} %{mark}")
    lines.append(f"{'best gear of each text':28} {found['speedup_best_single_each_text']:6.2f}")
    lines.append(f"{'oracle of each step':28} {found['speedup_oracle']:6.2f}")
    for name, one in found["policies"].items():
        shares = ", ".join(f"{gear} {100 * share:.0f} %" for gear, share in one["share"].items())
        lines.append(f"{name}: {one['steps']} steps: {shares}")
        if one["unknown"]:
            lines.append(f"  {100 * one['unknown']:.1f} % of its steps might have gained more than the survey shows")
    return "\n".join(lines)
