"""Shared samples of the planner's tests: contexts, latency tables, and a tree's gain by walking every path in turn."""

import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction

from hypothesis import settings
from hypothesis import strategies as st

from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration, Contexts, fold_of
from draftwood.trees.latency import LatencyEntry, LatencyTable
from draftwood.trees.measure import mean_of_folds, visits
from draftwood.trees.plan_file import ExpectedLength


def accept_length(contexts: Contexts, tree: Topology) -> ExpectedLength:
    """A tree's gain in tokens a step on one context or more."""
    visits_FT = visits(contexts, tree)
    found = mean_of_folds(visits_FT.sum(1), visits_FT[:, 0])
    assert found is not None
    return found


FIXED = settings(derandomize=True, deadline=None, max_examples=60, database=None)
PATHS = st.lists(st.integers(0, 2), max_size=3).map(tuple)
COUNTS = st.dictionaries(PATHS, st.integers(1, 9), min_size=1, max_size=4)

Path = tuple[int, ...]
# A text whose contexts are counted and one that is held out: of 8 folds the last is.
TEXTS = {fold_of(f"text {i}") % 8: f"text {i}" for i in range(200)}
COUNTED, HELDOUT = TEXTS[0], TEXTS[7]


@st.composite
def topologies(draw, max_nodes=12):
    paths = {()}
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.sampled_from(sorted(paths)))
        paths.add((*parent, draw(st.integers(0, 4))))
    return Topology.from_paths(paths - {()})


def calibrated(counts: dict[Path, int], group: str = COUNTED, **facts: object) -> Calibration:
    result = Calibration()
    for path, count in counts.items():
        for _ in range(count):
            result.add(path, group=group, **facts)
    return result


def contexts(counts: dict[Path, int]) -> Contexts:
    return calibrated(counts).contexts


def gain(counts: dict[Path, int], nodes: Iterable[Path]) -> Fraction:
    """Tokens per step, by following every counted path through the nodes."""
    inside, tokens = set(nodes), 0
    for path, count in counts.items():
        accepted = 0
        while accepted < len(path) and path[: accepted + 1] in inside:
            accepted += 1
        tokens += count * (1 + accepted)
    return Fraction(tokens, sum(counts.values()))


def trees_within(nodes: Iterable[Path], size: int) -> Iterator[tuple[Path, ...]]:
    """Every tree of exactly `size` of the nodes."""
    for chosen in itertools.combinations(sorted(set(nodes)), size):
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen):
            yield chosen


def prefixes(paths: Iterable[Path]) -> set[Path]:
    return {path[:depth] for path in paths for depth in range(1, len(path) + 1)}


def table(steps, drafts=(), host=0.0, **facts):
    """A latency table of {(rows, slots): seconds} and {(depth, width): seconds}."""
    entries = [
        LatencyEntry(kind="verify", rows=rows, slots=slots, seconds=s, parts={"all": s}, bytes=100 * rows)
        for (rows, slots), s in steps.items()
    ]
    entries += [
        LatencyEntry(kind="draft", depth=depth, width=width, seconds=s, parts={"all": s})
        for (depth, width), s in dict(drafts).items()
    ]
    if host:
        entries.append(LatencyEntry(kind="host", seconds=host, parts={"all": host}))
    return LatencyTable(source="modelled", entries=tuple(entries), **facts)
