"""``draftwood check``: does every graph of a bundle compute what eager PyTorch computes?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from draftwood.tools.commands.arguments import add_verify_argument

QUANTITIES = ("logits", "features", "choice", "draft scores", "draft tokens", "cache after commit", "draft cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt" (default: built in)')
    parser.add_argument("--limit", type=int, default=2, metavar="N", help="prompts to use (default 2)")
    parser.add_argument("--replay", type=Path, metavar="DUMP", help="run one dumped step again, and nothing else")
    add_verify_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.sessions import share_threads
    from draftwood.tools.comparison.check import check, sample_prompts

    if args.replay is not None:
        from draftwood.tools.reference.replay import main as replay

        return replay([str(args.replay), "--bundle", str(args.bundle), *(["--json"] if args.json else [])])
    share_threads()
    bundle = Bundle.open(args.bundle, args.verify)
    report = check(bundle, list(sample_prompts(bundle, args.prompts, args.limit)), progress=_progress)
    (args.bundle / "check.json").write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _progress(what: str) -> None:
    print(f"checking {what}", file=sys.stderr, flush=True)


def _print(report: dict[str, Any]) -> None:
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for c in report["comparisons"]:
        rows.setdefault((c["gear"] or c["graph"], c["graphs"]), {})[c["quantity"]] = c
    allowed = ", ".join(f"{name} {tolerance:.0e}" for name, tolerance in report["tolerances"].items())
    if report["draft_tolerances"] != report["tolerances"]:
        allowed += f"; of drafts in int8 {max(report['draft_tolerances'].values()):.0e}"
    print(f"largest difference from eager PyTorch, as a share of the largest value; allowed: {allowed}")
    print(f"{'gear or graph':24} {'graphs':9}" + "".join(f"{quantity:>20}" for quantity in QUANTITIES))
    for (gear, graphs), found in rows.items():
        cells = [
            f"{found[q]['difference']:.1e}{'' if found[q]['ok'] else ' !'}" if q in found else "" for q in QUANTITIES
        ]
        print(f"{gear:24} {graphs:9}" + "".join(f"{cell:>20}" for cell in cells))
    for c in report["comparisons"]:
        if not c["ok"]:
            print(
                f"DIFFERS: {c['graph']}, {c['graphs']} graphs: {c['quantity']} at {c['where']}: {c['difference']:.2e}"
            )
    for line in report["first_divergences"]:
        print(f"PARTS: {line}")
    for c in report["controls"]:
        if not c["caught"]:
            print(f"NOT CAUGHT: {c['gear']}, {c['graphs']}: {c['fault']} (difference {c['difference']:.2e})")
    print(f"{report['mutations_caught']} of {report['mutations']} deliberate faults caught")
    print("ok" if report["ok"] else "FAILED")
