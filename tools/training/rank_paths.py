"""Counts the rank paths that held-out distilled texts take through the candidates of Medusa heads.

python -m draftwood.tools.training.rank_paths --teacher DIR --medusa DIR --distilled DIR --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from draftwood.compiler.checkpoint import Checkpoint
from draftwood.compiler.medusa_checkpoint import MedusaCheckpoint
from draftwood.errors import RequestError
from draftwood.tools.script import refusing
from draftwood.tools.training.contexts import NONE, Distilled, contexts_of
from draftwood.tools.training.generate import load_teacher
from draftwood.tools.training.medusa_heads import load_heads, ranks_of
from draftwood.trees import RankPaths

# W texts, N contexts, I heads

# Candidates a head that a draft tree may use.
CANDIDATES = 16
# Rows of a verify step, root counted, that the summary speaks of.
ROWS = (4, 8, 16, 32, 64)
_LARGEST_FILE = 300_000


def count_paths(
    teacher: Path, medusa: Path, distilled: Path, *, contexts: int = 50_000, temperature: float | None = None
) -> RankPaths:
    """Rank paths of about ``contexts`` contexts in held-out texts, of one temperature or of all (None).

    Contexts so near to the end of a text that was cut short that the true tokens are unknown are left out.

    Raises:
        RequestError: no held-out text of that temperature has a context.
    """
    checkpoint = Checkpoint.open(teacher)
    opened = MedusaCheckpoint.open(medusa, checkpoint.config)
    texts = Distilled.open(distilled, checkpoint.digest())
    chosen_W = texts.held_out()
    if temperature is not None:
        chosen_W &= np.isclose(texts.index_W["temperature"], temperature)
    spans_W = np.cumsum(chosen_W * (texts.index_W["length"] - texts.index_W["prompt"]))
    chosen_W &= spans_W - spans_W[0] < contexts
    model = load_teacher(teacher)
    found = contexts_of(model, texts, chosen_W, opened.heads)
    known_N = (found.targets_NI != NONE).all(1).numpy() | texts.ended()[found.text_N]
    if not known_N.any():
        raise RequestError(f"{distilled}: no held-out text to count on; distill more")
    output_VH = model.lm_head.weight.detach().to(torch.bfloat16)
    heads = load_heads(opened, output_VH)
    known = torch.from_numpy(known_N)
    return paths_of(ranks_of(heads, found.hidden_NH[known], found.targets_NI[known], output_VH, CANDIDATES).numpy())


def paths_of(ranks_NI: np.ndarray) -> RankPaths:
    """One path a row, ending before the first rank that is CANDIDATES or more."""
    open_NI = np.logical_and.accumulate(ranks_NI < CANDIDATES, axis=1)
    unique, counts = np.unique(np.where(open_NI, ranks_NI, CANDIDATES), axis=0, return_counts=True)
    result = RankPaths()
    for row, count in zip(unique.tolist(), counts.tolist(), strict=True):
        result.add(tuple(rank for rank in row if rank < CANDIDATES), count)
    return result


def compact(paths: RankPaths, largest: int = _LARGEST_FILE) -> str:
    """JSON of at most ``largest`` characters: paths taken once are counted for their parents until it fits.

    Every context stays counted; what is lost are nodes that one context visited.
    """
    text = paths.to_json()
    for depth in range(max((len(path) for path, _ in json.loads(text)["paths"]), default=0), 0, -1):
        if len(text) <= largest:
            break
        shorter = RankPaths()
        for path, count in json.loads(text)["paths"]:
            shorter.add(tuple(path[:-1] if count == 1 and len(path) == depth else path), count)
        text = shorter.to_json()
    return text


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True, help="model folder of the teacher")
    parser.add_argument("--medusa", type=Path, required=True, help="folder of the heads")
    parser.add_argument("--distilled", type=Path, required=True, help="folder that distill wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--contexts", type=int, default=50_000, help="about how many to count")
    parser.add_argument("--temperature", choices=("0", "0.8", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    args = parser.parse_args(arguments)
    paths = count_paths(
        args.teacher, args.medusa, args.distilled, contexts=args.contexts,
        temperature=None if args.temperature == "both" else float(args.temperature),
    )  # fmt: skip
    args.out.write_text(compact(paths))
    lengths = {rows: round(paths.expected_accept_length(paths.best_tree(rows - 1)), 3) for rows in ROWS}
    if args.json:
        print(json.dumps({"contexts": paths.contexts, "expected_accept_length": lengths}))
    else:
        print(f"{paths.contexts} contexts; expected accept length of the best tree, bonus token counted")
        print("\n".join(f"{rows:>4} rows {length:.3f}" for rows, length in lengths.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
