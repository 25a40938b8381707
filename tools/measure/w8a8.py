"""W8A8 against fp32 and against other programs on this machine, in paired rounds.

    python -m draftwood.tools.measure.w8a8 --work DIR --calibration FILE.jsonl [--sizes native,500m] [--dense]
        [--tree chain:4] [--rounds 3] [--prompts FILE.jsonl] [--limit 24] [--race 3] [--temperature T] [--png FILE]
        [--json]

For every size: widens the demo pair, quantises teacher and drafter, and builds a bundle of fp32, of a W8A8 teacher, and
of both in W8A8. A round benchmarks all of them, in alternating order; medians of the rounds are reported, and ratios of
paired rounds with the lowest and the highest. Steps of several rows are timed behind the same text, in the same rounds,
beside what the machine's integer products reach (`draftwood.tools.measure.products`). Then all of them and the peers
that are installed decode the same prompts in turns; those that are missing are named. A widened teacher's weights hold
zeros: its times are of its size, and only the native one's quality counts (``draftwood quantize --report``).
``--dense`` repeats every size with random weights without zeros, for its times alone: nothing drafts for them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwood.compiler.bundle.build import build
from draftwood.compiler.bundle.request import BuildRequest
from draftwood.compiler.bundle.staging import staged
from draftwood.compiler.checkpoints.safetensors_file import read_header
from draftwood.compiler.checkpoints.weight import WeightEntry
from draftwood.compiler.onnx.weights import write_weights
from draftwood.compiler.quantisation.drafter import quantise_drafter
from draftwood.compiler.quantisation.quantise import Request, quantise
from draftwood.compiler.teachers.checkpoint import Checkpoint, tokenizer_files
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
from draftwood.tools.evaluate.peers import Generate, ours
from draftwood.tools.measure.bench import bench
from draftwood.tools.measure.machine import processor
from draftwood.tools.measure.products import peak_gops
from draftwood.tools.measure.race import OURS, opened_peers, paired, race, standing
from draftwood.tools.measure.w8a8_shown import BOTH, NAMES, draw, table
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.trees import Topology, parse_specs, tensorize

ROWS = (1, 2, 4, 8, 16)
TEXT, SLOTS = 256, 1024  # tokens behind which steps are timed, and the KV length
# Of as many rows as the widest step, so that a bundle's buffers hold it.
DENSE = " dense"
_WIDEST = ("rows", Topology.full((3, 2, 1)))


def measure(size: str, prompts: list[Prompt], args: argparse.Namespace) -> dict[str, Any]:
    """One size, by its name or with `DENSE` behind it: all bundles in alternating rounds, by their medians."""
    folders = _bundles(size, args)
    engines = {name: CpuEngine(Bundle.open(folder)) for name, folder in folders.items()}
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    steps: dict[str, list[dict[int, float]]] = {name: [] for name in engines}
    for number in range(args.rounds):
        for name in list(engines)[:: -1 if number % 2 else 1]:
            print(f"{size}: round {number + 1}, {name}", file=sys.stderr, flush=True)
            reports[name].append(bench(engines[name], prompts, options(args), *_policies(engines[name])))
            steps[name].append(step_ms(engines[name]))
    found = {"size": size, "rounds": args.rounds, **{name: _medians(reports[name], steps[name]) for name in engines}}
    peak = peak_gops(args.threads)
    found |= {"peak_gops": peak, "reached": _reached(folders["w8a8"], found["w8a8"]["step_ms"], peak)}
    return found | {"paired": _ratios(reports), "race": _race(size, engines, prompts, args)}


def _policies(engine: CpuEngine) -> tuple[Policies, Policies]:
    """Plain decoding, and the tree that was asked for."""
    bundle = engine.bundle
    gear = next(gear.name for gear in bundle.manifest.gears if gear.tree not in ("plain", _WIDEST[0]))
    return Policies(bundle, "plain"), Policies(bundle, "fixed", gear)


def _teacher(size: str, args: argparse.Namespace) -> tuple[Path, Path]:
    """Teacher and drafter of a size; a dense one is random."""
    plain = size.removesuffix(DENSE)
    teacher, drafter = models(plain, args.work, args.drafter)
    if plain != size:
        teacher = dense(teacher, args.work / f"{teacher.name}-{plain}-dense")
    return teacher, drafter


def _bundles(size: str, args: argparse.Namespace) -> dict[str, Path]:
    """A bundle of each precision, made unless it is there."""
    teacher, drafter = _teacher(size, args)
    whole = quantised(teacher, args.work / f"{teacher.name}-{size.replace(' ', '-')}-w8a8", args.calibration)
    guesser = args.work / f"{drafter.name}-{size.removesuffix(DENSE)}-w8a8"
    if not guesser.exists():
        quantise_drafter(
            drafter, Checkpoint.open(models(size.removesuffix(DENSE), args.work, args.drafter)[0]), guesser, _say
        )
    found = {}
    for name, model, guesses in (("fp32", teacher, drafter), ("w8a8", whole, drafter), (BOTH, whole, guesser)):
        tree = args.tree.replace(":", "-")
        found[name] = args.work / f"w8a8-{size}-{name}-{args.drafter}-{tree}".replace(" ", "-")
        if not found[name].exists():
            _say(f"building {found[name].name}")
            trees = (*parse_specs(args.tree), _WIDEST)
            build(BuildRequest(model=model, drafter=guesses, trees=trees, slots=(SLOTS,)), found[name])
    return found


def quantised(teacher: Path, out: Path, calibration: Path) -> Path:
    """The teacher with all its linear layers in int8, made at ``out`` unless it is there."""
    if not out.exists():
        texts = read_texts(calibration, Tokenizer.load(teacher), limit=32, longest=128)
        quantise(Request(model=teacher, texts=texts.calibration, migration="none", head=True), out)
    return out


def dense(teacher: Path, out: Path) -> Path:
    """A teacher of the same sizes whose matrices are random and hold no zeros, made at ``out`` unless it is there."""
    if not out.exists():
        opened = Checkpoint.open(teacher)
        random = torch.Generator().manual_seed(0)
        with staged(out) as folder:
            for path in (teacher / "config.json", *tokenizer_files(teacher)):
                shutil.copyfile(path, folder / path.name)
            entries = [
                WeightEntry(name, entry.shape, partial(_random, entry.shape, random))
                for name, entry in opened.entries.items()
            ]
            write_weights(folder / "model.safetensors", entries, opened.dtype)
    return out


def _random(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """A norm's ones, or a matrix that keeps the size of what it multiplies."""
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) * shape[-1] ** -0.5


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


def _ratios(reports: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Round by round: what W8A8 is over fp32, and what drafting is over plain decoding."""
    plain, drafted = (
        {name: [report[key] for report in found] for name, found in reports.items()}
        for key in ("plain_tokens_per_s", "speculative_tokens_per_s")
    )
    return {
        "plain W8A8 over plain fp32": paired(plain["w8a8"], plain["fp32"]),
        **{f"drafts over plain, {name}": paired(drafted[name], plain[name]) for name in reports},
    }


def _reached(folder: Path, step_ms: Mapping[int, float], peak: float) -> dict[int, float]:
    """The share of the machine's integer peak that a step's linear layers reach, were they all of it, by its rows."""
    file = folder / "onnx/weights.safetensors"
    numbers = sum(prod(e.shape) for name, e in read_header(file).items() if e.kind == "I8")
    return {rows: 2e-6 * rows * numbers / ms / peak for rows, ms in step_ms.items()}


def _race(
    size: str, engines: Mapping[str, CpuEngine], prompts: list[Prompt], args: argparse.Namespace
) -> dict[str, Any] | None:
    """All programs on the same greedy texts; None where it is not wanted."""
    if not args.race:
        return None
    count = options(args).max_new_tokens
    ways: dict[str, Generate] = {}
    for name, engine in engines.items():
        for kind, policies in zip(("plain", args.tree), _policies(engine), strict=True):
            ways[f"{OURS}{name} {kind}"] = partial(ours, engine, policies)
    others, missing = opened_peers(_teacher(size, args)[0], args.work, args.threads)
    tokenizer = engines["fp32"].bundle.tokenizer
    assert tokenizer is not None, "the demo teacher has a tokenizer"
    ids = [tokenizer.chat([{"role": "user", "content": prompt.text}]) for prompt in prompts[: args.race]]
    return {**standing(race(ways | others, ids, count, args.rounds)), "missing": missing}


def _say(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for models and bundles")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="as quantize takes it")
    parser.add_argument("--drafter", default="demo-eagle3", choices=demo.DRAFTERS)
    parser.add_argument("--sizes", default="native,500m", metavar="S[,S...]")
    parser.add_argument("--tree", default="chain:4", metavar="SPEC", help="as build's (%(default)s)")
    parser.add_argument("--dense", action="store_true", help="every size with random weights without zeros, too")
    parser.add_argument(
        "--race", type=int, default=3, metavar="N", help="prompts that all decode in turns (%(default)s)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the last size")
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
    wanted = [name for size in sizes for name in (size, *([f"{size}{DENSE}"] if args.dense else []))]
    rows = [measure(size, prompts, args) for size in wanted]
    report = {"sizes": rows, "machine": processor()}
    if args.png:
        draw(report, args.png)
    print(json.dumps(report) if args.json else table(report))
    return 0 if all(row[name]["ok"] for row in rows for name in NAMES) else 1


if __name__ == "__main__":
    sys.exit(main())
