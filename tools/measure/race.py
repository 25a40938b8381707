"""Our programs and other people's on the same checkpoint, in turns: tokens a second of whole greedy texts."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.runtime.engines.sessions import default_threads
from draftwood.tools.evaluate.peers import PEERS, QUANTISED_PEERS, Generate, open_peer

OURS = "draftwood "
SAMPLED = 0.8  # the temperature of those of ours whose name ends so; all others are greedy
AT_SAMPLED = f" at {SAMPLED}"


def opened_peers(teacher: Path, work: Path, threads: int | None) -> tuple[dict[str, Generate], dict[str, str]]:
    """Those that decode with fewer bits, or else all others; and why the rest is missing."""
    found: dict[str, Generate] = {}
    missing: dict[str, str] = {}
    for names in (QUANTISED_PEERS, PEERS):
        for name in () if found else names:
            print(f"opening {name}", file=sys.stderr, flush=True)
            peer = open_peer(name, teacher, work, threads or default_threads())
            if isinstance(peer, str):
                missing[name] = peer
            else:
                found[name] = peer
    return found, missing


def answer_once(name: str, teacher: Path, work: Path, threads: int | None) -> str:
    """Has a peer write what it needs, and a few tokens; what came of it."""
    peer = open_peer(name, teacher, work, threads or default_threads())
    return f"missing, {peer}" if isinstance(peer, str) else f"answers {list(peer([1, 2, 3, 4], 4))}"


def race(ways: Mapping[str, Generate], prompts: Sequence[list[int]], count: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of every program in every round, prompts counted, for not every peer tells the two apart.

    All take turns prompt by prompt, each round in another order; what comes first of all is not counted.
    """
    for generate in ways.values():
        generate(prompts[0], 4)
    names = list(ways)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        tokens, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
        for at, ids in enumerate(prompts):
            shift = (at + number) % len(names)
            for name in names[shift:] + names[:shift]:
                began = time.perf_counter()
                tokens[name] += len(ways[name](ids, count))
                seconds[name] += time.perf_counter() - began
        for name in names:
            found[name].append(tokens[name] / seconds[name])
    return found


def paired(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The ratio of two figures round by round: the median, and the lowest and the highest."""
    ratios = [one / other for one, other in zip(above, below, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def standing(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The best peer at any precision, by the medians, and the best of ours over it, greedy and sampled."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    ranked = sorted(median, key=median.__getitem__, reverse=True)
    peer = next((name for name in ranked if not name.startswith(OURS)), None)
    own = [name for name in ranked if name.startswith(OURS)]
    best = {name.endswith(AT_SAMPLED): name for name in reversed(own)}  # the last to come is the fastest
    ratios = {best[kind]: paired(rates[best[kind]], rates[peer]) for kind in sorted(best)} if peer else {}
    return {"tokens_per_s": median, "best_peer": peer, "over_best_peer": ratios}
