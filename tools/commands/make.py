"""``draftwood make``: from a checkpoint to the bundle that suits it, by the commands that a user would type.

With a drafter, a first bundle answers prompts, and the drafts that its steps accept are counted. Its steps are timed,
or modelled for a device that is not here. Trees and gears are planned from both, built, checked, and timed once more
for the policy. Last, they are compared with plain decoding on prompts that no plan has used. Without one, trees are
looked up in the text.

Each stage is one command with one output in ``BUNDLE.make/``. Existing results are kept, so a stopped ``make``
continues where it stood. A stage whose command has changed is made again, and so are the stages after it. If the files
that they read have changed, all are made again. After a check that fails nothing is tuned or compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.errors import RequestError
from draftwood.files import absolute_path, json_text, real_path, write_whole
from draftwood.manifest import MOST_TEXTS
from draftwood.tools.commands.build import PRECISIONS, parse_sizes
from draftwood.tools.made_from import WORK, MadeFrom, alone_in, changed, made_from, read_note
from draftwood.tools.making.stages import Stage, ours, run
from draftwood.tools.making.steps import COUNTED, JUDGING, PLAN, stages_of

if TYPE_CHECKING:
    from draftwood.compiler.teachers.conversion import Precision
    from draftwood.runtime.bundle import Bundle
    from draftwood.tools.prompts import Prompt

# So many prompts of a file are used, and of its conversations every fourth judges and is not counted.
MOST, JUDGES = 64, 4
REPORT = "report.json"
# Sequences that share a launch, of a bundle for this machine.
TEXTS = 8
# The precision that is chosen by measuring.
BEST = "best"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="teacher: a Hugging Face folder, a GGUF file, or demo")
    parser.add_argument("--drafter", metavar="DIR", help="its drafter; without one, drafts are looked up in the text")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=f"like those to be served, {JUDGES} conversations or more, {MOST} prompts at most (default: built in)",
    )
    parser.add_argument("--kv", default="1024", metavar="C[,C...]", help="KV lengths in slots (default: 1024)")
    parser.add_argument(
        "--precision",
        choices=(*PRECISIONS, BEST),
        help="as for build; best, the default here, times all of them and takes the fastest whose perplexity is near"
        " that of the exact numbers (default with --device or --int8-drafter: exact)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=f"graphs of up to N sequences a launch (default: {TEXTS}; with --device: 1)",
    )
    parser.add_argument("--int8-drafter", action="store_true", help="as for build; best tries it by itself")
    parser.add_argument("--device", metavar="NAME", help="plan and lower for it, such as ascend-910b3")
    parser.add_argument("--out", required=True, type=Path, metavar="BUNDLE", help="folder to make; must not exist")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    _complete(args)
    prompts = _check(args)
    work = args.out.parent / f"{args.out.name}{WORK}"
    _check_out(args, work)  # and once more when nobody else works there: nothing is written next to another's folder
    work.mkdir(parents=True, exist_ok=True)
    with alone_in(work):
        return _make(args, prompts, work)


def _make(args: argparse.Namespace, prompts: Sequence[Prompt], work: Path) -> int:
    """Makes what is missing and reports it."""
    _split_prompts(prompts, work)
    inputs = _given(args)
    _check_out(args, work)
    if args.precision == BEST:
        from draftwood.tools.making.precision import best

        chosen, report = (None, finished) if (finished := _finished(args, work)) else best(args, work, inputs)
    else:
        stages = list(stages_of(args, work))
        run(stages, work, inputs)
        chosen, report = None, _report(args, stages, work)
    report["from"] = _asked(args)
    write_whole(work / REPORT, json_text(report, indent=1).encode() + b"\n")
    if chosen:
        chosen.rename(args.out)
    print(json_text(report) if args.json else _page(report))
    return 0 if report["ok"] else 1


def _check_out(args: argparse.Namespace, work: Path) -> None:
    """RequestError if a bundle is there that this command did not make, or made of something else and finished."""
    if not os.path.lexists(args.out):
        return
    before = _finished(args, work)
    if before is None and not (args.precision != BEST and ours(work, args.out)):
        raise RequestError(f"{args.out}: exists already; expected a new folder; remove it or choose another --out")
    if before is not None and (reason := changed(before.get("from"), _asked(args))):
        raise RequestError(
            f"{args.out}: exists already, and {reason}; remove it to make it again, or choose another --out"
        )


def _finished(args: argparse.Namespace, work: Path) -> dict[str, Any] | None:
    """The report of the bundle that is there, if all of its stages are done."""
    report = read_note(work / REPORT, dict)
    return report if args.out.exists() and report.get("bundle") == str(args.out) else None


def _given(args: argparse.Namespace, **options: object) -> MadeFrom:
    """The files that all stages read."""
    from draftwood.tools.demo import resolve

    files = {
        "MODEL": resolve(args.model),
        "--drafter": resolve(args.drafter) if args.drafter else None,
        "--prompts": args.prompts,
    }
    return made_from(files, options)


def _asked(args: argparse.Namespace) -> MadeFrom:
    """The files that all stages read, and the options."""
    names = ("model", "drafter", "kv", "precision", "batch_size", "int8_drafter", "device")
    return _given(args, **{f"--{name.replace('_', '-')}": getattr(args, name) for name in names})


def _complete(args: argparse.Namespace) -> None:
    """Defaults that depend on each other; paths as they are from everywhere, so that stages are known by them."""
    if args.precision is None:
        args.precision = "exact" if args.device or args.int8_drafter else BEST
    if args.batch_size is None:
        args.batch_size = 1 if args.device else TEXTS
    args.out = real_path(args.out)
    args.prompts = args.prompts and real_path(args.prompts)
    args.model, args.drafter = (name and _absolute(name) for name in (args.model, args.drafter))


def _absolute(name: str) -> str:
    """The path of a model; ``demo`` and shapes stay names."""
    return str(absolute_path(Path(name))) if Path(name).exists() else name


def _check(args: argparse.Namespace) -> list[Prompt]:
    """The prompts. Before anything is made: RequestError if options do not go together or something is missing that
    a later stage needs, ModuleNotFoundError if that is a package, CheckpointError for a wrong MODEL."""
    from draftwood.compiler.bundle.request import check_slots
    from draftwood.compiler.device.devices import device
    from draftwood.compiler.drafters.registry import open_drafter
    from draftwood.compiler.targets.registry import TARGETS
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.tools.demo import resolve
    from draftwood.tools.making.needs import COPIES, check_prompts, check_room, fitting
    from draftwood.tools.prompts import read_prompts

    if args.precision == BEST and (args.device or args.int8_drafter):
        raise RequestError(
            "--precision best: chooses by what this machine measures, and tries the drafter in eight bits by itself;"
            " leave --device and --int8-drafter out, or name a precision"
        )
    if args.int8_drafter and args.device:
        raise RequestError("--int8-drafter: its steps are not modelled for a --device; leave one of the two out")
    if not 1 <= args.batch_size <= MOST_TEXTS:
        raise RequestError(f"--batch-size {args.batch_size}: expected 1 to {MOST_TEXTS}")
    if args.device:
        device(args.device)
        TARGETS["ge"].check_installed()
    prompts = read_prompts(args.prompts, MOST)
    if (count := len({prompt.conversation for prompt in prompts})) < JUDGES:
        raise RequestError(f"--prompts: {count} conversations; expected at least {JUDGES}; one of them judges")
    model = resolve(args.model)
    teacher = Checkpoint.open(model)
    check_prompts(model, teacher, prompts)
    check_slots(parse_sizes("--kv", args.kv), teacher.config.max_positions)
    if args.drafter:
        open_drafter(resolve(args.drafter), teacher)
    copies = COPIES * (2 if args.drafter else 1)
    if args.precision == BEST:
        # The largest bundle that may be written: the precision that rounds least, among those that fit into memory.
        largest: Precision = next(reversed(fitting(teacher)), "exact")
        largest_said = check_room(teacher, largest, args.out, copies).removeprefix("--precision ")
        room = f"--precision {BEST}, whose largest candidate is {largest_said}"
    else:
        room = check_room(teacher, args.precision, args.out, copies, runs=not args.device)
    print(room, file=sys.stderr, flush=True)
    return prompts


def _split_prompts(prompts: Sequence[Prompt], work: Path) -> None:
    """Writes whole conversations to count with, and others to judge by."""
    names = list(dict.fromkeys(prompt.conversation for prompt in prompts))
    judging = set(names[JUDGES - 1 :: JUDGES])
    _write_prompts(work / COUNTED, [prompt for prompt in prompts if prompt.conversation not in judging])
    _write_prompts(work / JUDGING, [prompt for prompt in prompts if prompt.conversation in judging])


def _write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    rows = (
        {"prompt" if name == "text" else name: value for name, value in asdict(prompt).items()} for prompt in prompts
    )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_bytes() != text.encode():
        path.write_text(text)


def _report(args: argparse.Namespace, stages: Sequence[Stage], work: Path) -> dict[str, Any]:
    from draftwood.runtime.bundle import Bundle

    checked, judged = (read_note(path, dict) for path in (args.out / "check.json", work / "bench.json"))
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
        "pictures": [str(path) for path in _pictures(bundle, work)] if args.drafter else [],
        "commands": [stage.line for stage in stages],
    }  # fmt: skip


def _pictures(bundle: Bundle, work: Path) -> Iterator[Path]:
    """Those of the plan; an earlier one, of other trees, may have left its own."""
    for name in ("figures", *(tree.name for tree in bundle.manifest.trees)):
        if (path := work / f"{Path(PLAN).stem}-{name}.png").exists():
            yield path


def _page(report: dict[str, Any]) -> str:
    from draftwood.tools.making.precision import table

    check, bench = report["check"], report["bench"]
    equal = f"{bench['identical']} of {bench['turns']} answers are plain decoding's"
    equal += f", {bench['ties']} differ by numeric ties" if bench["ties"] else ""
    lines = [
        *([table(report)] if "precisions" in report else []),
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
