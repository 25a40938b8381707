"""The shipped drafters side by side, at sizes where a real teacher lives: acceptance kept, cost that of the size.

    python -m draftwood.tools.measure.sizes --work DIR [--drafter demo-medusa,demo-eagle3,demo-fasteagle]
        [--sizes native,110m,500m] [--tree SPEC] [--rounds 3] [--prompts FILE.jsonl] [--limit 24] [--png FILE]

For every size: widens the demo teacher and its drafters with zeros, builds a bundle of each with planned trees (or
those asked for) and a chain of equal depth, and weighs the gears on this machine. Then it benchmarks the best gear of
every drafter against plain decoding, drafter after drafter, in as many rounds as asked for; what is reported is the
median round. All bundles of a size hold the same teacher, so a round's plain decoding is the mean of theirs: where a
process happens to lay out their weights moves it by a fifth. The speed-up stands beside its bound, expected accept
length x t(1) / (t_draft + t_verify). A budget tree has no bound, for rank paths say nothing of it, so it is
benchmarked only where it is the one tree asked for.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.policy import Policies
from draftwood.tools import demo
from draftwood.tools.commands.arguments import add_decoding_arguments, options
from draftwood.tools.demo.sizes import SIZES, bundle_name, models
from draftwood.tools.measure.bench import bench
from draftwood.tools.measure.weigh import Weighed, best_tree, weigh
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.tools.show.pictures import panels
from draftwood.trees import Topology, parse_specs
from draftwood.trees.spec import Budget

TREE_ROWS = (4, 6, 8, 12, 16)
# Drafters with as many levels are compared on this chain.
EQUAL_DEPTH = 5
SLOTS = 1024

Trees = tuple[tuple[str, Topology | Budget], ...]


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter at one size: teacher, engine, gears as weighed, the one to benchmark and the bound on its speed-up."""

    drafter: str
    teacher: Path
    engine: CpuEngine
    weighed: list[Weighed]
    gear: str
    bound: float | None


def compare(size: str, drafters: list[str], prompts: list[Prompt], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All drafters at one size: weighed, then benchmarked in turns."""
    contenders = [_contender(size, drafter, args) for drafter in drafters]
    rounds: dict[str, list[dict[str, Any]]] = {drafter: [] for drafter in drafters}
    for number in range(args.rounds):
        for one in contenders:
            _say(f"{size}: round {number + 1}, {one.drafter} with {one.gear}")
            bundle = one.engine.bundle
            policies = Policies(bundle, "plain"), Policies(bundle, "fixed", one.gear)
            report = bench(one.engine, prompts, options(args), *policies)
            report.pop("per_turn")
            rounds[one.drafter].append(report)
    parameters = _parameters(contenders[0].teacher)
    plain = [
        statistics.harmonic_mean([report["plain_tokens_per_s"] for report in reports])
        for reports in zip(*rounds.values(), strict=True)
    ]
    return [
        {
            "size": size,
            "parameters_m": parameters,
            **_row(one, rounds[one.drafter], plain),
            "rounds": rounds[one.drafter],
        }
        for one in contenders
    ]


def _contender(size: str, drafter: str, args: argparse.Namespace) -> Contender:
    paths = demo.rank_paths(args.temperature, drafter)
    trees = _trees(args.tree, drafter, args.temperature)
    teacher, own = models(size, args.work, drafter)
    folder = args.work / bundle_name("bundle", size, drafter, trees)
    if not folder.exists():
        _say(f"{size}: building {folder.name}")
        build(BuildRequest(model=teacher, drafter=own, trees=trees, slots=(SLOTS,)), folder, lambda _: None)
    engine = CpuEngine(Bundle.open(folder))
    weighed = weigh(engine, paths)
    if len(weighed) > 1:
        best = best_tree(weighed)
        gear, bound = best.gear, best.bound
    else:
        gear, bound = next(gear.name for gear in engine.bundle.manifest.gears if gear.tree != "plain"), None
    _say(f"{size}: {drafter}: {gear} promises {bound:.2f}x" if bound else f"{size}: {gear} cannot be weighed")
    return Contender(drafter, teacher, engine, weighed, gear, bound)


def _trees(specs: str | None, drafter: str, temperature: float) -> Trees:
    """The trees asked for, or the best of every number of rows and a chain; plain decoding comes first."""
    if specs is None:
        paths = demo.rank_paths(temperature, drafter)
        planned = ((f"planned-{rows}", paths.best_tree(rows - 1)) for rows in TREE_ROWS)
        deep_enough = any(len(path) >= EQUAL_DEPTH for path, _ in paths.items())
        chain = ((f"chain-{EQUAL_DEPTH}", Topology.chain(EQUAL_DEPTH)),) if deep_enough else ()
        return ("plain", Topology.plain()), *chain, *planned
    trees = tuple(parse_specs(specs))
    if len(trees) == 1:
        raise RequestError(f"--tree {specs}: expected a tree that speculates, such as chain:3")
    if len(trees) > 2 and any(isinstance(tree, Budget) for _, tree in trees):
        raise RequestError(f"--tree {specs}: expected a budget tree alone, for it cannot be weighed against others")
    return trees


def _row(one: Contender, rounds: list[dict[str, Any]], plain: list[float]) -> dict[str, Any]:
    """What the table shows of a drafter: its drafts, and the median round against ``plain`` tokens/s of each."""
    chosen = next((weighed for weighed in one.weighed if weighed.gear == one.gear), None)
    chain = next((weighed for weighed in one.weighed if weighed.gear.startswith(f"chain-{EQUAL_DEPTH}-")), None)
    ratios = [report["speculative_tokens_per_s"] / base for report, base in zip(rounds, plain, strict=True)]
    chosen_round = ratios.index(statistics.median_low(ratios))
    median = rounds[chosen_round]
    return {
        "drafter": one.drafter,
        "gear": one.gear,
        "gears": [asdict(weighed) for weighed in one.weighed],
        "equal_depth_draft_ms": chain.draft_ms if chain else None,
        "draft_ms": chosen.draft_ms if chosen else None,
        "bound": one.bound,
        "ok": all(report["ok"] for report in rounds),
        "turns": median["turns"],
        "identical": min(report["identical"] for report in rounds),
        "accept_length": median["accept_length"]["mean"],
        "accept_by_position": median["accept_by_position"],
        "plain_tokens_per_s": plain[chosen_round],
        "speculative_tokens_per_s": median["speculative_tokens_per_s"],
        "host_share": median["host_share"],
        "speedup": statistics.median_low(ratios),
        "speedup_by_round": ratios,
    }


def _parameters(model: Path) -> float:
    """Millions of parameters in a folder of safetensors."""
    from safetensors import safe_open

    found = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="np") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
        found += sum(math.prod(shape) for shape in shapes)
    return found / 1e6


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """The report for people: a line a size and drafter."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"{'size':7} {'params':>7} {'drafter':15} {'gear':18} {'draft ms':>8} {'chain-' + str(EQUAL_DEPTH):>8}"
        f" {'equal':>9} {'accept':>6} {'plain/s':>8} {'tree/s':>7} {'speed-up':>8} {'rounds':>11} {'bound':>6}"
        "  accepted at depth 1, 2, ..."
    ]
    for row in rows:
        shares = " ".join(f"{100 * share:.0f}" for share in row["accept_by_position"])
        spread = f"{min(row['speedup_by_round']):.2f}..{max(row['speedup_by_round']):.2f}"
        lines.append(
            f"{row['size']:7} {row['parameters_m']:5.0f} M {row['drafter']:15} {row['gear']:18}"
            f" {number(row['draft_ms'], '.2f'):>8} {number(row['equal_depth_draft_ms'], '.2f'):>8}"
            f" {row['identical']:4}/{row['turns']:<4} {row['accept_length']:6.2f} {row['plain_tokens_per_s']:8.1f}"
            f" {row['speculative_tokens_per_s']:7.1f} {row['speedup']:8.2f} {spread:>11}"
            f" {number(row['bound'], '.2f'):>6}  {shares} %"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars a size and drafter: the draft of equal depth, and the speed-up with its rounds."""
    sizes, drafters = (list(dict.fromkeys(row[key] for row in rows)) for key in ("size", "drafter"))
    width = 0.8 / len(drafters)
    with panels(path, 2) as (drafts, speed):
        for number, drafter in enumerate(drafters):
            own = [row for row in rows if row["drafter"] == drafter]
            places = [sizes.index(row["size"]) + number * width for row in own]
            label = drafter.removeprefix("demo-")
            drafts.bar(places, [row["equal_depth_draft_ms"] or row["draft_ms"] or 0 for row in own], width, label=label)
            speed.bar(places, [row["speedup"] for row in own], width, label=label)
            for place, row in zip(places, own, strict=True):
                speed.plot([place] * len(row["speedup_by_round"]), row["speedup_by_round"], "k_", markersize=6)
        drafts.set(title=f"one draft, chain of {EQUAL_DEPTH}", ylabel="ms", yscale="log")
        speed.set(title="speed-up over plain decoding, rounds as dashes")
        speed.axhline(1, color="grey", linewidth=0.8)
        for panel in (drafts, speed):
            panel.set_xticks([place + 0.4 - width / 2 for place in range(len(sizes))], sizes)
        drafts.legend(frameon=False, fontsize=8)


def chosen(given: str, known: tuple[str, ...], flag: str) -> list[str]:
    """The names of a list such as ``native,110m``; RequestError where one is not known."""
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"{flag} {unknown[0]}: expected {', '.join(known)}")
    return names


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for widened models and bundles")
    parser.add_argument(
        "--drafter", default=",".join(demo.DRAFTERS), metavar="NAME[,NAME...]", help="default: all three"
    )
    parser.add_argument("--sizes", default=",".join(SIZES), metavar="S[,S...]")
    parser.add_argument("--tree", metavar="SPEC[,SPEC...]", help="as build's (default: planned from rank paths)")
    parser.add_argument("--rounds", type=int, default=3, help="times every drafter is benchmarked (%(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="turns to run (default: all)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw drafts and speed-ups")
    parser.add_argument("--json", action="store_true")
    add_decoding_arguments(parser)
    args = parser.parse_args(arguments)
    sizes = chosen(args.sizes, tuple(SIZES), "--sizes")
    drafters = chosen(args.drafter, demo.DRAFTERS, "--drafter")
    if args.rounds < 1:
        raise RequestError(f"--rounds {args.rounds}: expected 1 or more")
    prompts = read_prompts(args.prompts, args.limit)
    args.work.mkdir(parents=True, exist_ok=True)
    share_threads(args.threads)
    rows = []
    for size in sizes:
        rows += compare(size, drafters, prompts, args)
    if args.png:
        draw(rows, args.png)
    print(json.dumps(rows) if args.json else table(rows))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
