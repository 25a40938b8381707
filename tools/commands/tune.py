"""``draftwood tune``: measures every gear of a bundle on this machine, for the policy to choose by."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftwood.errors import RequestError
from draftwood.tools.commands.arguments import add_engine_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="to measure for (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")
    add_engine_argument(parser)


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines import default_engine, open_engine
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.runtime.policy.tuned import keep_times
    from draftwood.tools.lab.timer import tune

    if not 0 < args.seconds <= 600:
        raise RequestError(f"--seconds {args.seconds}: expected a time of more than 0 and at most 600")
    bundle = Bundle.open(args.bundle)
    engine = args.engine or default_engine(bundle)
    share_threads(args.threads)
    times = tune(open_engine(bundle, engine), args.seconds)
    kept = keep_times(bundle, engine, args.threads, times)
    print(f"{'gear':28} {'text':>6} {'late':>5} {'ms a step':>10}   late: tokens that the drafter had to catch up with")
    for one in times:
        print(f"{one.gear:28} {one.length:6} {one.late:5} {one.us / 1000:10.3f}")
    print(f"kept in {kept}")
    return 0
