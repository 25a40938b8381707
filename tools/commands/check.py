"""``draftwood check``: does every graph of a bundle compute what eager PyTorch computes?

With ``--teacher``: are the bundle's texts those of its teacher, as transformers runs it?
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.files import json_text
from draftwood.tools.commands.arguments import add_bundle_argument

if TYPE_CHECKING:
    from draftwood.runtime.bundle import Bundle

_OF_TEACHERS = ("logits", "features", "choice", "attention", "MLP", "cache after commit")
QUANTITIES = (*_OF_TEACHERS, "draft scores", "draft tokens", "draft cache")

# Temperatures of the texts that are compared with the teacher's: greedy and sampled text take different code.
TEMPERATURES = (0.0, 0.8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from draftwood.runtime.engines.registry import engines

    compared = [name for name, kind in engines().items() if kind.compared]
    add_bundle_argument(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt" (default: two)')
    parser.add_argument(
        "--teacher",
        metavar="DIR",
        help="compare whole texts with those of the bundle's teacher (its folder, or demo), run by transformers",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--engine",
        choices=sorted(engines()),
        help=f"compare this one alone (default: of {', '.join(compared)} those that bundle and machine have)",
    )


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.threads import share_threads
    from draftwood.tools.comparison.check import check, sample_prompts

    share_threads()
    bundle = Bundle.open(args.bundle)
    if args.teacher is not None:
        return _check_texts(bundle, args)
    prompts = list(sample_prompts(bundle, args.prompts, _limit(args)))
    report = check(bundle, prompts, _progress, args.engine)
    if args.json:
        print(json_text(report))
    else:
        _print(report)
    _keep(report, args, "check")
    return 0 if report["ok"] else 1


def _keep(report: dict[str, Any], args: argparse.Namespace, name: str) -> None:
    """Writes the report next to its subject, after it was printed, under a name of the engine that was asked for;
    RequestError if the disk refuses."""
    from draftwood.errors import RequestError
    from draftwood.files import write_whole

    path = args.bundle / f"{name}{f'-{args.engine}' if args.engine else ''}.json"
    try:
        write_whole(path, json_text(report, indent=1).encode() + b"\n")
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be written ({error.strerror}); the report that was printed is whole"
        ) from error


def _limit(args: argparse.Namespace) -> int:
    """How many prompts: two that are built in, or all of a file."""
    return sys.maxsize if args.prompts else 2


def _check_texts(bundle: Bundle, args: argparse.Namespace) -> int:
    from draftwood.runtime.engines.choice import open_engine
    from draftwood.runtime.engines.opening import Opening
    from draftwood.runtime.options import Options
    from draftwood.tools.comparison.check import sample_prompts
    from draftwood.tools.comparison.texts import check_texts, print_texts
    from draftwood.tools.demo import resolve
    from draftwood.tools.measure.conversations import Conversation
    from draftwood.tools.prompts import read_prompts
    from draftwood.tools.reference.transformers import HfEngine

    if bundle.tokenizer is not None:
        judged = read_prompts(args.prompts, _limit(args))
        prompts = {prompt.id: Conversation(bundle.tokenizer).ask(prompt) for prompt in judged}
    else:
        drawn = sample_prompts(bundle, args.prompts, _limit(args))
        prompts = {f"random {number}": ids.tolist() for number, ids in enumerate(drawn, 1)}
    reference = HfEngine.open(bundle, resolve(args.teacher))
    engine = open_engine(bundle, Opening(engine=args.engine))
    reports = [
        check_texts(engine, reference, prompts, Options.of(temperature=temperature), _progress)
        for temperature in TEMPERATURES
    ]
    ok = all(report["ok"] for report in reports)
    if args.json:
        print(json_text({"ok": ok, "texts": reports}))
    else:
        for report in reports:
            print_texts(report)
    _keep({"ok": ok, "texts": reports}, args, "check-teacher")
    return 0 if ok else 1


def _progress(what: str) -> None:
    print(f"checking {what}", file=sys.stderr, flush=True)


def _table(comparisons: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, str]]:
    """Cells by row and quantity: of every engine first the largest allowed differences, then the worst of each gear or
    graph, one that fails before all others."""
    rows = dict[tuple[str, str], dict[str, str]]()
    worst, allowed = dict[tuple[str, str, str], tuple[bool, float]](), dict[tuple[str, str], float]()
    for c in comparisons:
        name, graphs, quantity, share = c["gear"] or c["graph"], c["graphs"], c["quantity"], c["difference"]
        allowed[graphs, quantity] = max(c["tolerance"], allowed.get((graphs, quantity), 0.0))
        rows.setdefault(("allowed", graphs), {})[quantity] = f"{allowed[graphs, quantity]:.0e}"
        cells = rows.setdefault((name, graphs), {})
        if (not c["ok"], share) >= worst.get((name, graphs, quantity), (False, 0.0)):
            worst[name, graphs, quantity] = not c["ok"], share
            cells[quantity] = f"{share:.1e}{'' if c['ok'] else ' !'}"
    return rows


def told(c: dict[str, Any]) -> str:
    """A comparison that failed, as a line: graph, quantity, got, allowed, and where the allowed comes from."""
    return (
        f"{c['graph']}, {c['graphs']}: {c['quantity']} at {c['where']} differ by {c['difference']:.2e} of"
        f" {c['tolerance']:.1e} allowed, {c['reason']}"
    )


def _print(report: dict[str, Any]) -> None:
    print(
        "largest difference from eager PyTorch, as a share of the largest value; block by block, each from the graph's"
    )
    print("own input, as a share of what the block adds to a row; draft tokens: share that differs")
    print(f"{'gear or graph':24} {'graphs':15}" + "".join(f"{quantity:>20}" for quantity in QUANTITIES))
    for (name, graphs), cells in _table(report["comparisons"]).items():
        print(f"{name:24} {graphs:15}" + "".join(f"{cells.get(quantity, ''):>20}" for quantity in QUANTITIES))
    for c in report["comparisons"]:
        if not c["ok"]:
            print(f"DIFFERS: {told(c)}")
    for name, faults in report["trees"].items():
        for fault in faults:
            print(f"TREE {name}: {fault}")
    for c in report["controls"]:
        if not c["caught"]:
            print(f"NOT CAUGHT: {c['gear']}, {c['graphs']}: {c['fault']} (difference {c['difference']:.2e})")
    print(f"{report['mutations_caught']} of {report['mutations']} deliberate faults caught")
    for name, nodes in report["nodes"].items():
        left = nodes.get("CPUExecutionProvider", 0)
        print(f"{name}: {sum(nodes.values()) - left} nodes on its device, {left} left to the CPU")
    print("ok" if report["ok"] else "FAILED")
