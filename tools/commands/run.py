"""``draftwood run``: one text from a bundle."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.tools.engines import add_engine_argument, open_engine
from draftwood.tools.policies import add_policy_arguments, policies_of

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decode import Options


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


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides a text; ``options`` reads it back."""
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 decodes greedily (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps every token (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")


def options(args: argparse.Namespace) -> Options:
    """Decoding options from parsed arguments; RequestError where a value makes no sense."""
    from draftwood.runtime.decode import Options
    from draftwood.runtime.sampling import Sampling

    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    return Options(
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        ignore_eos=args.ignore_eos,
        stop_strings=tuple(args.stop),
    )


def prompt_ids(bundle: Bundle, args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt that was given as text, ids or chat."""
    if args.prompt_ids is not None:
        try:
            return [int(part) for part in args.prompt_ids.split(",")]
        except ValueError:
            raise RequestError(f"--prompt-ids {args.prompt_ids}: expected whole numbers, such as 1,2,3") from None
    if bundle.text is None:
        raise RequestError(f"{bundle.folder}: has no tokenizer; give the prompt with --prompt-ids")
    if args.prompt is not None:
        return bundle.text.encode(args.prompt)
    try:
        messages = json.loads(args.chat.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"--chat {args.chat}: not a readable JSON file ({error})") from error
    return bundle.text.chat(messages)


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decode import Decoding
    from draftwood.runtime.engine import share_threads
    from draftwood.runtime.trace import Trace, form_of, save

    if args.trace:
        form_of(args.trace)  # a suffix that cannot be written is refused before the work
    bundle = Bundle.open(args.bundle)
    trace = Trace() if args.trace else None
    policies = policies_of(bundle, args, args.plain)
    prompt, chosen = prompt_ids(bundle, args), options(args)
    share_threads(args.threads)
    policy = policies.new(chosen.sampling.greedy)
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
    print("" if bundle.text else ",".join(map(str, result.token_ids)))
    rate = (len(result.token_ids) - 1) / max(result.decode_seconds, 1e-9)
    print(
        f"{len(result.token_ids)} tokens in {result.steps} steps, {result.accept_length_mean:.2f} a step,"
        f" {rate:.0f} tokens/s, ended by {result.finish_reason}",
        file=sys.stderr,
    )
    return 0
