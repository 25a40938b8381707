"""``draftwood bench``: token equality and speed of speculation against plain decoding, paired turn by turn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.tools.commands.arguments import (
    add_decoding_arguments,
    add_engine_argument,
    add_policy_arguments,
    add_verify_argument,
    options,
    policies_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="turns to run (default: all)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the speed-ups of the turns")
    add_verify_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_decoding_arguments(parser)
    add_policy_arguments(parser)
    add_engine_argument(parser)


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines import open_engine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.runtime.policy import Policies
    from draftwood.tools.measure.bench import bench
    from draftwood.tools.prompts import read_prompts

    bundle = Bundle.open(args.bundle, args.verify)
    prompts, chosen = read_prompts(args.prompts, args.limit), options(args)
    if bundle.tokenizer is None:
        raise RequestError(f"{args.bundle}: has no tokenizer, so text prompts cannot be benchmarked")
    share_threads(args.threads)
    engine = open_engine(bundle, args.engine)
    report = bench(engine, prompts, chosen, Policies(bundle, "plain"), policies_of(bundle, args))
    if args.png:
        from draftwood.tools.show.pictures import draw_speedups

        draw_speedups(report, args.png)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _print(report: dict[str, Any]) -> None:
    speedup, accept = report["speedup"], report["accept_length"]
    print(f"turns        {report['turns']}: {report['identical']} identical, {report['ties']} numeric ties")
    rows = f"{report['rows_bit_equal']} of {report['rows_compared']} rows of chains have those of plain decoding"
    print(f"bits         {rows}, logits at most {report['logit_noise']:.1e} apart")
    spread = ", ".join(f"{key} {value:.2f}" for key, value in speedup.items())
    print(f"speed-up     {spread}")
    print(f"accept       mean {accept['mean']:.2f}, p50 {accept['p50']:.0f}, p99 {accept['p99']:.0f} tokens a step")
    print("  by depth   " + "  ".join(f"{100 * share:.0f} %" for share in report["accept_by_position"]))
    print(
        f"tokens/s     {report['plain_tokens_per_s']:.0f} plain, {report['speculative_tokens_per_s']:.0f} speculative"
    )
    print(f"host share   {100 * report['host_share']:.1f} % of the decode time outside graphs")
    for difference in report["differences"]:
        kind = "numeric tie" if difference["tie"] else "DIFFERENCE"
        print(
            f"{kind} {difference['id']} at token {difference['position']}: {difference['plain_token']} or"
            f" {difference['speculative_token']}, margin {difference['margin']:.2e},"
            f" tolerance {difference['tolerance']:.2e}"
        )
    print("ok" if report["ok"] else "FAILED")
