"""Speed where a real teacher lives: the demo pair widened with zeros, acceptance unchanged, cost that of its size.

    python -m draftwood.tools.sizes --work DIR [--prompts FILE.jsonl] [--limit 24] [--sizes native,110m,500m]

For every size: widens the demo teacher and heads, builds a bundle of planned trees, weighs the gears on this
machine, and runs ``bench`` with the best one, plain and speculative in the same run. The report sets the
measured speed-up beside its bound, expected accept length x t(1) / (t_draft + t_verify).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.compiler.bundle import BuildRequest, build
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.cpu_engine import CpuEngine
from draftwood.runtime.engine import share_threads
from draftwood.runtime.policy import policy_for
from draftwood.tools import demo
from draftwood.tools.bench import bench
from draftwood.tools.demo_sizes import SIZES, models
from draftwood.tools.prompts import read_prompts
from draftwood.tools.run import add_decoding_arguments, options
from draftwood.tools.script import refusing
from draftwood.tools.weigh import best_tree, weigh
from draftwood.trees import Topology

TREE_ROWS = (4, 6, 8, 12, 16, 24, 32)
SLOTS = 1024


def measure(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, weighs and benchmarks one size."""
    paths, folder = demo.rank_paths(args.temperature), args.work / f"bundle-{size}-t{args.temperature:g}"
    teacher, heads = models(size, args.work)
    if not folder.exists():
        planned = ((f"planned-{rows}", paths.best_tree(rows - 1)) for rows in TREE_ROWS)
        trees = (("plain", Topology.plain()), *planned)
        build(BuildRequest(model=teacher, drafter=heads, trees=trees, slots=(SLOTS,)), folder, _say)
    share_threads(args.threads)
    engine = CpuEngine(Bundle.open(folder))
    _say(f"{size}: weighing the gears")
    weighed = weigh(engine, paths)
    best = best_tree(weighed)
    _say(f"{size}: {best.gear} promises {best.bound:.2f}x")
    policies = policy_for(engine.bundle, plain=True), policy_for(engine.bundle, best.gear)
    report = bench(engine, read_prompts(args.prompts, args.limit), options(args), *policies)
    report.pop("per_turn")
    parameters = sum(path.stat().st_size for path in teacher.glob("*.safetensors")) / 2 / 1e6
    return {
        "size": size,
        "parameters_m": parameters if size == "native" else parameters / 2,
        "gear": best.gear,
        "bound": best.bound,
        "gears": [asdict(w) for w in weighed],
        "bench": report,
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'size':8} {'params':>7} {'gear':20} {'equal':>9} {'accept':>7} {'plain/s':>8} {'tree/s':>7} ", end="")
    print(f"{'speed-up':>9} {'p50':>5} {'bound':>6} {'host':>6}")
    for row in rows:
        b = row["bench"]
        print(
            f"{row['size']:8} {row['parameters_m']:5.0f} M {row['gear']:20} {b['identical']:4}/{b['turns']:<4}"
            f" {b['accept_length']['mean']:7.2f} {b['plain_tokens_per_s']:8.1f} {b['speculative_tokens_per_s']:7.1f}"
            f" {b['speedup']['mean']:9.2f} {b['speedup']['p50']:5.2f} {row['bound']:6.2f} {100 * b['host_share']:5.1f}%"
        )


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="benchmark of the demo pair at its native and at larger sizes")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for widened models and bundles")
    parser.add_argument("--sizes", default=",".join(SIZES), metavar="S[,S...]")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="turns to run (default: all)")
    parser.add_argument("--json", action="store_true")
    add_decoding_arguments(parser)
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        raise RequestError(f"--sizes {unknown[0]}: expected {', '.join(SIZES)}")
    args.work.mkdir(parents=True, exist_ok=True)
    rows = [measure(size, args) for size in sizes]
    if args.json:
        print(json.dumps(rows))
    else:
        _print(rows)
    return 0 if all(row["bench"]["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
