"""Writes a drafter's rank_paths_sampled.json from statistics of sampled text.

    draftwood calibrate --model DIR --drafter DIR --prompts FILE.jsonl --temperature 0.8 --out STATS
    python -m draftwood.tools.training.sampled_paths STATS --drafter DIR

`calibrate` ranks candidates with the noise that the text was drawn with, as engines do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from draftwood.errors import RequestError
from draftwood.files import write_whole
from draftwood.tools.script import refusing
from draftwood.tools.training.rank_paths import CANDIDATES, compact
from draftwood.trees import RankPaths
from draftwood.trees.calibration import END, Calibration
from draftwood.trees.calibration_file import read_calibration


def sampled_paths(calibration: Calibration, where: str) -> RankPaths:
    """All contexts, each path up to its first rank that draft trees do not use.

    Raises:
        RequestError: not all of them are of sampled text.
    """
    contexts, found = calibration.contexts, RankPaths()
    if not 0 < calibration.sampled == contexts.total:
        raise RequestError(f"{where}: {calibration.sampled} of {contexts.total} contexts are of sampled text; need all")
    for ranks_D, count in zip(contexts.ranks_ND.tolist(), contexts.counts_N.tolist(), strict=True):
        end = next((i for i, rank in enumerate(ranks_D) if rank == END or rank >= CANDIDATES), len(ranks_D))
        found.add(tuple(ranks_D[:end]), count)
    return found


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stats", type=Path, metavar="STATS", help="what calibrate counted at a temperature above 0")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="folder that gets the file")
    args = parser.parse_args(arguments)
    paths = sampled_paths(read_calibration(args.stats), str(args.stats))
    out = args.drafter / "rank_paths_sampled.json"
    try:
        write_whole(out, compact(paths).encode())
    except OSError as error:
        raise RequestError(f"{out}: cannot be written: {error.strerror}; check --drafter") from error
    print(f"{out}: {paths.contexts} contexts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
