"""Writes a drafter's rank_paths_greedy.json or rank_paths_sampled.json from the statistics of its candidates.

    draftwood calibrate --model DIR --drafter DIR --prompts FILE.jsonl --temperature 0.8 --out STATS
    python -m draftwood.tools.training.counted_paths STATS --drafter DIR

`calibrate` ranks candidates as engines do: in sampled text with the noise that the text was drawn with.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from draftwood.errors import RequestError
from draftwood.files import write_whole
from draftwood.tools.script import refusing
from draftwood.tools.training.rank_paths import CANDIDATES
from draftwood.trees import RankPaths
from draftwood.trees.calibration import END, Calibration
from draftwood.trees.calibration_file import read_calibration

_LARGEST_FILE = 300_000


def counted_paths(calibration: Calibration, where: str) -> tuple[str, RankPaths]:
    """``greedy`` or ``sampled``, and all contexts, each path up to its first rank that draft trees do not use.

    Raises:
        RequestError: no context, or contexts of both kinds of text.
    """
    contexts, found = calibration.contexts, RankPaths()
    if not contexts.total or 0 < calibration.sampled < contexts.total:
        counts = f"{calibration.sampled} of {contexts.total} contexts are of sampled text"
        raise RequestError(f"{where}: {counts}; expected all or none of one or more; calibrate each into a file")
    for ranks_D, count in zip(contexts.ranks_ND.tolist(), contexts.counts_N.tolist(), strict=True):
        end = next((i for i, rank in enumerate(ranks_D) if rank == END or rank >= CANDIDATES), len(ranks_D))
        found.add(tuple(ranks_D[:end]), count)
    return "sampled" if calibration.sampled else "greedy", found


def compact(paths: RankPaths, largest: int = _LARGEST_FILE) -> str:
    """JSON of at most ``largest`` characters: paths taken once are counted for their parents until it fits.

    Every context stays counted; what is lost are nodes that one context visited.
    """
    text = paths.to_json()
    for depth in range(max((len(path) for path, _ in paths.items()), default=0), 0, -1):
        if len(text) <= largest:
            break
        shorter = RankPaths()
        for path, count in paths.items():
            shorter.add(path[:-1] if count == 1 and len(path) == depth else path, count)
        paths, text = shorter, shorter.to_json()
    return text


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stats", type=Path, metavar="STATS", help="what calibrate counted at one temperature")
    parser.add_argument("--drafter", type=Path, required=True, metavar="DIR", help="folder that gets the file")
    args = parser.parse_args(arguments)
    kind, paths = counted_paths(read_calibration(args.stats), str(args.stats))
    out = args.drafter / f"rank_paths_{kind}.json"
    try:
        write_whole(out, compact(paths).encode())
    except OSError as error:
        raise RequestError(f"{out}: cannot be written: {error.strerror}; check --drafter") from error
    print(f"{out}: {paths.contexts} contexts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
