"""W8A8 against fp32 and against other programs on this machine, in paired rounds.

    python -m draftwood.tools.measure.w8a8 --work DIR --calibration FILE.jsonl [--sizes native,500m] [--dense]
        [--tree chain:4] [--rounds 3] [--prompts FILE.jsonl] [--limit 24] [--race 3] [--prepare] [--out DIR]
        [--png FILE] [--json]

For every size: widens the demo pair, quantises teacher and drafter, and builds a bundle of fp32, of a W8A8 teacher, and
of both in W8A8. A round benchmarks all of them with the first tree, in alternating order; medians of the rounds are
reported, and ratios of paired rounds with the lowest and the highest. Steps of several rows and a draft are timed
behind the same text, in the same rounds, beside what the machine's integer products reach
(`draftwood.tools.measure.products`). Then the W8A8 bundles, with every tree, greedy and sampled, and the peers that are
installed decode the same prompts in turns; peers are greedy, and those that are missing are named. A widened teacher's
weights hold zeros: its times are of its size, and only the native one's quality counts (``draftwood quantize
--report``). ``--dense`` times the steps of every size with random weights without zeros, too.

``--prepare`` makes all files, its own and those of the peers, lets everybody answer once, and measures nothing. What
``--out`` holds of the same run is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.compiler.checkpoints.safetensors_file import read_header
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.engines.sessions import share_threads
from draftwood.runtime.policy import Policies
from draftwood.tools import demo
from draftwood.tools.commands.arguments import add_decoding_arguments, options
from draftwood.tools.comparison import single
from draftwood.tools.demo.sizes import SIZES, models
from draftwood.tools.evaluate.busy import Meter
from draftwood.tools.evaluate.peers import QUANTISED_PEERS, Generate, ours
from draftwood.tools.evaluate.rows import Rows
from draftwood.tools.measure.bench import bench
from draftwood.tools.measure.machine import processor
from draftwood.tools.measure.products import peak_gops
from draftwood.tools.measure.race import AT_SAMPLED, OURS, SAMPLED, answer_once, opened_peers, paired, race, standing
from draftwood.tools.measure.tune import filled
from draftwood.tools.measure.w8a8_pairs import SLOTS, WIDEST, bundles, dense
from draftwood.tools.measure.w8a8_shown import BOTH, NAMES, draw, table
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.trees import Topology, parse_specs, tensorize

ROWS = (1, 2, 4, 8, 16)
TEXT = 256  # tokens behind which steps are timed
# What of a benchmark is kept.
KEPT = ("plain_tokens_per_s", "speculative_tokens_per_s", "turns", "identical", "ties", "ok")
Part = Callable[[str, Callable[[], Any]], Any]


class Size:
    """One size; its bundles are opened when something is measured."""

    def __init__(self, name: str, prompts: list[Prompt], args: argparse.Namespace) -> None:
        self.name, self.prompts, self.args = name, prompts, args
        self.folders = bundles(name, args)

    @cached_property
    def engines(self) -> dict[str, CpuEngine]:
        return opened(self.folders)

    def round(self, number: int) -> dict[str, Any]:
        """Every bundle once: a benchmark, steps and a draft."""
        found: dict[str, Any] = {}
        for name in list(self.engines)[:: -1 if number % 2 else 1]:
            engine = self.engines[name]
            plain, tree = list(policies_of(engine).values())[:2]
            report = bench(engine, self.prompts, options(self.args), plain, tree)
            found[name] = {key: report[key] for key in KEPT}
            found[name] |= {"step_ms": step_ms(engine), "draft_ms": draft_ms(engine)}
        return found

    def race(self) -> dict[str, Any]:
        """All programs on the same texts, in turns."""
        ways: dict[str, Generate] = {}
        for name in NAMES[1:]:
            for kind, policies in policies_of(self.engines[name]).items():
                ways[f"{OURS}{name} {kind}"] = one = partial(ours, self.engines[name], policies)
                ways[f"{OURS}{name} {kind}{AT_SAMPLED}"] = partial(one, temperature=SAMPLED)
        for end in ("", AT_SAMPLED):
            ways.pop(f"{OURS}{BOTH} plain{end}", None)  # as without a drafter
        others, missing = opened_peers(self.teacher, self.args.work, self.args.threads)
        tokenizer = self.engines["fp32"].bundle.tokenizer
        assert tokenizer is not None, "the demo teacher has a tokenizer"
        raced = self.prompts[: self.args.race]
        ids = [tokenizer.chat([{"role": "user", "content": prompt.text}]) for prompt in raced]
        return {"rates": race(ways | others, ids, self.args.max_new_tokens, self.args.rounds), "missing": missing}

    def dense(self) -> list[dict[str, dict[int, float]]]:
        """Rounds of the steps of both precisions with random weights."""
        engines = opened(dense({name: self.folders[name] for name in NAMES[:2]}))
        return [{name: step_ms(engine) for name, engine in engines.items()} for _ in range(self.args.rounds)]

    @property
    def teacher(self) -> Path:
        return models(self.name, self.args.work, self.args.drafter)[0]

    def report(self, part: Part) -> dict[str, Any]:
        """All figures of the size, of parts that are measured or were."""
        numbers = range(self.args.rounds)
        rounds = [part(f"{self.name}, round {number + 1}", partial(self.round, number)) for number in numbers]
        found = {name: _medians([one[name] for one in rounds]) for name in self.folders}
        peak = part(f"{self.name}, peak", partial(peak_gops, self.args.threads))
        raced = part(f"{self.name}, race", self.race) if self.args.race else None
        return {
            "size": self.name,
            "rounds": self.args.rounds,
            "bundles": found,
            "dense": _dense(part(f"{self.name}, dense", self.dense)) if self.args.dense else None,
            "peak_gops": peak,
            "reached": _reached(self.folders["w8a8"], found["w8a8"]["step_ms"], peak),
            "paired": _ratios(rounds),
            "race": raced and standing(raced["rates"]) | {"missing": raced["missing"]},
        }


def opened(folders: Mapping[str, Path]) -> dict[str, CpuEngine]:
    """An engine for each bundle."""
    return {name: CpuEngine(Bundle.open(folder)) for name, folder in folders.items()}


def policies_of(engine: CpuEngine) -> dict[str, Policies]:
    """Plain decoding, and every tree that was asked for, by names."""
    bundle = engine.bundle
    trees = {gear.tree: gear.name for gear in bundle.manifest.gears if gear.tree not in ("plain", WIDEST[0])}
    return {"plain": Policies(bundle, "plain")} | {
        tree: Policies(bundle, "fixed", gear) for tree, gear in trees.items()
    }


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


def draft_ms(engine: CpuEngine, repeats: int = 5) -> float:
    """Milliseconds of the first tree's draft, the best of some, behind the same text."""
    gear = next(gear for gear in engine.bundle.manifest.gears if gear.draft)
    state, taken = filled(engine, gear.slots, TEXT), []
    for _ in range(repeats):
        began = time.perf_counter()
        drafts = engine.draft([state], gear)
        taken.append(time.perf_counter() - began)
        engine.verify([state], drafts)
        state.rollback(state.length)
    return 1e3 * min(taken)


def _medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One bundle's figures over its rounds: times and speeds by their medians, texts by the worst round."""
    found: dict[str, Any] = {"step_ms": _step_medians([one["step_ms"] for one in rounds])}
    for key in ("plain_tokens_per_s", "speculative_tokens_per_s", "draft_ms"):
        found[key] = float(statistics.median(one[key] for one in rounds))
    worst = {"turns": min, "identical": min, "ties": max, "ok": all}
    return found | {key: of(one[key] for one in rounds) for key, of in worst.items()}


def _step_medians(rounds: list[dict[str, float]]) -> dict[int, float]:
    return {int(rows): statistics.median(one[rows] for one in rounds) for rows in rounds[0]}


def _dense(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Steps with random weights, and how many times longer fp32 takes for one row."""
    one_row = {name: [one[name]["1"] for one in rounds] for name in rounds[0]}
    steps = {name: _step_medians([one[name] for one in rounds]) for name in rounds[0]}
    return {"step_ms": steps, "one_row": paired(one_row["fp32"], one_row["w8a8"])}


def _ratios(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Round by round: what W8A8 is over fp32, and what drafting is over plain decoding."""
    plain, drafted = (
        {name: [one[name][f"{kind}_tokens_per_s"] for one in rounds] for name in NAMES}
        for kind in ("plain", "speculative")
    )
    return {
        "plain W8A8 over plain fp32": paired(plain["w8a8"], plain["fp32"]),
        **{f"drafts over plain, {name}": paired(drafted[name], plain[name]) for name in NAMES},
        "drafts of a drafter in W8A8 over one in fp32": paired(drafted[BOTH], drafted["w8a8"]),
    }


def _reached(folder: Path, step_ms: Mapping[int, float], peak: float) -> dict[int, float]:
    """The share of the machine's integer peak that a step's linear layers reach, were they all of it, by its rows."""
    file = folder / "onnx/weights.safetensors"
    numbers = sum(prod(e.shape) for name, e in read_header(file).items() if e.kind == "I8")
    return {rows: 2e-6 * rows * numbers / ms / peak for rows, ms in step_ms.items()}


def parts_of(out: Path | None, at: dict[str, Any]) -> Part:
    """Measures a part and keeps it in ``out``, or finds it there; how busy the machine was stands beside it.

    Raises:
        RequestError: ``out`` holds a run with other arguments.
    """
    rows = Rows(out) if out else None
    if rows and any(row["at"] != at for row in rows.rows):
        raise RequestError(f"--out {out}: holds a run with other arguments; take another folder")
    held = {row["key"]: row["found"] for row in rows.rows} if rows else {}

    def part(key: str, measured: Callable[[], Any]) -> Any:
        if key not in held:
            print(key, file=sys.stderr, flush=True)
            meter = Meter()
            found = json.loads(json.dumps(measured()))  # as it is read back
            if rows:
                rows.add({"key": key, "section": "w8a8", "at": at, "load": asdict(meter.stop()), "found": found})
            held[key] = found
        return held[key]

    return part


def prepare(size: Size) -> None:
    """All files that are there before anything is timed, made one by one."""
    if size.args.dense:
        dense({name: size.folders[name] for name in NAMES[:2]})
    for name in QUANTISED_PEERS:
        print(f"{size.name}, {name}: {answer_once(name, size.teacher, size.args.work, size.args.threads)}", flush=True)


@refusing
def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
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
    wanted = [Size(name, prompts, args) for name in sizes]
    if args.prepare:
        for size in wanted:
            prepare(size)
        return 0
    told = ("drafter", "tree", "prompts", "limit", "race", "rounds", "max_new_tokens", "temperature", "threads")
    part = parts_of(args.out, {name: str(getattr(args, name)) for name in told})
    report = {"sizes": [size.report(part) for size in wanted], "machine": processor()}
    if args.png:
        draw(report, args.png)
    print(json.dumps(report) if args.json else table(report))
    return 0 if all(one["ok"] for row in report["sizes"] for one in row["bundles"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for models and bundles")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="as quantize takes it")
    parser.add_argument("--drafter", default="demo-eagle3", choices=demo.DRAFTERS)
    parser.add_argument("--sizes", default="native,500m", metavar="S[,S...]")
    parser.add_argument("--tree", default="chain:4", metavar="SPEC", help="as build's (%(default)s)")
    parser.add_argument("--dense", action="store_true", help="steps with random weights without zeros, too")
    parser.add_argument(
        "--race", type=int, default=3, metavar="N", help="prompts that all decode in turns (%(default)s)"
    )
    parser.add_argument("--prepare", action="store_true", help="make all files and measure nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep parts as they are measured, to go on from them")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the last size")
    parser.add_argument("--rounds", type=int, default=3, help="times both are benchmarked (%(default)s)")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="turns to run (default: all)")
    parser.add_argument("--json", action="store_true")
    add_decoding_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
