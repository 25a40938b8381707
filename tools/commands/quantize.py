"""``draftwood quantize``: a teacher or a drafter in, the same in W8A8 out, and how much the teacher differs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError

if TYPE_CHECKING:
    from draftwood.compiler.quantisation.report import Difference

REPORT, PICTURE = "quantisation.json", "quantisation.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="teacher: a Hugging Face folder, or demo")
    parser.add_argument("--drafter", metavar="DIR", help="quantise this drafter of --model in place of the teacher")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="texts, a JSON object a line with text, prompt, turns or messages; every fourth is withheld for --report",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to make; must not exist")
    parser.add_argument("--scheme", default="w8a8", choices=("w8a8",), help="int8 weights a channel, rows a token")
    parser.add_argument(
        "--migration",
        default="search",
        choices=("none", "half", "search"),
        help="how outliers of the rows go into the weights: not at all, by halves, or as fits each layer best",
    )
    parser.add_argument("--head", action="store_true", help="quantise the output matrix, too")
    parser.add_argument(
        "--layout",
        default="compressed-tensors",
        choices=("compressed-tensors", "msmodelslim"),
        help="as vLLM reads it, or as vllm-ascend does",
    )
    parser.add_argument("--texts", type=int, default=64, metavar="N", help="at most so many texts")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="at most so many tokens of a text")
    parser.add_argument(
        "--report", action="store_true", help=f"compare with the original; {REPORT} and {PICTURE} go into --out"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.quantisation.quantise import Request, quantise
    from draftwood.compiler.quantisation.report import difference
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.runtime.text.tokenizer import Tokenizer
    from draftwood.tools.calibration_texts import LEAST_TOKENS, read_texts
    from draftwood.tools.demo import resolve

    if args.drafter:
        return _drafter(args)
    if args.calibration is None:
        raise RequestError("--calibration: is missing; expected a file of texts, or --drafter, which needs none")
    for flag, value, least in (("--texts", args.texts, 4), ("--tokens", args.tokens, LEAST_TOKENS)):
        if value < least:
            raise RequestError(f"{flag} {value}: expected {least} or more")
    model = resolve(args.model)
    texts = read_texts(args.calibration, Tokenizer.load(model), args.texts, args.tokens)
    request = Request(
        model=model, texts=texts.calibration, migration=args.migration, layout=args.layout, head=args.head
    )
    made = quantise(request, args.out, _say)
    found = difference(Checkpoint.open(model), made, texts.withheld, _say) if args.report else None
    summary: dict[str, object] = {
        "folder": str(args.out),
        "layout": args.layout,
        "quantised": len(made.config.quantised),
    }
    summary["bytes"] = _bytes(args.out)
    if found is not None:
        summary |= {"difference": found.figures()}
        (args.out / REPORT).write_text(json.dumps(found.figures(), indent=2) + "\n")
        _draw(found, args.out / PICTURE)
    print(json.dumps(summary) if args.json else _text(summary, found))
    return 0


def _drafter(args: argparse.Namespace) -> int:
    from draftwood.compiler.quantisation.drafter import quantise_drafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve

    for flag, given in (("--calibration", args.calibration), ("--report", args.report), ("--head", args.head)):
        if given:
            raise RequestError(f"{flag}: is for teachers; a drafter's acceptance is what bench says of its bundle")
    if args.layout != "compressed-tensors":
        raise RequestError(f"--layout {args.layout}: is for teachers; a drafter keeps the layout that it has")
    made = quantise_drafter(resolve(args.drafter), Checkpoint.open(resolve(args.model)), args.out, _say)
    summary: dict[str, object] = {
        "folder": str(args.out),
        "drafter": made.model.kind,
        "quantised": len(made.model.quantised),
    }
    summary["bytes"] = _bytes(args.out)
    print(json.dumps(summary) if args.json else _text(summary, None))
    return 0


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _say(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)


def _text(summary: dict[str, object], found: Difference | None) -> str:
    size = summary["bytes"]
    assert isinstance(size, int)
    lines = [f"{summary['folder']}: {summary['quantised']} linear layers in int8, {size / 1e6:.1f} MB"]
    if found is not None:
        lines += [
            f"perplexity {found.perplexity:.3f}, original {found.original_perplexity:.3f} ({100 * found.worse:+.2f} %),"
            f" on {found.tokens} tokens of {found.texts} withheld texts",
            f"best tokens alike at {100 * found.agreement:.2f} % of positions; states differ by"
            f" {100 * found.errors[-1]:.2f} % behind the last block",
        ]
    return "\n".join(lines)


def _draw(found: Difference, path: Path) -> None:
    from draftwood.tools.show.pictures import panels

    with panels(path, 1) as (axes,):
        axes.plot(range(1, len(found.errors) + 1), [100 * error for error in found.errors], "o-", markersize=3)
        axes.set(
            xlabel="behind block", ylabel="difference of the states, %", ylim=(0, None),
            title=f"perplexity {100 * found.worse:+.2f} %, best tokens alike {100 * found.agreement:.1f} %",
        )  # fmt: skip
