"""``draftwood distill``: lets a teacher write the texts that its drafter learns from; `draftwood train` reads them."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftwood.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, a GGUF file, or demo")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="PATH[:TIMES]",
        help="where the prompts come from: .jsonl or .jsonl.gz files of rows with an id and a text or a list of"
        " messages, prompt files, or folders of such files; TIMES reads the rows so many times",
    )  # fmt: skip
    parser.add_argument(
        "--own-prompts", type=int, metavar="N",
        help="prompts that the teacher writes itself, first of all (default 0; half of --rows if there is no --data)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the texts; can be resumed")
    parser.add_argument(
        "--rows", type=int, default=14336, help="texts, rounded up to whole shards (default %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=160, metavar="N", help="of a text (default %(default)s)")


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.training.teacher import training_device
    from draftwood.tools.demo import resolve
    from draftwood.tools.training.distill import distill
    from draftwood.tools.training.rows import read_data
    from draftwood.tools.training.team import Team

    if min(args.rows, args.max_new_tokens) < 1:
        raise RequestError(f"--rows {args.rows}, --max-new-tokens {args.max_new_tokens}: expected 1 or more of each")
    own_prompts = args.own_prompts if args.own_prompts is not None else 0 if args.data else max(1, args.rows // 2)
    if own_prompts < 0:
        raise RequestError(f"--own-prompts {own_prompts}: expected 0 or more")
    rows = read_data(args.data)
    device = training_device()
    with Team.join(device) as team:
        distill(
            resolve(args.model), rows, args.out, rows=args.rows, own=own_prompts, new_tokens=args.max_new_tokens,
            team=team, device=device,
        )  # fmt: skip
    print(f"{args.out}: written; next: draftwood train KIND {args.model} {args.out} --out DRAFTER")
    return 0
