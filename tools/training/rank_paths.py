"""Counts the rank paths that held-out distilled texts take through the candidates of trained drafters.

    python -m draftwood.tools.training.rank_paths --teacher DIR --distilled DIR --drafter DIR [DIR ...] --png FILE

Drafters are compared on text like what they learned from, sampled text by ranks without noise; what a drafter ships
with is counted by `calibrate` on other prompts. An EAGLE-3 layer is fed the true tokens and its own states, as the
nodes of a tree on the true path are; Medusa heads and FastEagle layers rank a token by its distance alone. All
drafters are counted on the same texts, each at the contexts where a decoding with it would stand.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.training.batch import NONE
from draftwood.compiler.training.student import Student
from draftwood.errors import RequestError
from draftwood.tools.script import refusing
from draftwood.tools.training.curves import draw_positions
from draftwood.tools.training.generate import load_teacher
from draftwood.tools.training.states import States
from draftwood.tools.training.students import load
from draftwood.tools.training.texts import Distilled
from draftwood.tools.training.trainer import ranks_of
from draftwood.tools.training.visited import path_of, visited
from draftwood.trees import RankPaths

# W texts, N contexts, I levels

# Candidates a level that a draft tree may use.
CANDIDATES = 16
# Rows of a verify step, root counted, that the summary speaks of.
ROWS = (4, 8, 16, 32, 64)
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}


def counted_texts(texts: Distilled, temperature: float, contexts: int = 50_000) -> np.ndarray:
    """Numbers of the first held-out texts of a temperature that have about so many contexts, int [W].

    Raises:
        RequestError: there are none.
    """
    chosen_W = (texts.held_out() & np.isclose(texts.index_W["temperature"], temperature)).nonzero()[0]
    spans_W = texts.spans()[chosen_W]
    chosen_W = chosen_W[(np.cumsum(spans_W) - spans_W < contexts) & (spans_W > 0)]
    if not len(chosen_W):
        raise RequestError(f"no held-out text of temperature {temperature} to count on; distill more")
    return chosen_W


def count_paths(drafter: Student, states: States, text_W: np.ndarray, levels: int) -> RankPaths:
    """Rank paths at the contexts of the texts where a decoding would stand.

    Contexts so near to the end of a text that was cut short that one of ``levels`` true tokens is unknown are
    left out: the greatest number of levels makes several drafters comparable.

    Raises:
        RequestError: no context is left.
    """
    ended_W, found, result = states.texts.ended(), {}, RankPaths()
    for text_B, batch, _, ranks_NI in ranks_of(drafter, states, text_W, CANDIDATES):
        known_N = (batch.targets(levels) != NONE).all(1).tolist()
        rows = batch.there_BC.nonzero()[:, 0].tolist()
        for row, known, ranks in zip(rows, known_N, ranks_NI.tolist(), strict=True):
            number = int(text_B[row])
            path = path_of(ranks, CANDIDATES) if known or ended_W[number] else None
            found.setdefault(number, []).append(path)
    for number, at in visited(found):
        result.add(found[number][at])
    if not result.contexts:
        raise RequestError("no context is far enough from the end of its text to count; distill longer texts")
    return result


def summary(paths: RankPaths, levels: int) -> dict[str, Any]:
    """What a drafter gains: shares by position, and the accept length of the best trees (bonus token counted).

    ``chain`` is the share of contexts in which the first so many best tokens are all accepted; ``among`` the share
    in which the true tokens are all among the candidates.
    """
    depths = range(1, levels + 1)
    reached = [sum(count for path, count in paths.items() if len(path) >= depth) for depth in depths]
    return {
        "contexts": paths.contexts,
        "chain": [round(paths.visits((0,) * depth) / paths.contexts, 4) for depth in depths],
        "among": [round(count / paths.contexts, 4) for count in reached],
        "accept_length": {r: round(paths.expected_accept_length(paths.best_tree(r - 1)), 3) for r in ROWS},
    }


def compare(
    teacher: Path, distilled: Path, drafters: list[Path], *, contexts: int, levels: int
) -> dict[str, dict[str, Any]]:
    """Counts for each drafter, and returns its summary by kind of text.

    Args:
        levels: how deep EAGLE-3 layers draft; the other kinds know themselves. At least so many true tokens are
            known of every context that is counted.
    """
    model, texts = load_teacher(teacher), Distilled.open(distilled, Checkpoint.open(teacher).digest())
    loaded = {folder: load(folder, model, levels) for folder in drafters}
    deepest, found = max(levels, *(drafter.levels for drafter in loaded.values())), {}
    for folder, drafter in loaded.items():
        states, found[folder.name] = States(model, texts, drafter.aux), {}
        for name, temperature in TEMPERATURES.items():
            paths = count_paths(drafter, states, counted_texts(texts, temperature, contexts), deepest)
            found[folder.name][name] = summary(paths, drafter.levels)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """``compare``'s answer for people."""
    lines = []
    for drafter, kinds in found.items():
        for name, record in kinds.items():
            shares = " ".join(f"{share:.3f}" for share in record["chain"])
            lengths = " ".join(f"{rows}:{length:.3f}" for rows, length in record["accept_length"].items())
            lines.append(f"{drafter:<12} {name:<8} {record['contexts']:>6} contexts  chain {shares}  rows {lengths}")
    return "\n".join(lines)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True, help="model folder of the teacher")
    parser.add_argument("--distilled", type=Path, required=True, help="folder that distill wrote")
    parser.add_argument("--drafter", type=Path, required=True, nargs="+", help="folders of trained drafters")
    parser.add_argument("--contexts", type=int, default=50_000, help="about how many to count")
    parser.add_argument("--levels", type=int, default=5, help="how deep EAGLE-3 layers draft")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot the shares by position")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    args = parser.parse_args(arguments)
    if min(args.contexts, args.levels) < 1:
        raise RequestError(f"contexts {args.contexts}, levels {args.levels}: expected 1 or more of each")
    found = compare(args.teacher, args.distilled, args.drafter, contexts=args.contexts, levels=args.levels)
    print(json.dumps(found) if args.json else table(found))
    if args.png:
        draw_positions(found, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
