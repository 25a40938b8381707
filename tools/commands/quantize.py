"""``draftwood quantize``: a teacher in, the same in W8A8 out, and how much it differs.

For a four-bit teacher it also says how much its packed layers with rows in int8 differ from their exact product.
Without ``--out`` nothing is written, and only the precisions that a build makes of the teacher are compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import RequestError
from draftwood.files import json_text

if TYPE_CHECKING:
    from torch import Tensor

    from draftwood.compiler.quantisation.report import TeacherDifference
    from draftwood.compiler.quantisation.writing import Layout
    from draftwood.compiler.teachers.checkpoint import Checkpoint

REPORT = "quantisation.json"
# At most so many texts, and tokens of a text, are calibrated with.
_TEXTS, _TOKENS = 64, 256
# Tokens of a text that precisions are compared on.
_LONGEST = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, or demo")
    parser.add_argument(
        "calibration",
        type=Path,
        metavar="TEXTS",
        help="a file to calibrate with, a JSON object a line with text, prompt, question, turns or messages; on every"
        f" fourth, which is withheld, the result is compared with the original ({REPORT})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="folder to make; must not exist; without it, the teacher is compared with what build --precision makes of"
        " it",
    )  # fmt: skip
    parser.add_argument("--head", action="store_true", help="quantise the output matrix, too")
    parser.add_argument(
        "--layout",
        choices=("compressed-tensors", "msmodelslim"),
        help="as vLLM reads it (default), or as vllm-ascend does",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.compiler.quantisation.report import difference
    from draftwood.compiler.quantisation.teacher import Request, quantise
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.conversion import in_precision
    from draftwood.tools.calibration_texts import read_texts
    from draftwood.tools.demo import resolve
    from draftwood.tools.making.needs import check_ids
    from draftwood.tools.tokenizers import tokenizer_of

    if args.out is None and (args.head or args.layout):
        raise RequestError("--head, --layout: say how a teacher is written; expected them with --out")
    model = resolve(args.model)
    layout: Layout = args.layout or "compressed-tensors"
    original = Checkpoint.open(model)
    texts = read_texts(args.calibration, tokenizer_of(model), _TEXTS, _TOKENS)
    vocabulary = Checkpoint.open(model).config.vocabulary
    for text in (*texts.calibration, *texts.withheld):
        check_ids(model, text.tolist(), vocabulary)
    if args.out is None:
        return _compare(original, [*texts.calibration, *texts.withheld], args.json)
    request = Request(model=model, texts=texts.calibration, layout=layout, head=args.head)
    quantised = quantise(request, args.out, _say)
    measured = difference(original, quantised, texts.withheld, _say)
    figures = measured.figures()
    packed = difference(original, in_precision(original, "nbits"), texts.withheld, _say) if original.packed else None
    if packed:
        figures["nbits"] = packed.figures()
    (args.out / REPORT).write_text(json_text(figures, indent=2) + "\n")
    summary: dict[str, object] = {
        "folder": str(args.out),
        "layout": layout,
        "quantised": len(quantised.config.quantised),
        "bytes": _bytes(args.out),
        "difference": figures,
    }
    print(json_text(summary) if args.json else _text(summary, measured, packed))
    return 0


def _compare(original: Checkpoint, texts: list[Tensor], as_json: bool) -> int:
    """Compares every precision of a teacher with its own function, on all texts."""
    from draftwood.compiler.quantisation.report import differences
    from draftwood.compiler.teachers.conversion import in_precision
    from draftwood.compiler.teachers.precisions import precisions

    others: dict[str, Checkpoint] = {
        name: in_precision(original, name) for name in precisions(original) if name != "exact"
    }
    if not others:
        raise RequestError(f"{original.path}: has no layer that is rounded or kept packed; nothing to compare")
    measured = differences(original, others, _joined(texts, min(_LONGEST, original.config.max_positions)), _say)
    if as_json:
        print(json_text({name: figures.figures() for name, figures in measured.items()}))
    else:
        print("\n".join(f"{name}: {_said(figures)}" for name, figures in measured.items()))
    return 0


def _joined(texts: list[Tensor], longest: int) -> list[Tensor]:
    """All tokens in as few texts as possible, since every text reads all weights."""
    import torch

    return list(torch.cat(texts).split(longest))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _say(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)


def _text(summary: dict[str, object], difference: TeacherDifference, packed: TeacherDifference | None) -> str:
    size = summary["bytes"]
    assert isinstance(size, int)
    lines = [
        f"{summary['folder']}: {summary['quantised']} linear layers in int8, {size / 1e6:.1f} MB",
        _said(difference),
    ]
    if packed:
        lines.append(f"built with --precision nbits from the packed weights: {_said(packed)}")
    return "\n".join(lines)


def _said(difference: TeacherDifference) -> str:
    return "\n".join(
        (
            f"perplexity {difference.perplexity:.3f}, original {difference.original_perplexity:.3f}"
            f" ({100 * difference.worse:+.2f} %), on {difference.tokens} tokens of {difference.texts} texts",
            f"best tokens alike at {100 * difference.agreement:.2f} % of positions; states differ by"
            f" {100 * difference.errors[-1]:.2f} % after the last block",
        )
    )
