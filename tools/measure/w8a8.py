"""W8A8 against fp32 on this machine: plain, speculative, and what rows of a step cost, in paired rounds.

    python -m draftwood.tools.measure.w8a8 --work DIR --calibration FILE.jsonl [--sizes native,500m] [--tree chain:4]
        [--rounds 3] [--prompts FILE.jsonl] [--limit 24] [--temperature T] [--json]

For every size: widens the demo pair, quantises the teacher, and builds a bundle of each precision. A round
benchmarks both bundles, in alternating order; the medians of the rounds are reported. Steps of several rows are timed
behind the same text, in the same rounds. Peers that are not installed are named as missing; those that are, are
not driven by this command. A widened teacher's weights hold zeros: its times are of its size, and only the native
one's quality counts (``draftwood quantize --report``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.quantisation.quantise import Request, quantise
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.policy import Policies
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.tools import demo
from draftwood.tools.calibration_texts import read_texts
from draftwood.tools.commands.arguments import add_decoding_arguments, options
from draftwood.tools.comparison import single
from draftwood.tools.demo.sizes import SIZES, models
from draftwood.tools.measure.bench import bench
from draftwood.tools.measure.machine import processor
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.trees import Topology, parse_specs, tensorize

ROWS = (1, 2, 4, 8, 16)
TEXT, SLOTS = 256, 1024  # tokens behind which steps are timed, and the KV length
PEERS = {"llama.cpp": "llama_cpp", "onnxruntime-genai": "onnxruntime_genai", "OpenVINO": "openvino_genai"}
# Of as many rows as the widest step, so that a bundle's buffers hold it.
_WIDEST = ("rows", Topology.full((3, 2, 1)))


def measure(size: str, prompts: list[Prompt], args: argparse.Namespace) -> dict[str, Any]:
    """One size: both precisions in alternating rounds, by their medians."""
    engines = {name: CpuEngine(Bundle.open(folder)) for name, folder in _bundles(size, args).items()}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    steps: dict[str, list[dict[int, float]]] = {name: [] for name in engines}
    for number in range(args.rounds):
        for name in list(engines)[:: -1 if number % 2 else 1]:
            print(f"{size}: round {number + 1}, {name}", file=sys.stderr, flush=True)
            bundle = engines[name].bundle
            gear = next(gear.name for gear in bundle.manifest.gears if gear.tree not in ("plain", _WIDEST[0]))
            policies = Policies(bundle, "plain"), Policies(bundle, "fixed", gear)
            reports[name].append(bench(engines[name], prompts, options(args), *policies))
            steps[name].append(step_ms(engines[name]))
    return {"size": size, "rounds": args.rounds, **{name: _medians(reports[name], steps[name]) for name in engines}}


def _bundles(size: str, args: argparse.Namespace) -> dict[str, Path]:
    """A bundle of each precision, made unless it is there."""
    teacher, drafter = models(size, args.work, args.drafter)
    whole = quantised(teacher, args.work / f"{teacher.name}-{size}-w8a8", args.calibration)
    found = {}
    for name, model in (("fp32", teacher), ("w8a8", whole)):
        found[name] = args.work / f"w8a8-{size}-{name}-{args.drafter}-{args.tree.replace(':', '-')}"
        if not found[name].exists():
            trees = (*parse_specs(args.tree), _WIDEST)
            build(BuildRequest(model=model, drafter=drafter, trees=trees, slots=(SLOTS,)), found[name])
    return found


def quantised(teacher: Path, out: Path, calibration: Path) -> Path:
    """The teacher with all its linear layers in int8, made at ``out`` unless it is there."""
    if not out.exists():
        texts = read_texts(calibration, Tokenizer.load(teacher), limit=32, longest=128)
        quantise(Request(model=teacher, texts=texts.calibration, migration="none", head=True), out)
    return out


def step_ms(engine: CpuEngine, repeats: int = 5) -> dict[int, float]:
    """Milliseconds of a step by its rows, the best of some, behind a text."""
    state, found = engine.begin(SLOTS), {}
    single.prefill(engine, state, np.arange(TEXT) % engine.bundle.manifest.dims.vocabulary)
    for rows in ROWS:
        tree, taken = tensorize(Topology.chain(rows - 1) if rows > 1 else Topology.plain()), []
        for _ in range(repeats):
            began = time.perf_counter()
            single.verify(engine, state, np.arange(rows), tree)
            taken.append(time.perf_counter() - began)
            state.rollback(TEXT)
        found[rows] = 1e3 * min(taken)
    return found


def _medians(reports: list[dict[str, Any]], steps: list[dict[int, float]]) -> dict[str, Any]:
    def median(name: str) -> float:
        return float(statistics.median(report[name] for report in reports))

    return {
        "plain_tokens_per_s": median("plain_tokens_per_s"),
        "speculative_tokens_per_s": median("speculative_tokens_per_s"),
        "turns": reports[0]["turns"],
        "identical": min(report["identical"] for report in reports),
        "ties": max(report["ties"] for report in reports),
        "ok": all(report["ok"] for report in reports),
        "step_ms": {rows: statistics.median(round_ms[rows] for round_ms in steps) for rows in ROWS},
    }


def peers() -> dict[str, str]:
    """Whether each peer is installed here."""
    return {name: "missing" if find_spec(module) is None else "installed, not run" for name, module in PEERS.items()}


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"{'size':7} {'':5} {'plain/s':>8} {'tree/s':>8} {'equal':>9} {'ties':>4}  ms a step of {ROWS} rows"]
    for row in report["sizes"]:
        for name in ("fp32", "w8a8"):
            one = row[name]
            times = " ".join(f"{ms:7.2f}" for ms in one["step_ms"].values())
            lines.append(
                f"{row['size']:7} {name:5} {one['plain_tokens_per_s']:8.1f} {one['speculative_tokens_per_s']:8.1f}"
                f" {one['identical']:4}/{one['turns']:<4} {one['ties']:4}  {times}"
            )
        ratio = row["w8a8"]["plain_tokens_per_s"] / row["fp32"]["plain_tokens_per_s"]
        lines.append(f"{row['size']:7} plain W8A8 over plain fp32 {ratio:.2f}, {row['rounds']} rounds")
    lines += [f"{name}: {state}" for name, state in report["peers"].items()]
    return "\n".join([*lines, f"{report['machine']['model']}, {', '.join(report['machine']['features'])}"])


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for models and bundles")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="as quantize takes it")
    parser.add_argument("--drafter", default="demo-eagle3", choices=demo.DRAFTERS)
    parser.add_argument("--sizes", default="native,500m", metavar="S[,S...]")
    parser.add_argument("--tree", default="chain:4", metavar="SPEC", help="as build's (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="times both are benchmarked (%(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="turns to run (default: all)")
    parser.add_argument("--json", action="store_true")
    add_decoding_arguments(parser)
    args = parser.parse_args(arguments)
    sizes = args.sizes.split(",")
    if unknown := [size for size in sizes if size not in SIZES]:
        raise RequestError(f"--sizes {unknown[0]}: expected {', '.join(SIZES)}")
    if args.rounds < 1:
        raise RequestError(f"--rounds {args.rounds}: expected 1 or more")
    if len(parse_specs(args.tree)) < 2:
        raise RequestError(f"--tree {args.tree}: expected a tree that speculates, such as chain:4")
    prompts = read_prompts(args.prompts, args.limit)
    args.work.mkdir(parents=True, exist_ok=True)
    share_threads(args.threads)
    rows = [measure(size, prompts, args) for size in sizes]
    report = {"sizes": rows, "peers": peers(), "machine": processor()}
    print(json.dumps(report) if args.json else table(report))
    return 0 if all(row[name]["ok"] for row in rows for name in ("fp32", "w8a8")) else 1


if __name__ == "__main__":
    sys.exit(main())
