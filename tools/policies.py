"""The options that choose a policy, alike for every command that decodes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.tools.engines import default_engine

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.policy import Policies

NAMES = ("adaptive", "planned", "fixed", "plain")


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=NAMES, help="what chooses each step's gear (default: adaptive)")
    parser.add_argument("--gear", metavar="NAME", help="always this gear's tree; grows to larger KV lengths as needed")


def policies_of(bundle: Bundle, args: argparse.Namespace, plain: bool = False) -> Policies:
    """What the options ask for, with the step times that ``tune`` measured here if there are any.

    Raises:
        RequestError: options that contradict each other, or ask for what the bundle has not.
    """
    from draftwood.runtime.engine import default_threads
    from draftwood.runtime.policy import Policies
    from draftwood.runtime.policy.tuned import tuned_times

    if plain and (args.gear or args.policy not in (None, "plain")):
        raise RequestError(f"--plain and {'--gear' if args.gear else '--policy'} exclude each other; give one")
    name = args.policy or ("plain" if plain else "fixed" if args.gear else "adaptive")
    times = tuned_times(bundle, args.engine or default_engine(bundle), args.threads or default_threads())
    return Policies(bundle, name, args.gear, times)
