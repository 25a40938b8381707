"""Is anybody slower than without us? The adaptive policy against plain decoding, by size, drafter, temperature, length.

    python -m draftwood.tools.measure.cells --work DIR --prompts FILE.jsonl --out cells.jsonl
        [--sizes native,110m,500m] [--drafter demo-medusa,...] [--temperatures 0,0.8,1] [--lengths 128,512,...]
        [--texts 8] [--rounds 3] [--max-new-tokens 64] [--gears] [--png FILE] [--json]

A cell is a size of the demo pair, a drafter, a temperature and a length of text. Every text is decoded plainly, by the
adaptive policy, and plainly again, in turns, in as many rounds as asked for; a text counts with the medians of its
rounds. Plain against plain is the noise floor that stands beside every figure. ``--gears`` also decodes with every
gear alone, which gives the regret. Bundles are built under ``--work`` from a plan of the shipped rank paths, greedy and
sampled; step times are tuned before the first cell of a bundle. Texts are documents and a prompt, from FILE, as long as
the cell asks for; no plan was made from them if FILE is not what was calibrated with. An answer that ends before
``--max-new-tokens`` is passed over, so that all texts of a cell weigh the same.

A cell that ``--out`` has is not measured again, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.errors import RequestError
from draftwood.files import read_text
from draftwood.planning import StepTime
from draftwood.runtime.decoding import Decoding, Options, Result
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policies
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.runtime.trace import Trace
from draftwood.tools import demo
from draftwood.tools.commands.build import parse_sizes
from draftwood.tools.commands.calibrate import parse_temperatures
from draftwood.tools.demo.sizes import SIZES
from draftwood.tools.measure.bench import explain, logit_noise
from draftwood.tools.measure.cell_bundles import opened
from draftwood.tools.measure.prefilled import Prefilled
from draftwood.tools.measure.sizes import chosen
from draftwood.tools.measure.tune import tune
from draftwood.tools.prompts import Prompt, read_prompts
from draftwood.tools.script import refusing
from draftwood.tools.show.cells import draw_cells, table

TUNE_SECONDS = 5.0
KEY = ("size", "drafter", "temperature", "length")
# Decodings of a text in a round: what is measured, and plain decoding before and after it.
PAIRED = ("plain", "adaptive", "plain_again")
STRIDE = 7


def texts(engine: StagedEngine, prompts: list[Prompt], length: int) -> Iterator[list[int]]:
    """Prompts of about ``length`` tokens: documents before a question, both from the file.

    Every seventh prompt comes first, so that few texts are of many kinds.
    """
    tokenizer = engine.bundle.tokenizer
    assert tokenizer is not None, "the demo teacher has a tokenizer"
    for at in (at for first in range(STRIDE) for at in range(first, len(prompts), STRIDE)):
        room = length - len(tokenizer.chat([{"role": "user", "content": prompts[at].text}]))
        if room < 0:
            continue
        before: list[int] = []
        for other in prompts[at + 1 :] + prompts[:at]:
            if len(before) >= room:
                break
            before += tokenizer.encode(other.text + "\n\n")
        context = tokenizer.decode(before[:room])
        yield tokenizer.chat([{"role": "user", "content": context + "\n\n" + prompts[at].text}])


class Bench:
    """One bundle's cells; its step times are those of this machine, now."""

    def __init__(self, engine: StagedEngine, times: list[StepTime], args: argparse.Namespace) -> None:
        self.engine, self.args = engine, args
        bundle = engine.bundle
        plain = Policies(bundle, "plain")
        self.table = Policies(bundle, "adaptive", times=times)
        self.policies = {"plain": plain, "adaptive": self.table, "plain_again": plain}
        gears = [gear.name for gear in bundle.manifest.gears if gear.draft] if args.gears else []
        self.policies |= {gear: Policies(bundle, "fixed", gear) for gear in gears}

    def cell(self, prompts: Iterator[list[int]], temperature: float) -> dict[str, Any]:
        """All figures of one temperature and length."""
        options = Options(max_new_tokens=self.args.max_new_tokens, sampling=Sampling(temperature=temperature, seed=1))
        turns: list[dict[str, Any]] = []
        seen = 0
        while len(turns) < self.args.texts and (ids := next(prompts, None)) is not None:
            seen += 1
            if (turn := self.turn(seen, ids, options)) is not None:
                turns.append(turn)
        if not turns:
            raise RequestError(f"--prompts: no answer of {options.max_new_tokens} tokens at temperature {temperature}")
        return summary(turns) | {"texts": len(turns), "passed_over": seen - len(turns)}

    def turn(self, number: int, ids: list[int], options: Options) -> dict[str, Any] | None:
        """A text's medians, by policy; None where it ends early."""
        slots = min(gear.slots for gear in self.engine.bundle.manifest.gears if gear.slots > len(ids) + 1)
        behind = Prefilled(self.engine, np.array(ids, np.int64), slots)
        plain = Decoding(behind, ids, options, self.policies["plain"].new(options.sampling.greedy)).run()
        if len(plain.token_ids) < options.max_new_tokens:
            return None
        seconds: dict[str, list[float]] = {name: [] for name in self.policies}
        found: dict[str, tuple[Result, Trace]] = {}
        names = list(self.policies)
        for round in range(self.args.rounds):
            shift = (number + round) % len(names)
            for name in names[shift:] + names[:shift]:
                trace = Trace()
                result = Decoding(behind, ids, options, self.policies[name].new(options.sampling.greedy), trace).run()
                seconds[name].append(result.decode_seconds)
                found[name] = result, trace
        result, trace = found["adaptive"]
        return {
            "seconds": {name: statistics.median(own) for name, own in seconds.items()},
            "tokens": len(found["plain"][0].token_ids) - 1,
            "steps": result.steps,
            "host_share": result.host_share,
            "bound_seconds": self.bound(trace),
            "gears": [event.gear for event in trace.events if event.kind != "prefill"],
            "unequal": self.unequal(ids, {name: result for name, (result, _) in found.items()}, options),
        }

    def bound(self, trace: Trace) -> float:
        """Seconds that the trace's steps take by the tuned table, over what as many plain tokens take by it."""
        gears, us, plain_us = self.table.gears, 0.0, 0.0
        for event in trace.events:
            if event.kind == "prefill":
                continue
            us += gears.times.us(gears.number[event.gear], event.position)
            plain = gears.fitting.at(event.position, 0).plain
            plain_us += len(event.tokens) * gears.times.us(plain, event.position)
        return us / plain_us

    def unequal(self, ids: list[int], found: dict[str, Result], options: Options) -> list[dict[str, Any]]:
        """Texts that are not the plain one, and whether rounding explains them."""
        plain = found["plain"].token_ids
        differing = {name: result for name, result in found.items() if result.token_ids != plain}
        if not differing:
            return []
        noise = logit_noise(self.engine, [*ids, *plain])
        explained = []
        for name, result in differing.items():
            why = explain(self.engine, name, ids, plain, result.token_ids, options.sampling, noise)
            explained.append({"policy": name, "position": why.position, "margin": why.margin, "tie": why.tie})
        return explained


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A cell's figures: speed-ups of texts over plain decoding, and plain decoding's own over itself."""
    seconds = {name: np.array([turn["seconds"][name] for turn in turns]) for name in turns[0]["seconds"]}
    plain, adaptive = seconds["plain"], seconds["adaptive"]
    # Either of the two plain decodings may be the luckier one; their mean stands for both.
    base = (plain + seconds["plain_again"]) / 2
    alone = {name: float(own.sum()) for name, own in seconds.items() if name not in PAIRED}
    best = min([float(base.sum()), *alone.values()])
    steps = [gear for turn in turns for gear in turn["gears"]]
    bound = np.array([turn["bound_seconds"] for turn in turns])
    return {
        **{f"speedup_{key}": value for key, value in spread(base / adaptive).items()},
        **{f"floor_{key}": value for key, value in spread(plain / seconds["plain_again"]).items()},
        "speedup_total": float(base.sum() / adaptive.sum()),
        "speedup_gears": {name: float(base.sum() / own) for name, own in alone.items()},
        "regret": float(adaptive.sum()) / best - 1 if alone else None,
        "of_bound": float(np.mean(base / adaptive * bound)),
        "host_share": float(np.average([turn["host_share"] for turn in turns], weights=adaptive)),
        "tokens_per_step": sum(turn["tokens"] for turn in turns) / sum(turn["steps"] for turn in turns),
        "share": {gear: steps.count(gear) / len(steps) for gear in sorted(set(steps))},
        "unequal": [one for turn in turns for one in turn["unequal"]],
        "per_text": [{"seconds": turn["seconds"], "tokens": turn["tokens"]} for turn in turns],
    }


def spread(ratios: np.ndarray) -> dict[str, float]:
    """Mean, least, p1 and median."""
    p1, p50 = np.percentile(ratios, (1, 50))
    return {"mean": float(ratios.mean()), "least": float(ratios.min()), "p1": float(p1), "p50": float(p50)}


def measure(args: argparse.Namespace, have: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """The cells that are not there yet, bundle after bundle."""
    prompts = read_prompts(args.prompts)
    for size, drafter in product(args.sizes, args.drafter):
        wanted = [(t, n) for n, t in product(args.lengths, args.temperatures) if (size, drafter, t, n) not in have]
        if not wanted:
            continue
        engine = opened(size, drafter, max(args.lengths) + args.max_new_tokens, args.work)
        say(f"{size} {drafter}: timing the gears")
        bench = Bench(engine, tune(engine, TUNE_SECONDS), args)
        for temperature, length in wanted:
            say(f"{size} {drafter}: temperature {temperature}, {length} tokens")
            found = bench.cell(texts(engine, prompts, length), temperature)
            yield dict(zip(KEY, (size, drafter, temperature, length), strict=True)) | found


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a file; none if it is not there. RequestError names a line that is none."""
    rows = []
    lines = read_text(path).splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            tuple(row[name] for name in (*KEY, "speedup_p1"))
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path}, line {number}: no cell ({error}); take another --out, or mend it") from error
        rows.append(row)
    return rows


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for widened models and bundles")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="a line a cell; kept and resumed")
    parser.add_argument("--sizes", default=",".join(SIZES), metavar="S[,S...]")
    parser.add_argument("--drafter", default=",".join(demo.DRAFTERS), metavar="NAME[,NAME...]")
    parser.add_argument("--temperatures", default="0,0.8,1", metavar="T[,T...]")
    parser.add_argument("--lengths", default="128,512,1024,2048,4096", metavar="N[,N...]")
    parser.add_argument("--texts", type=int, default=8, metavar="N", help="texts of a cell (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times each is decoded (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--gears", action="store_true", help="every gear alone, too: the best one in hindsight")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the cells")
    parser.add_argument("--json", action="store_true", help="print the cells as JSON")
    args = parser.parse_args(arguments)
    args.sizes = chosen(args.sizes, tuple(SIZES), "--sizes")
    args.drafter = chosen(args.drafter, demo.DRAFTERS, "--drafter")
    args.temperatures = parse_temperatures(args.temperatures)
    args.lengths = parse_sizes("--lengths", args.lengths)
    if min(args.texts, args.rounds, args.max_new_tokens, *args.lengths) < 1:
        raise RequestError("--texts, --rounds, --max-new-tokens, --lengths: expected 1 or more")
    return args


@refusing
def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    rows = read_cells(args.out)
    args.work.mkdir(parents=True, exist_ok=True)
    for row in measure(args, {tuple(row[name] for name in KEY) for row in rows}):
        rows.append(row)
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        say(table([row]).splitlines()[-1])
    if args.png:
        draw_cells(rows, args.png)
    print(json.dumps(rows) if args.json else table(rows))
    return 0 if all(one["tie"] for row in rows for one in row["unequal"]) else 1


if __name__ == "__main__":
    sys.exit(main())
