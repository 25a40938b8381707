"""What a smaller draft vocabulary costs and saves, size by size.

    python -m draftwood.tools.training.vocabulary_sizes --teacher DIR --distilled DIR --drafter DIR --png FILE

For every size: the share of the teacher's held-out output that is covered, the time of the output matrix, and the
accept length of the best tree when only the rows of those tokens are left of the matrix.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwood.compiler.drafters.registry import kind_of, kinds
from draftwood.compiler.teachers.checkpoint import Checkpoint
from draftwood.compiler.training.batch import Batch
from draftwood.compiler.training.student import Student
from draftwood.errors import RequestError
from draftwood.tools.script import refusing
from draftwood.tools.training.curves import draw_vocabularies
from draftwood.tools.training.draft_vocabulary import coverage, most_frequent
from draftwood.tools.training.generate import load_teacher
from draftwood.tools.training.rank_paths import TEMPERATURES, count_paths, counted_texts
from draftwood.tools.training.states import States
from draftwood.tools.training.students import load
from draftwood.tools.training.texts import Distilled

# V draft vocabulary, H hidden size

# Rows of the tree whose accept length is given, root counted; how far a drafter drafts that does not know.
_ROWS, _LEVELS = 16, 5
_TIMED = 50


def measure(teacher: Path, distilled: Path, drafter: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """One record a size: coverage, milliseconds of the output matrix, accept lengths of greedy and sampled text.

    The drafter is not trained again; its candidates outside the subset are taken away.

    Raises:
        RequestError: the drafter has a subset already, or is of a kind that knows none.
    """
    model = load_teacher(teacher)
    loaded = load(drafter, model, _LEVELS)
    if loaded.ids_V is not None or "draft_vocab" not in kind_of(drafter).options:
        able = " or ".join(kind.title for kind in kinds() if "draft_vocab" in kind.options)
        raise RequestError(f"{drafter}: expected {able} with the teacher's whole vocabulary")
    texts = Distilled.open(distilled, Checkpoint.open(teacher).digest())
    states, whole_VH = States(model, texts, loaded.aux), loaded.output_VH
    held_W, found = texts.held_out(), []
    one = states.batch(held_W.nonzero()[0][:1])
    for size in sizes:
        ids = most_frequent(texts, (~held_W).nonzero()[0], size, model.config.vocab_size)
        loaded.ids_V = torch.from_numpy(ids).to(model.device)
        loaded.output_VH = whole_VH[loaded.ids_V].contiguous()
        record = {"size": size, "coverage": round(coverage(texts, held_W.nonzero()[0], ids), 4)}
        record["head_ms"] = _head_milliseconds(loaded, one)
        for name, temperature in TEMPERATURES.items():
            text_W = counted_texts(texts, temperature, contexts=10_000)
            paths = count_paths(loaded, states, text_W, loaded.levels)
            record[name] = round(paths.expected_accept_length(paths.best_tree(_ROWS - 1)), 3)
        found.append(record)
    return found


@torch.no_grad()
def _head_milliseconds(drafter: Student, batch: Batch) -> float:
    """Median time of the output matrix and the choice of candidates for one row, all levels."""
    feature_1H = batch.last_BSH[:, 0].to(drafter.output_VH.dtype)
    times = []
    for _ in range(_TIMED):
        began = time.perf_counter()
        for _ in range(drafter.levels):
            drafter.best(drafter.logits(feature_1H, 0), _ROWS)
        times.append(time.perf_counter() - began)
    return round(float(np.median(times)) * 1e3, 3)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", type=Path, required=True, help="model folder of the teacher")
    parser.add_argument("--distilled", type=Path, required=True, help="folder that distill wrote")
    parser.add_argument(
        "--drafter", type=Path, required=True, help="folder of a drafter whose kind knows --draft-vocab"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="N")
    parser.add_argument("--png", type=Path, metavar="FILE", help="plot speed against acceptance")
    args = parser.parse_args(arguments)
    found = measure(args.teacher, args.distilled, args.drafter, args.sizes)
    print("\n".join(json.dumps(record) for record in found))
    if args.png:
        draw_vocabularies(found, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
