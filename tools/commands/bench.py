"""``draftwood bench``: token equality and speed of speculation against plain decoding, paired turn by turn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.errors import RequestError
from draftwood.files import json_text
from draftwood.tools.commands.arguments import (
    add_bundle_argument,
    add_opening_arguments,
    add_policy_argument,
    opening_of,
    policies_of,
)

# The two ways that are compared, as the report names them.
WAYS = ("plain", "speculative")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of an answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 decodes greedily (default)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences a launch (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_policy_argument(parser)
    add_opening_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.choice import open_engine
    from draftwood.runtime.options import Options
    from draftwood.runtime.policy import Policies
    from draftwood.threads import share_threads
    from draftwood.tools.measure.batches import bench_batches
    from draftwood.tools.measure.bench import bench
    from draftwood.tools.measure.waits import bench_waits
    from draftwood.tools.prompts import read_prompts

    bundle, prompts = Bundle.open(args.bundle), read_prompts(args.prompts)
    options = Options.of(max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    if bundle.tokenizer is None:
        raise RequestError(f"{args.bundle}: has no tokenizer, so text prompts cannot be benchmarked")
    share_threads()
    engine = open_engine(bundle, opening_of(args))
    measured = engine, prompts, options, Policies(bundle, "plain"), policies_of(bundle, args)
    report = bench(*measured) if args.batch_size == 1 else bench_batches(*measured, args.batch_size)
    if args.batch_size > 1:
        report |= bench_waits(engine, prompts, args.batch_size)
    if args.json:
        print(json_text(report))
    elif args.batch_size == 1:
        _print(report)
    else:
        _print_batches(report)
    return 0 if report["ok"] else 1


def _print(report: dict[str, Any]) -> None:
    speedup, accept = report["speedup"], report["accept_length"]
    print(f"turns        {report['turns']}: {report['identical']} identical, {report['ties']} numeric ties")
    rows = f"{report['rows_bit_equal']} of {report['rows_compared']} rows of a chain have plain decoding's bits"
    print(f"rounding     {rows}; logits differ by at most {report['logit_noise']:.1e}")
    spread = ", ".join(f"{key} {value:.2f}" for key, value in speedup.items())
    print(f"speed-up     {spread}")
    print(f"tokens/step  mean {accept['mean']:.2f}, p50 {accept['p50']:.0f}, p99 {accept['p99']:.0f}")
    print("  by depth   " + "  ".join(f"{100 * share:.0f} %" for share in report["accept_by_position"]))
    print(
        f"tokens/s     {report['plain_tokens_per_s']:.0f} plain, {report['speculative_tokens_per_s']:.0f} speculative"
    )
    print(f"host share   {100 * report['host_share']:.1f} % of the decode time outside graphs")
    _print_differences(report)


def _print_batches(report: dict[str, Any]) -> None:
    texts = report["texts"]
    print(f"turns        {report['turns']}, each three times: {report['identical']} of {2 * report['turns']} identical")
    print(f"tokens/s     {report['alone_tokens_per_s']:.0f} plain, one text at a time")
    print(f"             {report['plain_tokens_per_s']:.0f} plain, {texts} texts a launch")
    print(f"             {report['speculative_tokens_per_s']:.0f} speculative, {texts} texts a launch")
    shared, fast = report["plain_over_alone"]["mean"], report["speedup"]["mean"]
    print(f"speed-up     {shared:.2f} by sharing launches, then {fast:.2f} by speculation")
    print(f"tokens/step  mean {report['tokens_per_step']:.2f} of a text")
    print(f"host share   {100 * report['host_share']:.1f} % of the time outside graphs")
    _print_occupancies(report["occupancies"])
    turn, long = report["second_turn"], report["long_prompt"]
    print(f"second turn  after {turn['first_turn_tokens']} tokens: first token in {turn['ratio']:.3f} of the time")
    print(
        f"longest wait {long['longest_wait_ms']:.0f} ms while {long['prompt_tokens']} tokens are read: a launch of them"
        f" {long['prompt_launch_ms']:.0f} ms, a step {long['step_ms']:.0f} ms"
    )
    _print_differences(report)


def _print_occupancies(occupancies: Sequence[dict[str, Any]]) -> None:
    """A line for each number of texts that was there."""
    print("by texts     tokens/s and ms a token of a text, plain and as chosen; texts of a launch: gear and its share")
    for texts in occupancies:
        if texts["plain_steps"] and texts["speculative_steps"]:
            rates, waits = ([texts[f"{way}_{what}"] for way in WAYS] for what in ("tokens_per_s", "ms_per_token"))
            chosen = ", ".join(f"{c['launch']}: {c['gear']} {100 * c['share']:.0f} %" for c in texts["chosen"][:4])
            print(f"  {texts['texts']:3} {rates[0]:8.0f} {rates[1]:6.0f} {waits[0]:8.1f} {waits[1]:6.1f}   {chosen}")


def _print_differences(report: dict[str, Any]) -> None:
    from draftwood.tools.comparison.differences import told

    for difference in report["differences"]:
        print(told(difference))
    print("ok" if report["ok"] else "FAILED")
