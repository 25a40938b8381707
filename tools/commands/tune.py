"""``draftwood tune``: measures every gear of a bundle on this machine, for the policy to choose by."""

from __future__ import annotations

import argparse

from draftwood.tools.commands.arguments import add_bundle_argument, add_opening_arguments, opening_of

# So long all gears together are timed; and as long again for every number of texts that share a launch.
SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle_argument(parser)
    add_opening_arguments(parser, "threads")


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.choice import default_engine, open_engine
    from draftwood.runtime.tuned import keep_times, prepare_times
    from draftwood.threads import share_threads
    from draftwood.tools.measure.tune import tune

    bundle = Bundle.open(args.bundle)
    engine = args.engine or default_engine(bundle)
    prepare_times(bundle, engine, args.threads)
    share_threads(args.threads)
    opened = open_engine(bundle, opening_of(args, engine=engine))
    times = tune(opened, SECONDS, opened.batches)
    file = keep_times(bundle, engine, args.threads, times)
    print(f"{'gear':28} {'texts':>5} {'length':>6} {'late':>5} {'ms a step':>10}   late: tokens to catch up with")
    for time in times:
        print(f"{time.gear:28} {time.texts:5} {time.length:6} {time.late:5} {time.us / 1000:10.3f}")
    print(f"kept in {file}")
    return 0
