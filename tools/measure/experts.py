"""How many experts of a layer a step touches, tree by tree, and what independent rows would touch.

    python -m draftwood.tools.measure.experts BUNDLE [--prompts FILE] [--limit N] [--out LOADS] [--json]

A mixture of experts reads the matrices of the experts that some row has chosen; so a tree of many rows reads more than
plain decoding does, and its step takes longer where weights are what a step waits for. ``draftwood profile --device``
takes the file that ``--out`` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from draftwood.compiler.device.experts import touched_experts
from draftwood.compiler.teachers.experts import MixtureConfig, MixtureLayer
from draftwood.errors import RequestError
from draftwood.files import read_text, write_whole
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding, Options
from draftwood.runtime.opened import prompt_ids
from draftwood.runtime.policy import policy_for
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft, TeacherOutput
from draftwood.tools.commands.arguments import add_decoding_arguments, given_prompt, options
from draftwood.tools.prompts import first_turns, read_prompts
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.script import refusing


class CountingEngine(EagerEngine):
    """Counts, for every verify step, the experts of each layer that its rows choose."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        if not isinstance(self.decoder.config, MixtureConfig):
            raise RequestError(f"{bundle.folder}: a teacher of family {self.decoder.config.family} has no experts")
        # By the rows of a step: the experts of a layer that it touched, one number a layer and step.
        self.touched: dict[int, list[int]] = defaultdict(list)
        self._verifying = False
        for layer in self.decoder.layers:
            if isinstance(layer, MixtureLayer):
                layer.router.register_forward_hook(self._count)

    def verify(self, states: Sequence[SequenceState], drafts: Sequence[Draft]) -> TeacherOutput:
        self._verifying = True
        try:
            return super().verify(states, drafts)
        finally:
            self._verifying = False

    def _count(self, router: nn.Module, given: Any, scores_TE: Tensor) -> None:
        if self._verifying:
            ids_TK = scores_TE.topk(self.decoder.config.experts_per_token, -1).indices
            self.touched[len(scores_TE)].append(len(ids_TK.unique()))


def count_loads(engine: CountingEngine, prompts: Mapping[str, list[int]], chosen: Options) -> list[dict[str, Any]]:
    """A row for each number of rows that the bundle's gears verify: mean and quartiles of the experts touched."""
    bundle, config = engine.bundle, engine.decoder.config
    least = min(gear.slots for gear in bundle.manifest.gears)
    for gear in (gear.name for gear in bundle.manifest.gears if gear.slots == least):
        for number, ids in enumerate(prompts.values(), 1):
            Decoding(engine, ids, chosen, policy_for(bundle, gear)).run()
            print(f"{gear}: {number}/{len(prompts)} prompts", file=sys.stderr, flush=True)
    return [_row(rows, engine.touched[rows], touched_experts(config, rows)) for rows in sorted(engine.touched)]


def _row(rows: int, touched: list[int], even: float) -> dict[str, Any]:
    low, high = np.percentile(touched, (25, 75)).tolist()
    mean = float(np.mean(touched))
    return {"rows": rows, "steps": len(touched), "touched": mean, "low": low, "high": high, "even": even}


def write_loads(path: Path, found: list[dict[str, Any]]) -> None:
    """The file that ``read_loads`` reads; RequestError where it cannot be written."""
    text = json.dumps({"format": "draftwood.expert-loads", "rows": {str(row["rows"]): row["touched"] for row in found}})
    try:
        write_whole(path, text.encode() + b"\n")
    except OSError as error:
        raise RequestError(f"--out {path}: cannot be written: {error.strerror}") from error


def read_loads(path: Path) -> dict[int, float]:
    """Experts touched by rows; RequestError where the file holds something else."""
    try:
        found = json.loads(read_text(path))
        if found["format"] != "draftwood.expert-loads" or not found["rows"]:
            raise ValueError("another format")
        return {int(rows): float(touched) for rows, touched in found["rows"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(
            f"--experts {path}: not the loads that draftwood.tools.measure.experts writes ({error})"
        ) from None


@refusing
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftwood.tools.measure.experts", description="experts by rows")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="default: the built-in prompts")
    parser.add_argument("--prompt-ids", metavar="1,2,3", help="one prompt as token ids, for a bundle without tokenizer")
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="prompts to use (default 6)")
    parser.add_argument("--out", type=Path, metavar="LOADS", help="file for draftwood profile --experts")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    add_decoding_arguments(parser)
    args = parser.parse_args(argv)
    bundle = Bundle.open(args.bundle)
    engine = CountingEngine(bundle)
    given = args.prompt_ids is not None
    prompts = {"ids": prompt_ids(bundle, given_prompt(args))} if given else None
    found = count_loads(engine, prompts or first_turns(bundle, read_prompts(args.prompts, args.limit)), options(args))
    if args.out:
        write_loads(args.out, found)
    if args.json:
        print(json.dumps(found))
        return 0
    print(f"{'rows':>4} {'steps x layers':>14} {'experts touched':>16} {'quartiles':>12} {'if even':>8}")
    for row in found:
        print(
            f"{row['rows']:4} {row['steps']:14} {row['touched']:16.1f} {row['low']:5.0f} {row['high']:6.0f}"
            f" {row['even']:8.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
