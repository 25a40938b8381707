"""``make --precision best``: the same teacher made in every precision that it can be kept in; the measured fastest one.

A precision that rounds is another function than the checkpoint's exact numbers, so none is taken for a gain that a
busy machine could have made, and what each rounds is measured and said. A teacher of plain numbers stays in fp32. The
drafter's precision changes no text: in the end it is tried in eight bits beside what was chosen.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.tools.stages import Stage, StageError, run

# So much faster has to be what rounds more.
GAIN = 1.05
INT8_DRAFTER = "--int8-drafter"
# By whether the checkpoint's rows are rounded already.
ROUNDS = {
    ("exact", False): "nothing",
    ("nbits", False): "rows, to int8 with a scale for every 32 inputs",
    ("w8a8", False): "rows, to int8 with a scale each, and weights once more, to int8 with a scale an output",
    ("exact", True): "rows, to int8 with a scale each, as the checkpoint says",
    ("nbits", True): "rows, to int8 with a scale for every 32 inputs in the place of one",
}


@dataclass(frozen=True, slots=True)
class Form:
    """A precision of the teacher, with the drafter in eight bits or not."""

    precision: str
    int8_drafter: bool = False

    @property
    def name(self) -> str:
        return f"{self.precision}{INT8_DRAFTER[1:] if self.int8_drafter else ''}"

    @property
    def words(self) -> tuple[str, ...]:
        return ("--precision", self.precision, *((INT8_DRAFTER,) if self.int8_drafter else ()))


def best(args: argparse.Namespace, work: Path, given: Sequence[str]) -> dict[str, Any]:
    """Makes every form in a folder of ``work``, and moves the chosen one's bundle to ``args.out``.

    Raises:
        StageError: of no form is there a bundle that passes check and bench.
    """
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve

    teacher = Checkpoint.open(resolve(args.model))
    rows_rounded = bool(teacher.config.quantised)
    names = ("nbits", "w8a8", "exact") if teacher.packed else ("nbits", "exact") if rows_rounded else ("exact",)
    rounding = _rounding(args, work, given) if len(names) > 1 else {}
    found = {form: _tried(args, work, given, form, rounding) for form in map(Form, names)}
    if args.drafter and (form := chosen(found)):
        eight = Form(form.precision, int8_drafter=True)
        found[eight] = _tried(args, work, given, eight, rounding)
    if not (form := chosen(found)):
        raise StageError(f"--precision best: none of {', '.join(names)} could be made and passes; see what they said")
    folder = work / form.name
    report = {
        **json.loads((folder / "bundle.make/report.json").read_text()),
        "bundle": str(args.out),
        "chosen": form.name,
        "forms": [one | {"rounds": ROUNDS[form.precision, rows_rounded]} for form, one in found.items()],
        "commands": [shlex.join(("draftwood", *_words(args, form, args.out)))],
    }
    (folder / "bundle").rename(args.out)
    return report


def chosen(found: Mapping[Form, Mapping[str, Any]]) -> Form | None:
    """Of the forms that are as they should be, the one that rounds least of those that are about as fast as any."""
    able = {form: one for form, one in found.items() if one["ok"]}
    fastest = max((one["tokens_per_s"] for one in able.values()), default=0.0)
    least = sorted(able, key=lambda form: -(able[form]["difference"] or {"agreement": 1.0})["agreement"])
    return next((form for form in least if GAIN * able[form]["tokens_per_s"] >= fastest), None)


def _rounding(args: argparse.Namespace, work: Path, given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By precision, how it differs from the checkpoint's own function."""
    from draftwood.tools.prompts import BUILT_IN

    out = work / "rounding.json"
    words = ("quantize", "--model", args.model, "--calibration", str(args.prompts or BUILT_IN), "--json")
    run([Stage("rounding", words, out, "holds every precision to the exact numbers")], work, given)
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


def _tried(
    args: argparse.Namespace, work: Path, given: Sequence[str], form: Form, rounding: Mapping[str, Any]
) -> dict[str, Any]:
    """What a form measured, made by a command of its own; one that this machine cannot make or run is left out."""
    folder, said = work / form.name, ""
    folder.mkdir(exist_ok=True)
    out = folder / "bundle"
    why = "counts, times, plans, builds and judges the teacher so"
    try:
        run([Stage(form.name, _words(args, form, out), out, why, judges=True)], folder, given)
    except StageError as error:
        said = str(error)
        print(f"left out: {said}", file=sys.stderr, flush=True)
    report = {} if said else json.loads((folder / "bundle.make/report.json").read_text())
    bench = report.get("bench", {})
    return {
        "form": form.name,
        "ok": report.get("ok", False),
        "failed": said or None,
        "tokens_per_s": bench.get("speculative_tokens_per_s"),
        "plain_tokens_per_s": bench.get("plain_tokens_per_s"),
        "tokens_a_step": bench["accept_length"]["mean"] if bench else None,
        "gears": report.get("gears", []),
        "difference": rounding.get(form.precision),
    }


def _words(args: argparse.Namespace, form: Form, out: Path) -> tuple[str, ...]:
    drafter = ("--drafter", args.drafter) if args.drafter else ()
    prompts = ("--prompts", str(args.prompts)) if args.prompts else ()
    return ("make", args.model, *drafter, *prompts, "--kv", args.kv, *form.words, "--out", str(out))


def table(report: Mapping[str, Any]) -> str:
    """The forms side by side, and why one was chosen."""
    rows = [("precision", "tokens/s", "plain", "tokens a step", "perplexity", "same best token", "rounds")]
    for one in report["forms"]:
        names = ("tokens_per_s", "plain_tokens_per_s", "tokens_a_step")
        speeds = ("failed", "", "") if one["failed"] else tuple(f"{one[name]:.2f}" for name in names)
        far = one["difference"]
        told = (f"{100 * far['worse']:+.2f} %", f"{100 * far['agreement']:.2f} %") if far else ("", "")
        rows.append((one["form"], *speeds, *told, one["rounds"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    why = f"within {100 * GAIN - 100:.0f} % of the fastest, and of those it rounds least"
    return "\n".join((*lines, f"chosen     {report['chosen']}: {why}"))
