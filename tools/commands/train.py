"""``draftwood train``: trains a drafter for a frozen teacher on the texts that the teacher wrote itself."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from pathlib import Path

from draftwood.compiler.drafters.kind import Kind, TrainingOption
from draftwood.compiler.drafters.registry import kinds, names
from draftwood.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kind",
        choices=names(),
        metavar="KIND",
        help=f"one of {', '.join(kind.name for kind in kinds() if kind.options)}",
    )
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, a GGUF file, or demo")
    parser.add_argument("data", type=Path, metavar="TEXTS", help="the folder that draftwood distill wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for drafter, log and checkpoint")
    parser.add_argument("--steps", type=int, default=1500, help="optimiser steps (default %(default)s)")
    parser.add_argument("--minutes", type=_positive, metavar="M", help="train for so long instead of --steps")
    parser.add_argument("--batch-size", type=int, default=16, help="texts a step (default %(default)s)")
    parser.add_argument("--learning-rate", type=_positive, default=2e-3, help="(default %(default)s)")
    parser.add_argument("--start", metavar="DIR", help="a trained drafter of the kind to go on from")
    _add_options(parser.add_argument_group("of a kind"), kinds())


def _add_options(group: argparse._ArgumentGroup, kinds: Iterable[Kind]) -> None:
    """A flag for every option of a kind; none has a default here, so that it is refused with another kind."""
    meant: dict[str, dict[Kind, TrainingOption]] = {}
    for kind in kinds:
        for name, option in kind.options.items():
            meant.setdefault(name, {})[kind] = option
    for name, options in meant.items():
        option = next(iter(options.values()))
        kinds_of: dict[str, list[str]] = {}
        for kind, described in options.items():
            kinds_of.setdefault(described.help, []).append(kind.name)
        help = "; ".join(f"{', '.join(names)}: {text}" for text, names in kinds_of.items())
        flag = f"--{name.replace('_', '-')}"
        if option.read is None:
            group.add_argument(flag, action="store_const", const=True, help=help)
        else:
            group.add_argument(flag, type=option.read, nargs=option.count, metavar=option.value, help=help)


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


_positive.__name__ = "number above 0"


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.training.teacher import training_device
    from draftwood.tools.demo import resolve
    from draftwood.tools.training.team import Team
    from draftwood.tools.training.trainer import train

    device = training_device()
    known = {name for kind in kinds() for name in kind.options}
    options = {name: value for name in known if (value := getattr(args, name)) is not None}
    if not args.data.is_dir():
        raise RequestError(f"{args.data}: no such folder; write texts with draftwood distill")
    with Team.join(device) as team:
        final = train(
            args.kind, resolve(args.model), args.data, args.out, steps=args.steps, minutes=args.minutes,
            batch=args.batch_size, learning_rate=args.learning_rate,
            start=resolve(args.start) if args.start else None, team=team, device=device, **options,
        )  # fmt: skip
        if team.rank == 0:
            print(_text(args.out, final))
    return 0


def _text(out: Path, final: dict[str, dict[str, list[float]]]) -> str:
    """The final accuracy for people."""
    lines = [f"{out}: held-out texts, true token first among the candidates, by position"]
    for name, record in final.items():
        lines.append(f"  {name:<8} " + "  ".join(f"{100 * share:5.1f} %" for share in record["top1"]))
    return "\n".join(lines)
