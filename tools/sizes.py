"""Speed where a real teacher lives: a demo pair widened with zeros, acceptance unchanged, cost that of its size.

    python -m draftwood.tools.sizes --work DIR [--drafter demo-eagle3] [--sizes native,110m,500m] [--tree SPEC]
        [--prompts FILE.jsonl] [--limit 24]

For every size: widens the demo teacher and its drafter, builds a bundle of planned trees or of those asked for,
weighs the gears on this machine, and runs ``bench`` with the best one, plain and speculative in the same run. The
report sets the measured speed-up beside its bound, expected accept length x t(1) / (t_draft + t_verify). A budget
tree has no bound, for rank paths say nothing of it, so it is benchmarked only where it is the one tree asked for.
"""

from __future__ import annotations

import argparse
import hashlib
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
from draftwood.tools.weigh import Weighed, best_tree, weigh
from draftwood.trees import RankPaths, Topology, parse_specs
from draftwood.trees.spec import Budget

TREE_ROWS = (4, 6, 8, 12, 16, 24, 32)
SLOTS = 1024


def measure(size: str, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, weighs and benchmarks one size."""
    paths = demo.rank_paths(args.temperature, args.drafter)
    trees = _trees(paths, args.tree)
    teacher, drafter = models(size, args.work, args.drafter)
    # Another choice of trees is another bundle.
    chosen = hashlib.sha256(repr(trees).encode()).hexdigest()[:8]
    folder = args.work / f"bundle-{size}-{drafter.name}-{chosen}"
    if not folder.exists():
        build(BuildRequest(model=teacher, drafter=drafter, trees=trees, slots=(SLOTS,)), folder, _say)
    share_threads(args.threads)
    engine = CpuEngine(Bundle.open(folder))
    _say(f"{size}: weighing the gears")
    weighed = weigh(engine, paths)
    gear, bound = _best(engine.bundle, weighed)
    _say(f"{size}: {gear} promises {bound:.2f}x" if bound else f"{size}: {gear} cannot be weighed")
    policies = policy_for(engine.bundle, plain=True), policy_for(engine.bundle, gear)
    report = bench(engine, read_prompts(args.prompts, args.limit), options(args), *policies)
    report.pop("per_turn")
    parameters = sum(path.stat().st_size for path in teacher.glob("*.safetensors")) / 2 / 1e6
    return {
        "size": size,
        "drafter": args.drafter,
        "parameters_m": parameters if size == "native" else parameters / 2,
        "gear": gear,
        "bound": bound,
        "gears": [asdict(w) for w in weighed],
        "bench": report,
    }


def _trees(paths: RankPaths, specs: str | None) -> tuple[tuple[str, Topology | Budget], ...]:
    """The trees asked for, or the best of every number of rows; plain decoding comes first."""
    if specs is None:
        planned = ((f"planned-{rows}", paths.best_tree(rows - 1)) for rows in TREE_ROWS)
        return ("plain", Topology.plain()), *planned
    trees = tuple(parse_specs(specs))
    if len(trees) == 1:
        raise RequestError(f"--tree {specs}: expected a tree that speculates, such as chain:3")
    if len(trees) > 2 and any(isinstance(tree, Budget) for _, tree in trees):
        raise RequestError(f"--tree {specs}: expected a budget tree alone, for it cannot be weighed against others")
    return trees


def _best(bundle: Bundle, weighed: list[Weighed]) -> tuple[str, float | None]:
    """The best gear that was weighed and its bound, or the one of a budget tree, which has none."""
    if len(weighed) > 1:
        best = best_tree(weighed)
        return best.gear, best.bound
    return next(gear.name for gear in bundle.manifest.gears if gear.tree != "plain"), None


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'size':8} {'params':>7} {'gear':20} {'equal':>9} {'accept':>7} {'plain/s':>8} {'tree/s':>7} ", end="")
    print(f"{'speed-up':>9} {'p50':>5} {'bound':>6} {'host':>6}")
    for row in rows:
        b, bound = row["bench"], "-" if row["bound"] is None else f"{row['bound']:.2f}"
        print(
            f"{row['size']:8} {row['parameters_m']:5.0f} M {row['gear']:20} {b['identical']:4}/{b['turns']:<4}"
            f" {b['accept_length']['mean']:7.2f} {b['plain_tokens_per_s']:8.1f} {b['speculative_tokens_per_s']:7.1f}"
            f" {b['speedup']['mean']:9.2f} {b['speedup']['p50']:5.2f} {bound:>6} {100 * b['host_share']:5.1f}%"
        )


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="benchmark of a demo pair at its native and at larger sizes")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for widened models and bundles")
    parser.add_argument("--drafter", default="demo-medusa", choices=[name for name in demo.NAMES if name != "demo"])
    parser.add_argument("--sizes", default=",".join(SIZES), metavar="S[,S...]")
    parser.add_argument("--tree", metavar="SPEC[,SPEC...]", help="as build's (default: planned from rank paths)")
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
