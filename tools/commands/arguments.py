"""Arguments that several commands share, and how they are read back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftwood.errors import RequestError
from draftwood.files import json_of, read_text
from draftwood.manifest import read_manifest
from draftwood.tools import demo

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.opening import Opening
    from draftwood.runtime.opened import Prompt
    from draftwood.runtime.options import Asked
    from draftwood.runtime.policy import Policies


# The flags that decide a text, by name.
_DECODING: dict[str, dict[str, Any]] = {
    "max-new-tokens": {"type": int, "default": 128, "metavar": "N", "help": "of the answer (default: 128)"},
    "temperature": {"type": float, "default": 0.0, "metavar": "T", "help": "0 decodes greedily (default)"},
    "top-p": {"type": float, "default": 1.0, "metavar": "P", "help": "1 keeps every token (default)"},
    "top-k": {"type": int, "default": 0, "metavar": "K", "help": "0 keeps every token (default)"},
    "seed": {"type": int, "default": 0, "metavar": "S", "help": "of sampled text (default: 0)"},
    "stop": {"action": "append", "default": [], "metavar": "TEXT", "help": "stop before this text; repeatable"},
}
# How a bundle is opened: flags by name, of fields of `Opening`.
_OPENING: dict[str, dict[str, Any]] = {
    "threads": {"type": int, "metavar": "N", "help": "processors of an engine (default: all, shared out)"},
    "no-prefixes": {
        "dest": "prefixes",
        "action": "store_false",
        "help": "do not keep caches of ended sequences for prompts that begin alike",
    },
    "fallback": {"action": "store_true", "help": "if the engine does not run, take one that does, and say so"},
}


def add_bundle_argument(parser: argparse.ArgumentParser) -> None:
    """The bundle that a command opens, as a path; ``demo`` is the one that ``draftwood demo`` built last."""
    parser.add_argument("bundle", type=demo.bundle, metavar="BUNDLE", help="a folder, or demo")


def add_decoding_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Flags that decide a text: those that are named, without names all of them; ``decoding_options`` reads them."""
    for name in names or _DECODING:
        parser.add_argument(f"--{name}", **_DECODING[name])


def add_opening_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Flags that decide how a bundle is opened: the engine, and those that are named; ``opening_of`` reads them."""
    for name in names:
        parser.add_argument(f"--{name}", **_OPENING[name])
    from draftwood.runtime.engines.registry import engines

    known = engines()
    each = "; ".join(f"{name}: {kind.help}" for name, kind in known.items())
    parser.add_argument(
        "--engine",
        choices=sorted(known),
        help=f"{each} (default: npu if machine and bundle have one; bitwise if rows are rounded to int8 and a tree"
        " branches; else cpu)",
    )


def opening_of(args: argparse.Namespace, **options: Any) -> Opening:
    """How a bundle is opened: by the flags that the command has for it, and by the command's additions."""
    from draftwood.runtime.engines.opening import USUAL

    named = {name: value for name, value in vars(args).items() if name in USUAL.__struct_fields__}
    return USUAL.but(**named | options)


def show_openings() -> None:
    """Lines that the runtime logs while it opens a bundle, on standard error: the first opening takes a while."""
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("draftwood: %(message)s"))
    log = logging.getLogger("draftwood.opening")
    log.handlers[:], log.propagate = [handler], False
    log.setLevel(logging.INFO)


def add_policy_argument(parser: argparse.ArgumentParser) -> None:
    """The flag that chooses the gear of each step; ``policies_of`` reads it back, and ``stream`` takes it as it is."""
    parser.add_argument(
        "--policy",
        default="adaptive",
        metavar="NAME",
        help="adaptive (default): the gear that is expected to be fastest; plain: no drafts; a gear's name: always its"
        " tree, at larger KV lengths as the text grows",
    )


def policies_of(bundle: Bundle, args: argparse.Namespace) -> Policies:
    """The policies that the arguments ask for, with the step times that ``tune`` measured here if there are any."""
    from draftwood.runtime.engines.choice import default_engine
    from draftwood.runtime.policy import Policies
    from draftwood.runtime.tuned import tuned_times

    times = tuned_times(bundle, args.engine or default_engine(bundle), None)
    return Policies(bundle, args.policy, times)


def decoding_options(args: argparse.Namespace) -> Asked:
    """The options that ``generate`` and ``stream`` of an opened bundle take, from parsed arguments."""
    from draftwood.runtime.options import Asked

    # Options without a flag of the command are left out, and so have their defaults.
    return cast(Asked, {name: value for name, value in vars(args).items() if name in Asked.__annotations__})


def given_prompt(args: argparse.Namespace) -> Prompt:
    """The prompt that was given as ``--prompt``, ``--prompt-ids`` or ``--chat``.

    The value of ``--chat`` is the name of a file if it ends in .json.

    Raises:
        RequestError: it is none, or a text for a bundle without tokenizer: opening a large one's graphs takes minutes.
        BundleError: the bundle has no readable manifest.
    """
    if args.prompt_ids is not None:
        try:
            return [int(part) for part in args.prompt_ids.split(",")]
        except ValueError:
            raise RequestError(f"--prompt-ids {args.prompt_ids}: expected whole numbers, such as 1,2,3") from None
    if not read_manifest(args.bundle).tokenizer:
        raise RequestError(f"{args.bundle}: has no tokenizer; give token ids: --prompt-ids 1,2,3")
    if args.prompt is not None:
        return str(args.prompt)
    if not args.chat.endswith(".json"):
        return [{"role": "user", "content": args.chat}]
    try:
        chat = json_of(read_text(Path(args.chat)))
    except (OSError, ValueError) as error:
        raise RequestError(f"--chat {args.chat}: not a readable JSON file ({error})") from error
    if not isinstance(chat, list | dict):
        raise RequestError(
            f"--chat {args.chat}: expected a list of messages, or an object that has it, got {chat!r:.60}"
        )
    return chat
