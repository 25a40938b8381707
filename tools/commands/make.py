"""``draftwood make``: from a checkpoint to the bundle that suits it, by the commands that one would type oneself.

With a drafter: a first bundle answers prompts, and what its steps accept is counted; its steps are timed, or modelled
for a device that is not here; trees and gears are planned from both, built, checked, timed once more for the policy,
and compared with plain decoding on prompts that nothing was planned from. Without one, trees are looked up in the text.

Each stage is one command with one output in ``BUNDLE.make/``. What is there already is kept, so that a stopped ``make``
goes on where it stood; a stage whose command has changed is made again, and so are those behind it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.tools.commands.build import PRECISIONS
from draftwood.tools.stages import Stage, kept, run
from draftwood.trees.spec import LONG_ROWS, LOOKUPS

if TYPE_CHECKING:
    from draftwood.tools.prompts import Prompt

# Levels and candidates of the tree whose steps are counted, as far as the drafter reaches.
LEVELS, CANDIDATES = 5, 4
# Rows that are timed beside that tree's, and nodes of the largest tree that is planned.
ROWS, NODES = "1,2,3,4,5,6,8,12,16", 15
SAMPLED = 0.8
# So many prompts of a file are used, and of its conversations every fourth judges and is not counted.
MOST, JUDGES = 64, 4
COUNTED, JUDGING = "counted.jsonl", "judging.jsonl"
# The precision that is chosen by what is measured.
BEST = "best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, a GGUF file, or demo")
    parser.add_argument("--drafter", metavar="DIR", help="its drafter; without one, trees are looked up in the text")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"like those to be served, {MOST} at most (default: built in)"
    )
    parser.add_argument("--kv", default="1024", metavar="C[,C...]", help="KV lengths in slots (default: 1024)")
    parser.add_argument(
        "--precision",
        default="exact",
        choices=(*PRECISIONS, BEST),
        help="of a quantised teacher, as build has it; best makes all of them and takes the fastest, by what is"
        " measured here, with what each rounds",
    )
    parser.add_argument("--int8-drafter", action="store_true", help="as for build; best tries it by itself")
    parser.add_argument("--device", metavar="NAME", help="plan and lower for it, such as ascend-910b3")
    parser.add_argument("--out", required=True, type=Path, metavar="BUNDLE", help="folder to make; must not exist")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    _check(args)
    work = args.out.with_name(f"{args.out.name}.make")
    work.mkdir(parents=True, exist_ok=True)
    given = _split_prompts(args, work)
    if args.precision == BEST:
        from draftwood.tools.best import best

        report = best(args, work, given)
    else:
        stages = list(stages_of(args, work))
        # What another command has made is not overwritten; a build of these stages is gone on from.
        if args.out.exists() and args.out not in [one.makes for one in stages[: kept(stages, work, given)]]:
            raise _taken(args.out)
        run(stages, work, given)
        report = _report(args, stages, work)
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if args.json else _page(report))
    return 0 if report["ok"] else 1


def stages_of(args: argparse.Namespace, work: Path) -> Iterator[Stage]:
    """The command lines, in order."""
    specs = [spec for rows, spec in LOOKUPS.items() if (LONG_ROWS if args.drafter else 1) <= rows <= _most_rows(args)]
    if args.drafter:
        yield from _planning(args, work)
        specs.insert(0, f"plan:{work / 'plan.json'}")
    tree = ",".join(specs)
    made, here = ("--tree", tree, "--kv", args.kv), args.out
    why = "freezes teacher, drafter and trees"
    if args.device and args.precision.startswith("nbits"):
        # Packed weights are laid out for one target; the trees are judged in the same four bits on this machine.
        here = work / "here"
        yield _build(args, "build", args.out, why, *made, "--target", "ge")
        yield _build(args, "build for this machine", here, "has the same trees, to compare texts with", *made)
    else:
        yield _build(args, "build", args.out, why, *made, *(("--target", "onnx,ge") if args.device else ()))
    checks = "holds every graph to eager PyTorch"
    yield Stage("check", ("check", str(args.out)), args.out / "check.json", checks, judges=True)
    yield Stage("tune", ("tune", str(here)), work / "tune.txt", "times every gear on this machine")
    judging = ("bench", str(here), "--prompts", str(work / JUDGING), "--json")
    why = "compares with plain decoding on prompts that were not counted"
    yield Stage("bench", judging, work / "bench.json", why, judges=True)


def _planning(args: argparse.Namespace, work: Path) -> Iterator[Stage]:
    """The stages from a drafter to a plan."""
    first, latency, plan = work / "first", work / "latency.json", work / "plan.json"
    counted = ("--prompts", str(work / COUNTED))
    wide = ("--tree", _counting_tree(args), "--kv", args.kv.split(",")[-1])
    yield _build(args, "first bundle", first, "has one wide tree, to count with", *wide)
    stats = work / "greedy.stats", work / "sampled.stats"
    for out, temperature in zip(stats, (0, SAMPLED), strict=True):
        counts = ("calibrate", str(first), *counted, "--temperature", f"{temperature:g}", "--out", str(out))
        yield Stage(f"counts, {out.stem}", counts, out, "counts what the teacher takes of the drafts")
    words: tuple[str, ...]
    if args.device:
        modelled = (*_source(args), *_precision(args), "--kv", args.kv)
        words = ("profile", "--device", args.device, *modelled, "--out", str(latency))
        yield Stage("times", words, latency, f"models steps on {args.device}")
    else:
        words = ("profile", str(first), "--rows", ROWS, "--out", str(latency))
        yield Stage("times", words, latency, "times steps of so many rows here")
    files = ("--stats", *map(str, stats), "--latency", str(latency))
    nodes = str(min(NODES, _most_rows(args) - 1))
    words = ("plan", *files, "--max-nodes", nodes, "--explain", "--out", str(plan))
    yield Stage("plan", words, plan, "chooses trees and gears")


def _build(args: argparse.Namespace, name: str, out: Path, why: str, *more: str) -> Stage:
    drafter = ("--int8-drafter",) if args.int8_drafter else ()
    return Stage(name, ("build", *_source(args), *more, *_precision(args), *drafter, "--out", str(out)), out, why)


def _source(args: argparse.Namespace) -> tuple[str, ...]:
    return ("--model", args.model, *(("--drafter", args.drafter) if args.drafter else ()))


def _precision(args: argparse.Namespace) -> tuple[str, ...]:
    return () if args.precision == "exact" else ("--precision", args.precision)


def _most_rows(args: argparse.Namespace) -> int:
    """Rows of a tree at most: an NPU's kernel gives rows the same bits up to an eighth of a group of packed weights."""
    if not args.device or not args.precision.startswith("nbits"):
        return max(LOOKUPS)
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.kept import in_precision
    from draftwood.kernels.int4 import most_rows
    from draftwood.tools.demo import resolve

    config = in_precision(Checkpoint.open(resolve(args.model)), "nbits", npu=True).config
    return min(most_rows(one.group) for one in config.packed if one.group)


def _check(args: argparse.Namespace) -> None:
    """Before anything is made: RequestError where options do not go together, CheckpointError for a wrong MODEL."""
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve

    if args.precision == BEST and (args.device or args.int8_drafter):
        raise RequestError(
            "--precision best: chooses by what this machine measures, and tries the drafter in eight bits by itself;"
            " leave --device and --int8-drafter out, or name a precision"
        )
    if args.precision == BEST and args.out.exists():
        raise _taken(args.out)
    if args.int8_drafter and args.device:
        raise RequestError("--int8-drafter: its steps are not modelled for a --device; leave one of the two out")
    Checkpoint.open(resolve(args.model))


def _taken(out: Path) -> RequestError:
    return RequestError(f"{out}: exists already; expected a new folder; remove it or choose another --out")


def _counting_tree(args: argparse.Namespace) -> str:
    """The deepest tree that the drafter can draft.

    Raises:
        CheckpointError: teacher or drafter cannot be used.
        RequestError: the drafter can draft no tree.
    """
    from draftwood.compiler.drafters.registry import check_tree, open_drafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.errors import TreeError
    from draftwood.tools.demo import resolve
    from draftwood.trees import parse_specs

    teacher = Checkpoint.open(resolve(args.model))
    drafter, refusal = open_drafter(resolve(args.drafter), teacher).model, ""
    for levels in range(LEVELS, 0, -1):
        spec = f"backbone:{levels}:{CANDIDATES}"
        try:
            check_tree(drafter, spec, parse_specs(spec)[1][1], teacher.config)
        except TreeError as error:
            refusal = str(error)
        else:
            return spec
    raise RequestError(f"--drafter {args.drafter}: drafts no tree of {CANDIDATES} candidates: {refusal}")


def _split_prompts(args: argparse.Namespace, work: Path) -> list[str]:
    """Whole conversations to count with, and others to judge by: both files' text."""
    from draftwood.tools.prompts import read_prompts

    prompts = read_prompts(args.prompts, MOST)
    names = list(dict.fromkeys(prompt.conversation for prompt in prompts))
    judging = set(names[JUDGES - 1 :: JUDGES])
    if not judging:
        raise RequestError(f"--prompts: {len(names)} conversations; expected at least {JUDGES}, of which one judges")
    parts = {
        COUNTED: [one for one in prompts if one.conversation not in judging],
        JUDGING: [one for one in prompts if one.conversation in judging],
    }
    return [_write_prompts(work / name, part) for name, part in parts.items()]


def _write_prompts(path: Path, prompts: Sequence[Prompt]) -> str:
    rows = ({"prompt" if name == "text" else name: value for name, value in asdict(one).items()} for one in prompts)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return text


def _report(args: argparse.Namespace, stages: Sequence[Stage], work: Path) -> dict[str, Any]:
    from draftwood.runtime.bundle import Bundle

    checked, judged = (json.loads(path.read_text()) for path in (args.out / "check.json", work / "bench.json"))
    bundle = Bundle.open(args.out)
    return {
        "ok": bool(checked["ok"] and judged["ok"]),
        "bundle": str(args.out),
        "gears": [gear.name for gear in bundle.manifest.gears],
        "check": {name: checked[name] for name in ("ok", "mutations", "mutations_caught")},
        "bench": {
            name: judged[name]
            for name in ("ok", "turns", "identical", "ties", "speedup", "accept_length", "plain_tokens_per_s",
                         "speculative_tokens_per_s")
        },
        "pictures": sorted(str(path) for path in work.glob("*.png")),
        "commands": [stage.line for stage in stages],
    }  # fmt: skip


def _page(report: dict[str, Any]) -> str:
    from draftwood.tools.best import table

    check, bench = report["check"], report["bench"]
    equal = f"{bench['identical']} of {bench['turns']} answers are plain decoding's"
    equal += f", {bench['ties']} differ by numeric ties" if bench["ties"] else ""
    lines = [
        *([table(report)] if "forms" in report else []),
        f"bundle     {report['bundle']}",
        f"gears      {', '.join(report['gears'])}",
        f"check      {'passed' if check['ok'] else 'FAILED'}; {check['mutations_caught']} of {check['mutations']}"
        " deliberate faults caught",
        f"bench      {equal}{'' if bench['ok'] else '; FAILED'}",
        f"speed-up   {bench['speedup']['mean']:.2f} as the mean of the answers; {bench['accept_length']['mean']:.2f}"
        " tokens a step",
        *(f"picture    {path}" for path in report["pictures"]),
        "",
        "made by",
        *(f"  {line}" for line in report["commands"]),
    ]
    return "\n".join(lines)
