"""Policies over surveyed texts, without a model: what each would have gained, in the time that its gears take.

A step takes what the table says, so that policies differ by their choices alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.planned import Planning, StepTime
from draftwood.runtime.policy import Adaptive, Gears, Learned, Outcome, Policy
from draftwood.runtime.speculation.drafting import MOST_WAITING
from draftwood.runtime.trace import StepEvent, Trace
from draftwood.trees import Topology


class _SurveyedGear(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gear: Gear
    rows: int
    trees: tuple[tuple[tuple[int, ...], ...], ...]


class _Survey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    greedy: bool
    gears: tuple[_SurveyedGear, ...]
    times: tuple[StepTime, ...]
    planning: Planning | None
    catches_up: bool


@dataclass(frozen=True, slots=True)
class Text:
    """A surveyed text: an event for each of its steps decoded plainly."""

    name: str
    greedy: bool
    events: tuple[StepEvent, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What a policy did with a text. ``us`` of all steps; ``unknown`` are steps that the survey saw in part."""

    us: float
    steps: int
    gears: Counter[str]
    unknown: int


def read_surveys(paths: Sequence[Path]) -> tuple[Gears, list[Text]]:
    """Surveyed texts and the gears that all of them share.

    Raises:
        RequestError: no survey, or surveys of different gears.
    """
    texts, first = [], None
    for path in paths:
        trace = Trace.read(path)
        value = trace.meta.get("survey")
        if value is None or not trace.events:
            raise RequestError(f"{path}: has no draft at every position; record texts with replay --record BUNDLE")
        try:
            found = msgspec.convert(value, _Survey, strict=False)
        except msgspec.ValidationError as error:
            raise RequestError(f"{path}: line 1: {error}; record it again") from error
        if first is not None and (found.gears, found.times) != (first.gears, first.times):
            raise RequestError(f"{path}: has other gears or step times than {paths[0]}; replay them apart")
        first = first or found
        texts.append(Text(path.stem, found.greedy, trace.events))
    assert first is not None, "at least one path"
    gears = [one.gear for one in first.gears]
    if any(one.gear.looks_up for one in first.gears):
        raise RequestError(f"{paths[0]}: has trees that are looked up in the text, of which a survey knows no drafts")
    shapes = [tuple(map(Topology.from_paths, one.trees)) if one.gear.draft else None for one in first.gears]
    rows = [one.rows for one in first.gears]
    return Gears(gears, rows, shapes, first.planning, first.times, first.catches_up), texts


class Replay:
    """Runs policies over texts, one behind the other; ``gears`` are those of the surveys."""

    def __init__(self, gears: Gears) -> None:
        self.gears, self._learned = gears, Learned(gears)

    def policy(self, name: str, text: Text) -> Policy:
        """A policy for a text by its name, or by a gear's for always that one."""
        if name != "adaptive":
            return _Always(self.gears, name)
        return Adaptive(self.gears, self._learned, text.greedy, len(text.events) + 1)  # the first token is the prompt's

    def run(self, policy: Policy, text: Text) -> Run:
        """A text decoded by a policy."""
        at, us, steps, unknown, ran = 0, 0.0, 0, 0, Counter[str]()
        late = min(text.events[0].position, MOST_WAITING) if self.gears.catches_up else 0
        while at < len(text.events):
            event = text.events[at]
            gear = policy.choose(event.position, late)
            if gear is None:
                break
            outcome, known = self.step(gear, event, len(text.events) - at)
            outcome = outcome._replace(late=late, draft_us=self.gears.times.late * late if gear.draft else 0.0)
            late = 0 if gear.draft or not self.gears.catches_up else late + 1
            policy.observe(outcome)
            at, us, steps, unknown = at + outcome.gained, us + outcome.total_us, steps + 1, unknown + (not known)
            ran[gear.name] += 1
        return Run(us, steps, ran, unknown)

    def step(self, gear: Gear, event: StepEvent, room: int) -> tuple[Outcome, bool]:
        """What a gear would have done at a position, ``room`` tokens before the end; whether all of it is known."""
        gears = self.gears
        number = gears.number[gear.name]
        us, shape = gears.times.us(number, event.position), gears.shape[number]
        if shape < 0:
            return Outcome(gear, event.position, (), 1, verify_us=us), True
        trees = gears.forest.shapes[shape]
        assert isinstance(trees, tuple)
        nodes = _nodes(trees[gears.root(shape, event.confidence)])
        depth = next((d for d in range(len(event.path)) if event.path[: d + 1] not in nodes), len(event.path))
        path = event.path[:depth]
        rank = event.path[depth] if depth < len(event.path) else event.rank
        cut = depth + 1 > room
        path = path[: room - 1] if cut else path
        outcome = Outcome(
            gear, event.position, path, len(path) + 1, rank=rank, cut=cut, verify_us=us, confidence=event.confidence
        )
        # Where the survey's own tree ended, a gear with more nodes there might have gone on.
        return outcome, depth < len(event.path) or event.rank is not None or not self._more(nodes, path)

    def _more(self, nodes: frozenset[tuple[int, ...]], path: tuple[int, ...]) -> bool:
        widest = max(range(len(self.gears.rows)), key=self.gears.rows.__getitem__)
        trees = self.gears.forest.shapes[self.gears.shape[widest]]
        assert isinstance(trees, tuple)
        own = {node for node in nodes if node[:-1] == path}
        return not own <= frozenset().union(*map(_nodes, trees))

    def oracle_us(self, text: Text) -> float:
        """The least time in which any choice of gears decodes a text: a shortest path over its positions.

        From the start on, as `run` adds its steps up, so that rounding cannot make a policy faster than the oracle.
        """
        count = len(text.events)
        best = np.full(count + 1, np.inf)
        best[0] = 0.0
        for at, event in enumerate(text.events):
            plain, drafting = self.gears.fitting.at(event.position, 0)
            for number in (plain, *drafting):
                if number >= 0:
                    outcome, _ = self.step(self.gears.gears[number], event, count - at)
                    after = at + outcome.gained
                    best[after] = min(best[after], best[at] + outcome.total_us)
        return float(best[count])


class _Always:
    """One tree wherever it fits, else plain decoding."""

    def __init__(self, gears: Gears, name: str) -> None:
        self._gears, self._shape, self._slots = gears, gears.shape[gears.number[name]], 0

    def choose(self, length: int, late: int = 0, match: int = 0) -> Gear | None:
        plain, drafting = self._gears.fitting.at(length, self._slots)
        own = (number for number in drafting if self._gears.shape[number] == self._shape)
        number = next(own, plain)
        return self._gears.gears[number] if number >= 0 else None

    def observe(self, outcome: Outcome) -> None:
        self._slots = max(self._slots, outcome.gear.slots)

    def expected(self, gear: Gear, length: int) -> None:
        return None


@lru_cache(maxsize=256)
def _nodes(tree: Topology) -> frozenset[tuple[int, ...]]:
    return frozenset(tree.paths)


def report(gears: Gears, texts: Sequence[Text]) -> dict[str, Any]:
    """Times of the adaptive policy, of every gear alone, of an oracle and of plain decoding, over all texts."""
    replay = Replay(gears)
    plain = next(gear.name for gear in gears.gears if gear.draft is None)
    singles = {shape: gears.gears[g].name for g, shape in reversed(list(enumerate(gears.shape))) if shape >= 0}
    alone = {name: [replay.run(replay.policy(name, t), t) for t in texts] for name in (plain, *singles.values())}
    base = np.array([run.us for run in alone[plain]])
    oracle = np.array([replay.oracle_us(text) for text in texts])
    totals = {name: sum(run.us for run in runs) for name, runs in alone.items()}
    best = min(totals, key=totals.__getitem__)
    hindsight = np.array([[run.us for run in runs] for runs in alone.values()]).min(0)
    found = {name: [replay.run(replay.policy(name, text), text) for text in texts] for name in ("adaptive",)}
    return {
        "texts": len(texts),
        "tokens": sum(len(text.events) for text in texts),
        "best_single": best,
        "speedup_best_single": float(base.sum() / totals[best]),
        "speedup_best_single_each_text": float(base.sum() / hindsight.sum()),
        "speedup_oracle": float(base.sum() / oracle.sum()),
        "gears": {name: _figures(runs, base, totals[best]) for name, runs in alone.items()},
        "policies": {name: _figures(runs, base, totals[best]) for name, runs in found.items()},
        "per_text": [
            {"text": text.name, "plain_us": float(base[i]), "oracle_us": float(oracle[i])}
            | {f"{name}_us": runs[i].us for name, runs in found.items()}
            for i, text in enumerate(texts)
        ],
    }


def _figures(runs: Sequence[Run], base: np.ndarray, best_us: float) -> dict[str, Any]:
    us = np.array([run.us for run in runs])
    steps, ran = sum(run.steps for run in runs), sum((run.gears for run in runs), Counter())
    speedups = base / us
    return {
        "speedup": float(base.sum() / us.sum()),
        "speedup_mean": float(speedups.mean()),
        "speedup_p1": float(np.percentile(speedups, 1, method="inverted_cdf")),
        "regret": float(us.sum() / best_us - 1),
        "steps": steps,
        "share": {name: count / steps for name, count in sorted(ran.items())},
        "unknown": sum(run.unknown for run in runs) / max(steps, 1),
    }
