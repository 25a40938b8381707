"""Texts with a known truth: rank paths drawn from tries, and a gear's view of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np

from draftwood.manifest import Gear
from draftwood.planned import StepTime
from draftwood.runtime.policy import Adaptive, Gears
from draftwood.runtime.policy.gains import Drafted
from draftwood.runtime.speculation.step import Outcome
from draftwood.trees import Topology

# Probability of each rank of 0, 1, ... at a level, whatever the path before.
Levels = Sequence[Sequence[float]]


def gear(name: str, slots: int = 4096, draft: str | None = "draft") -> Gear:
    return Gear(name=name, tree=name, slots=slots, graph=name, draft=draft)


def drafted(tree: Topology, name: str, looked_up: bool = False) -> Drafted:
    return Drafted(name, tree.rows, tree.depth, frozenset(tree.paths), looked_up)


PLAIN_TREE = drafted(Topology.plain(), "plain")


def gears_of(trees: dict[str, Topology], us: dict[str, float] | None = None, **options: object) -> Gears:
    """Plain decoding and a gear for each tree; ``us`` are their step times."""
    every = [gear("plain", draft=None), *(gear(name) for name in trees)]
    times = [StepTime(gear=name, length=100, us=value) for name, value in (us or {}).items()]
    return Gears(every, [PLAIN_TREE, *(drafted(tree, name) for name, tree in trees.items())], times=times, **options)


def chains(*depths: int) -> dict[str, Topology]:
    return {f"chain-{depth}": Topology.chain(depth) for depth in depths}


def draw(random: np.random.Generator, levels: Levels) -> tuple[int, ...]:
    """A rank path; it ends if the truth is none of the ranks."""
    path: list[int] = []
    for shares in levels:
        rank = bisect_left([*accumulate(shares)], random.random())
        if rank == len(shares):
            break
        path.append(rank)
    return tuple(path)


def inside(tree: Topology, path: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a path that a tree accepts."""
    return accepted(_nodes(tree), path)


@cache
def _nodes(tree: Topology) -> frozenset[tuple[int, ...]]:
    return frozenset(tree.paths)


def accepted(nodes: frozenset[tuple[int, ...]], path: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes from the root down that a path goes through."""
    depth = next((i for i in range(len(path)) if path[: i + 1] not in nodes), len(path))
    return path[:depth]


def truth(tree: Topology, levels: Levels) -> float:
    """Expected accept length, bonus counted."""
    return 1 + sum(float(np.prod([levels[i][rank] for i, rank in enumerate(path)])) for path in tree.paths)


def played(policy: Adaptive, gears: Gears, path: tuple[int, ...], us: dict[str, float], length: int = 100) -> Outcome:
    """One step of a text whose truth is ``path``: chosen, run in the time that it takes, observed."""
    chosen = policy.choose(length)
    assert chosen is not None
    taken = accepted(gears.trees[chosen.tree].nodes, path)
    outcome = Outcome(chosen, length, taken, len(taken) + 1, verify_us=us[chosen.name])
    policy.observe(outcome)
    return outcome
