"""``draftwood run``: one text from a bundle."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from draftwood.tools.commands.arguments import (
    add_decoding_arguments,
    add_engine_argument,
    add_policy_arguments,
    given_prompt_ids,
    options,
    policies_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, as it stands")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids to continue")
    prompt.add_argument("--chat", type=Path, metavar="FILE.json", help='[{"role": "user", "content": "..."}, ...]')
    add_decoding_arguments(parser)
    add_policy_arguments(parser)
    parser.add_argument("--plain", action="store_true", help="decode without speculation")
    add_engine_argument(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help=".jsonl: events; .json: Chrome trace format")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of streaming the text")


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decoding import Decoding
    from draftwood.runtime.engines import open_engine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.runtime.trace import Trace, form_of, save

    if args.trace:
        form_of(args.trace)  # a suffix that cannot be written is refused before the work
    bundle = Bundle.open(args.bundle)
    trace = Trace() if args.trace else None
    prompt, chosen = given_prompt_ids(bundle, args), options(args)
    policy = policies_of(bundle, args, args.plain).new(chosen.sampling.greedy)
    share_threads(args.threads)
    decoding = Decoding(open_engine(bundle, args.engine), prompt, chosen, policy, trace)
    for piece in decoding:
        if not args.json:
            print(piece, end="", flush=True)
    result = decoding.result
    assert result is not None
    if trace is not None:
        save(trace, args.trace)
    if args.json:
        print(
            json.dumps(
                {
                    "token_ids": list(result.token_ids),
                    "text": result.text,
                    "steps": result.steps,
                    "accept_length_mean": result.accept_length_mean,
                    "prefill_seconds": result.prefill_seconds,
                    "decode_seconds": result.decode_seconds,
                    "host_share": result.host_share,
                    "finish_reason": result.finish_reason,
                }
            )
        )
        return 0
    print("" if bundle.tokenizer else ",".join(map(str, result.token_ids)))
    rate = (len(result.token_ids) - 1) / max(result.decode_seconds, 1e-9)
    print(
        f"{len(result.token_ids)} tokens in {result.steps} steps, {result.accept_length_mean:.2f} a step,"
        f" {rate:.0f} tokens/s, ended by {result.finish_reason}",
        file=sys.stderr,
    )
    return 0
