"""``draftwood bind``: gives a bundle that was built without weights the weights of a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("model", metavar="MODEL", help="the teacher's checkpoint")
    parser.add_argument("drafter", nargs="?", metavar="DRAFTER", help="the drafter's, if the bundle has one")


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.bundle.binding import bind
    from draftwood.tools.demo import resolve

    manifest = bind(args.bundle, resolve(args.model), resolve(args.drafter) if args.drafter else None)
    npu = manifest.graph_set("ge")
    assert npu is not None, "weights were bound to it"
    path = args.bundle / npu.weights
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB bound")
    return 0
