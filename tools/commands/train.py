"""``draftwood train``: trains a drafter for a frozen teacher on the texts that the teacher wrote itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from draftwood.errors import RequestError

KINDS = ("medusa", "eagle3", "fasteagle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help="medusa, eagle3 or fasteagle")
    parser.add_argument("--teacher", type=Path, required=True, metavar="DIR", help="model folder of the teacher")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR",
        help="texts of the teacher, written by python -m draftwood.tools.training.distill",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for drafter, log and checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help="optimiser steps (default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="texts a step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder for the teacher's states (default DATA/states)"
    )
    parser.add_argument("--cache-gb", type=float, default=8.0, help="largest size of that folder (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the final accuracy as JSON")
    # What belongs to one kind has no default here, so that it is refused with another.
    one = parser.add_argument_group("of a kind")
    one.add_argument("--levels", type=int, help="heads (4), steps of the training-time test (7), or layers (4)")
    one.add_argument("--blocks", type=int, help="medusa: residual blocks a head (1)")
    one.add_argument(
        "--own-output", action="store_const", const=True,
        help="medusa, eagle3: train an output matrix, do not share the teacher's",
    )  # fmt: skip
    one.add_argument(
        "--aux-layers", type=int, nargs=3, metavar="LAYER",
        help="eagle3, fasteagle: layers whose entering states are read (2, L // 2, L - 3)",
    )  # fmt: skip
    one.add_argument(
        "--draft-vocab", type=int, metavar="N", help="eagle3, fasteagle: draft only the N most written ids"
    )
    for name, what in (("heads", "query heads"), ("kv-heads", "key/value heads"), ("intermediate", "MLP width")):
        one.add_argument(f"--{name}", type=int, metavar="N", help=f"fasteagle: {what} of a layer (the teacher's)")
    one.add_argument("--token-weight", type=float, help="fasteagle: weight of the cross-entropy (1)")
    one.add_argument("--feature-weight", type=float, help="fasteagle: weight of the smooth-L1 distance (1)")
    one.add_argument("--last-only", action="store_const", const=True, help="fasteagle: supervise the last layer alone")


def main(args: argparse.Namespace) -> int:
    from draftwood.tools.training.kinds import OPTIONS
    from draftwood.tools.training.team import Team
    from draftwood.tools.training.trainer import train

    names = {name for options in OPTIONS.values() for name in options}
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if not args.data.is_dir():
        raise RequestError(f"--data {args.data}: no such folder; write texts with draftwood.tools.training.distill")
    with Team.join() as team:
        final = train(
            args.kind, args.teacher, args.data, args.out, steps=args.steps, batch=args.batch,
            learning_rate=args.learning_rate, seed=args.seed, save_every=args.save_every, cache=args.cache,
            cache_gb=args.cache_gb, team=team, **options,
        )  # fmt: skip
        if team.rank == 0:
            print(json.dumps(final) if args.json else _text(args.out, final))
    return 0


def _text(out: Path, final: dict) -> str:
    """The final accuracy for people."""
    lines = [f"{out}: held-out texts, true token first among the candidates, by position"]
    for name, record in final.items():
        lines.append(f"  {name:<8} " + "  ".join(f"{100 * share:5.1f} %" for share in record["top1"]))
    return "\n".join(lines)
