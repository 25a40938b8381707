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
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError, UserError

if TYPE_CHECKING:
    from draftwood.tools.prompts import Prompt

# Levels and candidates of the tree whose steps are counted, as far as the drafter reaches.
LEVELS, CANDIDATES = 5, 4
# Rows that are timed beside that tree's, and nodes of the largest tree that is planned.
ROWS, NODES = "1,2,3,4,5,6,8,12,16", 15
SAMPLED = 0.8
# Long copies of the prompt; a plan says which other trees are worth their rows.
LOOKED_UP = ("lookup:chain:3", "lookup:chain:7", "lookup:chain:15")
BESIDE = LOOKED_UP[1]
# So many prompts of a file are used, and of its conversations every fourth judges and is not counted.
MOST, JUDGES = 64, 4
COUNTED, JUDGING = "counted.jsonl", "judging.jsonl"


class StageError(UserError):
    """A stage has failed; its own output says why."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One command line. ``makes`` is the file or folder that is there once it is done; its figures are kept."""

    name: str
    words: tuple[str, ...]
    makes: Path
    why: str

    @property
    def line(self) -> str:
        """As one would type it."""
        return shlex.join(("draftwood", *self.words))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, or demo")
    parser.add_argument("--drafter", metavar="DIR", help="its drafter; without one, trees are looked up in the text")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"like those to be served, {MOST} at most (default: built in)"
    )
    parser.add_argument("--kv", default="1024", metavar="C[,C...]", help="KV lengths in slots (default: 1024)")
    parser.add_argument(
        "--precision",
        default="exact",
        choices=("exact", "nbits", "w8a8"),
        help="of a four-bit teacher, as build has it",
    )
    parser.add_argument("--device", metavar="NAME", help="plan and lower for it, such as ascend-910b3")
    parser.add_argument("--out", required=True, type=Path, metavar="BUNDLE", help="folder to make; must not exist")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise RequestError(f"{args.out}: exists already; expected a new folder; remove it or choose another --out")
    work = args.out.with_name(f"{args.out.name}.make")
    work.mkdir(parents=True, exist_ok=True)
    _split_prompts(args, work)
    stages = list(stages_of(args, work))
    done = _kept(stages, work)
    for number, stage in enumerate(stages, 1):
        if number > done:
            _run(stage, number, len(stages), work)
            _keep(stages[:number], work)
    report = _report(args, stages, work)
    (work / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report) if args.json else _page(report))
    return 0 if report["ok"] else 1


def stages_of(args: argparse.Namespace, work: Path) -> Iterator[Stage]:
    """The command lines, in order."""
    source = ("--model", args.model, *(("--drafter", args.drafter) if args.drafter else ()))
    target = ("--target", "onnx,ge") if args.device else ()
    tree = ",".join(LOOKED_UP)
    if args.drafter:
        yield from _planning(args, work, source)
        tree = f"plan:{work / 'plan.json'},{BESIDE}"
    made = ("--tree", tree, "--kv", args.kv, *target, *_precision(args), "--out", str(args.out))
    yield Stage("build", ("build", *source, *made), args.out, "freezes teacher, drafter and trees")
    yield Stage("check", ("check", str(args.out)), args.out / "check.json", "holds every graph to eager PyTorch")
    yield Stage("tune", ("tune", str(args.out)), work / "tune.txt", "times every gear on this machine")
    judging = ("--prompts", str(work / JUDGING))
    yield Stage("bench", ("bench", str(args.out), *judging, "--json"), work / "bench.json",
                "compares with plain decoding on prompts that were not counted")  # fmt: skip


def _planning(args: argparse.Namespace, work: Path, source: Sequence[str]) -> Iterator[Stage]:
    """The stages from a drafter to a plan."""
    first, latency, plan = work / "first", work / "latency.json", work / "plan.json"
    counted = ("--prompts", str(work / COUNTED))
    wide = ("--tree", _counting_tree(args), "--kv", args.kv.split(",")[-1], *_precision(args), "--out", str(first))
    yield Stage("first bundle", ("build", *source, *wide), first, "has one wide tree, to count with")
    stats = work / "greedy.stats", work / "sampled.stats"
    for out, temperature in zip(stats, (0, SAMPLED), strict=True):
        counts = ("calibrate", str(first), *counted, "--temperature", f"{temperature:g}", "--out", str(out))
        yield Stage(f"counts, {out.stem}", counts, out, "counts what the teacher takes of the drafts")
    words: tuple[str, ...]
    if args.device:
        words = ("profile", "--device", args.device, *source, "--kv", args.kv, "--out", str(latency))
        yield Stage("times", words, latency, f"models steps on {args.device}")
    else:
        words = ("profile", str(first), "--rows", ROWS, "--out", str(latency))
        yield Stage("times", words, latency, "times steps of so many rows here")
    files = ("--stats", *map(str, stats), "--latency", str(latency))
    words = ("plan", *files, "--max-nodes", str(NODES), "--explain", "--out", str(plan))
    yield Stage("plan", words, plan, "chooses trees and gears")


def _precision(args: argparse.Namespace) -> tuple[str, ...]:
    return () if args.precision == "exact" else ("--precision", args.precision)


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


def _split_prompts(args: argparse.Namespace, work: Path) -> None:
    """Whole conversations to count with, and others to judge by."""
    from draftwood.tools.prompts import read_prompts

    prompts = read_prompts(args.prompts, MOST)
    names = list(dict.fromkeys(prompt.conversation for prompt in prompts))
    judging = set(names[JUDGES - 1 :: JUDGES])
    if not judging:
        raise RequestError(f"--prompts: {len(names)} conversations; expected at least {JUDGES}, of which one judges")
    _write_prompts(work / COUNTED, [one for one in prompts if one.conversation not in judging])
    _write_prompts(work / JUDGING, [one for one in prompts if one.conversation in judging])


def _write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    rows = ({"prompt" if name == "text" else name: value for name, value in asdict(one).items()} for one in prompts)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _kept(stages: Sequence[Stage], work: Path) -> int:
    """How many stages, from the first on, are there as they would be made now."""
    try:
        before = json.loads((work / "stages.json").read_text())
    except (OSError, ValueError):
        before = []
    now = _marks(stages, work)
    done = 0
    while done < min(len(before), len(now)) and before[done] == now[done] and stages[done].makes.exists():
        done += 1
    return done


def _marks(stages: Sequence[Stage], work: Path) -> list[list[Any]]:
    """What decides a stage's output: its words, and the prompts."""
    prompts = [(work / name).read_text() for name in (COUNTED, JUDGING)]
    return [[stage.line, prompts] for stage in stages]


def _keep(stages: Sequence[Stage], work: Path) -> None:
    (work / "stages.json").write_text(json.dumps(_marks(stages, work)))


def _run(stage: Stage, number: int, count: int, work: Path) -> None:
    """Runs a stage in a process of its own, which gives its memory back; standard output becomes its file of figures.

    Raises:
        StageError: it failed.
    """
    print(f"[{number}/{count}] {stage.name}: {stage.why}\n    {stage.line}", file=sys.stderr, flush=True)
    _remove(stage.makes)
    began, printed = time.monotonic(), work / f"{number}.out"
    with printed.open("wb") as out:
        code = subprocess.call([sys.executable, "-P", "-m", "draftwood.tools.cli", *stage.words], stdout=out)
    if code and stage.name not in ("check", "bench"):  # these say no in their report
        raise StageError(f"{stage.name} failed ({code}): {stage.line}; mend what it says, and run make again to go on")
    if stage.makes.exists():
        printed.unlink()
    elif code > 1 or code < 0:
        raise StageError(f"{stage.name} failed ({code}): {stage.line}; mend what it says, and run make again to go on")
    else:
        printed.rename(stage.makes)
    print(f"    {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


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
    check, bench = report["check"], report["bench"]
    equal = f"{bench['identical']} of {bench['turns']} answers are plain decoding's"
    equal += f", {bench['ties']} differ by numeric ties" if bench["ties"] else ""
    lines = [
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
