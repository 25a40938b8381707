"""Arguments that several commands share, and how they are read back."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.decoding import Options
    from draftwood.runtime.policy import Policies


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


def add_engine_argument(parser: argparse.ArgumentParser) -> None:
    """Which engine decodes; any that is registered."""
    from draftwood.runtime.engines import engine_names

    parser.add_argument(
        "--engine",
        choices=engine_names(),
        help="cpu: onnxruntime; npu: an Ascend NPU; ge: the NPU's graphs, interpreted, slow; static and eager are there"
        " to compare with (default: npu where the machine and the bundle have one, else cpu)",
    )


POLICIES = ("adaptive", "planned", "fixed", "plain")


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """What chooses the gear of each step; ``policies_of`` reads it back."""
    parser.add_argument("--policy", choices=POLICIES, help="what chooses each step's gear (default: adaptive)")
    parser.add_argument("--gear", metavar="NAME", help="always this gear's tree; grows to larger KV lengths as needed")


def policies_of(bundle: Bundle, args: argparse.Namespace, plain: bool = False) -> Policies:
    """What the arguments ask for, with the step times that ``tune`` measured here if there are any.

    Raises:
        RequestError: arguments that contradict each other, or ask for what the bundle has not.
    """
    from draftwood.runtime.engines import default_engine
    from draftwood.runtime.policy import Policies
    from draftwood.runtime.policy.tuned import tuned_times

    if plain and (args.gear or args.policy not in (None, "plain")):
        raise RequestError(f"--plain and {'--gear' if args.gear else '--policy'} exclude each other; give one")
    name = args.policy or ("plain" if plain else "fixed" if args.gear else "adaptive")
    return Policies(bundle, name, args.gear, tuned_times(bundle, args.engine or default_engine(bundle), args.threads))


def options(args: argparse.Namespace) -> Options:
    """Decoding options from parsed arguments; RequestError where a value makes no sense."""
    from draftwood.runtime.decoding import Options
    from draftwood.runtime.sampling import Sampling

    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    return Options(
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        ignore_eos=args.ignore_eos,
        stop_strings=tuple(args.stop),
    )


def given_prompt_ids(bundle: Bundle, args: argparse.Namespace) -> list[int]:
    """Token ids of the prompt that was given as ``--prompt-ids``, ``--prompt`` or ``--chat``."""
    from draftwood.runtime.opened import prompt_ids

    if args.prompt_ids is not None:
        try:
            return [int(part) for part in args.prompt_ids.split(",")]
        except ValueError:
            raise RequestError(f"--prompt-ids {args.prompt_ids}: expected whole numbers, such as 1,2,3") from None
    if bundle.tokenizer is None:
        raise RequestError(f"{bundle.folder}: has no tokenizer; give the prompt with --prompt-ids")
    if args.prompt is not None:
        return prompt_ids(bundle, args.prompt)
    try:
        messages = json.loads(args.chat.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"--chat {args.chat}: not a readable JSON file ({error})") from error
    return bundle.tokenizer.chat(messages)
