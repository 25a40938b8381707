"""``draftwood run``: one text from a bundle."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.files import json_text
from draftwood.tools.commands.arguments import (
    add_bundle_argument,
    add_decoding_arguments,
    add_opening_arguments,
    add_policy_argument,
    decoding_options,
    given_prompt,
    opening_of,
    show_openings,
)

if TYPE_CHECKING:
    from draftwood.runtime.decoding import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, as it stands")
    prompt.add_argument("--prompt-ids", metavar="1,2,3", help="token ids to continue")
    prompt.add_argument(
        "--chat",
        metavar="TEXT",
        help='a user\'s message to answer, or FILE.json: [{"role": "user", "content": "..."}, ...],'
        " or an object of messages, tools, documents and chat_template_kwargs",
    )
    add_decoding_arguments(parser)
    add_policy_argument(parser)
    add_opening_arguments(parser, "fallback")
    parser.add_argument("--trace", type=Path, metavar="FILE", help=".jsonl: events; .json: Chrome trace format")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of streaming the text")


def main(args: argparse.Namespace) -> int:
    import draftwood
    from draftwood.runtime.trace import Trace, form_of, prompt_digest, save
    from draftwood.runtime.tuned import bundle_digest
    from draftwood.threads import share_threads

    prompt, options = given_prompt(args), decoding_options(args)
    if args.trace:
        form_of(args.trace)  # a suffix that cannot be written is refused before the work
    trace = Trace() if args.trace else None
    share_threads()
    show_openings()
    with draftwood.open(args.bundle, opening_of(args)) as model:
        if model.refused:
            print(f"draftwood: {model.refused}; decoding with {model.engine_name}", file=sys.stderr)
        stream = model.stream(prompt, **options, policy=args.policy, trace=trace)
        for piece in stream:
            if not args.json:
                print(piece, end="", flush=True)
        assert stream.result is not None
    ran = {"engine": model.engine_name, "fallback_steps": stream.result.steps if model.refused else 0}
    if args.json:
        print(json_text(asdict(stream.result) | ran), flush=True)
    else:
        _print_ending(stream.result)
    if trace is not None:  # after the text, which is there although a disk is full
        trace.meta |= {"bundle": bundle_digest(model.bundle), "prompt": prompt_digest(stream.prompt), **ran}
        save(trace, args.trace)
    return 0


def _print_ending(result: Result) -> None:
    """The end of the streamed text's line, which is the ids if there was no text; then the figures, on stderr."""
    print(",".join(map(str, result.token_ids)) if result.text is None else "", flush=True)
    rate = (len(result.token_ids) - 1) / max(result.decode_seconds, 1e-9)
    print(
        f"{len(result.token_ids)} tokens in {result.steps} steps, {result.accept_length_mean:.2f} a step,"
        f" the first after {result.first_token_seconds * 1e3:.0f} ms, then {rate:.0f} tokens/s,"
        f" ended by {result.finish_reason}",
        file=sys.stderr,
    )
