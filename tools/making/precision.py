"""``make --precision best``: the fastest precision on this machine of those that cost little enough quality.

By bytes alone nobody can tell: four bits are the fastest for one row, eight for trees and for several sequences. So
the steps of all are timed here, in turns, and each one's perplexity is held to the exact numbers'. The chosen one is
made and judged; if that fails, the next one. The drafter's precision changes no text: in the end it is tried in eight
bits besides its own.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.tools.made_from import MadeFrom, read_note
from draftwood.tools.making.stages import Stage, StageError, run

if TYPE_CHECKING:
    from draftwood.compiler.teachers.conversion import Precision

# By so much the perplexity may rise: less than a tenth of the cost of four bits with a scale alone for SmolLM2-135M.
LIMIT = 0.03
# A precision that rounds more has to be so much faster, or a busy machine could have made the difference.
GAIN = 1.05
INT8_DRAFTER = "--int8-drafter"
# Sequences and rows of the steps that count alike: of one sequence and of eight, without drafts and with a tree. The
# tree is of the middle size of those that are built.
STEPS = ((1, 1), (1, 8), (8, 1), (8, 8))
# By whether the checkpoint's rows are rounded already.
ROUNDS = {
    ("exact", False): "nothing",
    ("nbits", False): "rows, to int8 with a scale for every 32 inputs, and plain weights, as inspect says",
    ("nbits8", False): "rows and weights, to int8 with a scale for every 32 inputs",
    ("w8a8", False): "rows, to int8 with a scale each, and weights, to int8 with a scale an output",
    ("exact", True): "rows, to int8 with a scale each, as the checkpoint says",
    ("nbits", True): "rows, to int8 with a scale for every 32 inputs instead of one",
}


@dataclass(frozen=True, slots=True)
class TeacherForm:
    """A precision of the teacher, with the drafter in eight bits or not."""

    precision: str
    int8_drafter: bool = False

    @property
    def name(self) -> str:
        return f"{self.precision}{INT8_DRAFTER[1:] if self.int8_drafter else ''}"

    @property
    def words(self) -> tuple[str, ...]:
        return ("--precision", self.precision, *((INT8_DRAFTER,) if self.int8_drafter else ()))


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of a precision: ms of each of ``STEPS``, and its difference from the exact numbers, None of these."""

    ms: tuple[float, ...]
    difference: Mapping[str, Any] | None

    @property
    def mean_ms(self) -> float:
        """Geometric, so that a step counts by its ratio."""
        return math.exp(sum(map(math.log, self.ms)) / len(self.ms)) if self.ms else math.inf

    @property
    def agreement(self) -> float:
        return self.difference["agreement"] if self.difference else 1.0


def best(args: argparse.Namespace, work: Path, given: MadeFrom) -> tuple[Path, dict[str, Any]]:
    """Makes the chosen form: where its bundle is, and the report of the one at ``args.out``.

    Raises:
        StageError: of no form is there a bundle that passes check and bench.
    """
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve
    from draftwood.tools.making.needs import fitting

    teacher = Checkpoint.open(resolve(args.model))
    sizes = fitting(teacher)
    measured = _measured(args, work, given, sizes) if len(sizes) > 1 else {name: Measured((), None) for name in sizes}
    tried: dict[TeacherForm, dict[str, Any]] = {}
    if not (ranked := ranking(measured)):
        raise StageError(
            f"--precision best: perplexity rises by more than {LIMIT:.0%} with each of {', '.join(sizes)}, which fit"
            " here; name one of them with --precision to take it all the same"
        )
    for name in ranked:
        tried[TeacherForm(name)] = _tried(args, work, given, TeacherForm(name))
        if tried[TeacherForm(name)]["ok"]:
            break
    form = next((form for form, figures in tried.items() if figures["ok"]), None)
    if form is None:
        raise StageError(f"--precision best: none of {', '.join(sizes)} could be made and passes; see what they said")
    if args.drafter:
        eight = TeacherForm(form.precision, int8_drafter=True)
        tried[eight] = _tried(args, work, given, eight)
        if tried[eight]["ok"] and tried[eight]["tokens_per_s"] > GAIN * tried[form]["tokens_per_s"]:
            form = eight
    rows_rounded = bool(teacher.config.quantised)
    report = {
        **read_note(work / form.name / "bundle.make/report.json", dict),
        "bundle": str(args.out),
        "chosen": form.name,
        "limit": LIMIT,
        "precisions": [_row(name, times) | {"rounds": ROUNDS[name, rows_rounded]} for name, times in measured.items()],
        "forms": [{"form": made.name, **figures} for made, figures in tried.items()],
        "commands": [shlex.join(("draftwood", *_words(args, form, args.out)))],
    }
    return work / form.name / "bundle", report


def ranking(found: Mapping[Precision, Measured]) -> list[Precision]:
    """The precisions within the limit, the first to be made first: of those about as fast as the fastest, the one that
    rounds least."""
    left = [name for name, measured in found.items() if measured.ms and not _too_far(measured)]
    ranked: list[Precision] = []
    while left:
        fastest = min(found[name].mean_ms for name in left)
        near = [name for name in left if found[name].mean_ms <= GAIN * fastest]
        ranked.append(max(near, key=lambda name: found[name].agreement))
        left.remove(ranked[-1])
    # A precision that could not be timed comes last, and is made if no other can be.
    return ranked + [name for name, measured in found.items() if not measured.ms and not _too_far(measured)]


def _too_far(one: Measured) -> bool:
    return one.difference is not None and one.difference["worse"] > LIMIT


def _row(name: str, one: Measured) -> dict[str, Any]:
    return {"precision": name, "ms": list(one.ms), "difference": one.difference, "within": not _too_far(one)}


def _measured(
    args: argparse.Namespace, work: Path, given: MadeFrom, sizes: Mapping[Precision, int]
) -> dict[Precision, Measured]:
    """Perplexity and step times of every precision; of one that this machine cannot time, perplexity alone."""
    from draftwood.tools.making.needs import fit_together

    rounding = _rounding(args, work, given)
    # In turns, so that a machine's other work slows all alike; each alone if they do not fit together, or one fails.
    times = _timed(args, work, given, tuple(sizes)) if fit_together(sizes) else {}
    for name in sizes:
        times = times if name in times else times | _timed(args, work, given, (name,))
    return {name: Measured(times.get(name, ()), rounding.get(name)) for name in sizes}


def _timed(
    args: argparse.Namespace, work: Path, given: MadeFrom, names: Sequence[Precision]
) -> dict[Precision, tuple[float, ...]]:
    """Milliseconds of ``STEPS`` by precision; nothing if this machine cannot time them."""
    from draftwood.trees.latency import LatencyTable

    slots = args.kv.split(",")[0]
    texts, rows = ({str(step[place]) for step in STEPS} for place in (0, 1))
    folder = work / f"timed-{'-'.join(names)}"
    folder.mkdir(exist_ok=True)
    out = folder / "latency.json"
    files = {name: table_file(out, name, names) for name in names}
    shape = ("--kv", slots, "--rows", ",".join(sorted(rows)), "--batch-size", ",".join(sorted(texts)))
    words = ("profile", args.model, "--precision", ",".join(names), *shape, "--out", str(out))
    try:
        why = f"times steps here{', in turns' if len(names) > 1 else ''}"
        run([Stage(f"times of {', '.join(names)}", words, files[names[-1]], why)], folder, given)
    except StageError as error:
        print(f"not timed: {error}", file=sys.stderr, flush=True)
        return {}
    tables = {name: LatencyTable.from_json(path.read_text(), str(path)) for name, path in files.items()}
    return {
        name: tuple(1e3 * table.step_s(count, int(slots), many) for many, count in STEPS)
        for name, table in tables.items()
    }


def table_file(out: Path, precision: Precision, precisions: Sequence[Precision]) -> Path:
    """Where ``profile --out`` writes a precision's table: next to ``out`` if there are several."""
    return out.with_stem(f"{out.stem}-{precision}") if len(precisions) > 1 else out


def _rounding(args: argparse.Namespace, work: Path, given: MadeFrom) -> dict[str, dict[str, Any]]:
    """By precision, how it differs from the checkpoint's own function."""
    from draftwood.tools.calibration_texts import BUILT_IN, suffices
    from draftwood.tools.demo import resolve
    from draftwood.tools.tokenizers import tokenizer_of

    own = args.prompts is not None and suffices(args.prompts, tokenizer_of(resolve(args.model)))
    out = work / "rounding.json"
    words = ("quantize", args.model, str(args.prompts if own else BUILT_IN), "--json")
    run([Stage("rounding", words, out, "holds every precision to the exact numbers")], work, given)
    return read_note(out, dict)


def _tried(args: argparse.Namespace, work: Path, given: MadeFrom, form: TeacherForm) -> dict[str, Any]:
    """The measurements of a form, made by its own command; a form that does not run here is left out."""
    folder, failure = work / form.name, ""
    folder.mkdir(exist_ok=True)
    out, report = folder / "bundle", folder / "bundle.make/report.json"
    if not out.exists():  # it was moved, and is made again
        report.unlink(missing_ok=True)
    why = f"{'counts, times, plans, ' if args.drafter else ''}builds, checks and judges the teacher so"
    try:
        # Its report comes last; what it had made before it was stopped, it knows itself.
        run([Stage(form.name, _words(args, form, out), report, why, judges=True, whole=True)], folder, given)
    except StageError as error:
        failure = str(error)
        print(f"left out: {failure}", file=sys.stderr, flush=True)
    made = {} if failure else read_note(report, dict)
    bench = made.get("bench", {})
    return {
        "ok": made.get("ok", False),
        "failed": failure or None,
        "tokens_per_s": bench.get("speculative_tokens_per_s"),
        "plain_tokens_per_s": bench.get("plain_tokens_per_s"),
        "tokens_a_step": bench["accept_length"]["mean"] if bench else None,
        "gears": made.get("gears", []),
    }


def _words(args: argparse.Namespace, form: TeacherForm, out: Path) -> tuple[str, ...]:
    drafter = ("--drafter", args.drafter) if args.drafter else ()
    prompts = ("--prompts", str(args.prompts)) if args.prompts else ()
    return (
        "make",
        args.model,
        *drafter,
        *prompts,
        "--kv",
        args.kv,
        "--batch-size",
        str(args.batch_size),
        *form.words,
        "--out",
        str(out),
    )


def table(report: Mapping[str, Any]) -> str:
    """The precisions side by side, and why one was chosen."""
    titles = [f"ms {texts}x{rows}" for texts, rows in STEPS]
    lines = [("precision", *titles, "perplexity", "same best token", "rounds")]
    for entry in report["precisions"]:
        ms, far = (f"{value:.2f}" for value in entry["ms"]), entry["difference"]
        rounding = (f"{100 * far['worse']:+.2f} %", f"{100 * far['agreement']:.2f} %") if far else ("", "")
        lines.append((entry["precision"], *(tuple(ms) or ("",) * len(STEPS)), *rounding, entry["rounds"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    why = f"of those with a perplexity within {100 * report['limit']:.0f} % and within {100 * GAIN - 100:.0f} % of the"
    aligned = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in lines]
    shapes = f"ms {STEPS[-1][0]}x{STEPS[-1][1]}: a step of {STEPS[-1][0]} sequences with {STEPS[-1][1]} rows each"
    return "\n".join((*aligned, shapes, f"chosen     {report['chosen']}: {why} fastest it rounds least"))
