"""At which contexts of a text a decoding stands, and which path its truth takes there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from draftwood.trees import RankPaths

Path = tuple[int, ...]

# Rows of the tree whose steps decide which contexts are counted; trees of like size stand at nearly the same ones.
REFERENCE_ROWS = 16


def path_of(ranks: Sequence[int], candidates: int) -> Path:
    """The ranks up to the first token that was no candidate."""
    stop = next((i for i, rank in enumerate(ranks) if rank >= candidates), len(ranks))
    return tuple(ranks[:stop])


def visited(texts: Mapping[int, Sequence[Path | None]]) -> Iterator[tuple[int, int]]:
    """The contexts at which a decoding drafts: (number of the text, position among its contexts).

    A step passes over what it accepts, so decoding stands less often where acceptance is long. Counting every
    position would overrate it: half of a text at 1 token a step and half at 5 is 1.7 tokens a step, not 3. The steps
    are those of the best tree of ``REFERENCE_ROWS`` rows on all of these contexts.

    Args:
        texts: every context's path, in the order of the text; None where what comes next is unknown.
    """
    every = RankPaths()
    for paths in texts.values():
        for path in paths:
            if path is not None:
                every.add(path)
    if not every.contexts:
        return
    tree = set(every.best_tree(REFERENCE_ROWS - 1).paths)
    for number, paths in texts.items():
        at = 0
        while at < len(paths):
            path = paths[at]
            if path is not None:
                yield number, at
            taken = next((depth for depth in range(len(path or ()), 0, -1) if (path or ())[:depth] in tree), 0)
            at += taken + 1
