"""How long the steps of a bundle take on this machine, or of several in turns: measured latency tables.

Every entry is visited once a round, in shuffled order, so that the machine's other work hits all alike. A visit decodes
a few steps for real: draft, verify after a cache filled to half its KV length, commit of a path scattered in the tree.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import onnxruntime

from draftwood.errors import RequestError
from draftwood.manifest import Gear
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.decoding import Decoding
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import FixedTree, Policy, widest_gear
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.sequence import SequenceState
from draftwood.runtime.speculation.step import Draft
from draftwood.tools.machine import memory, processor
from draftwood.tools.measure.tune import in_rounds, time_step
from draftwood.tools.prompts import read_prompts
from draftwood.trees import Topology, TreeBuffers, tensorize
from draftwood.trees.latency import EntryKind, LatencyEntry, LatencyTable

LEAST_ROUNDS = 9
SECONDS = 0.5  # an entry is timed over at least this long
STEPS = 4  # timed steps of a visit at least; one more before them is not counted
VISIT_SECONDS = 0.05  # a visit lasts at least so long, or short steps never see the caches of a running text
HOST_TOKENS = 48  # new tokens of a text that is decoded for the host's share


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One entry to time: a tree after the caches of texts, and the rows of it that every step commits."""

    topology: Topology
    tree: TreeBuffers
    path: tuple[int, ...]
    states: list[SequenceState]
    filled: int
    # The graph that drafts for this tree; None if none does.
    gear: Gear | None


def measure(
    engines: Sequence[Engine],
    rows: Iterable[int],
    slots: Sequence[int],
    rounds: int | None = None,
    threads: int = 0,
    texts: Sequence[int] = (1,),
) -> list[LatencyTable]:
    """Times the steps of each bundle's trees, and bushy trees of other ``rows``, at every KV length, for each number of
    ``texts`` that share a launch. All engines share the rounds: ``rounds`` or more, by default `LEAST_ROUNDS`."""
    rounds = LEAST_ROUNDS if rounds is None else rounds
    if rounds < 1:
        raise RequestError(f"--rounds {rounds}: expected at least 1")
    bushy = set(rows)
    subjects = [[s for length in slots for s in _subjects(engine, bushy, length, texts)] for engine in engines]
    times = _time(engines, subjects, rounds, texts)
    return [_table(engine, of_engine, threads) for engine, of_engine in zip(engines, times, strict=True)]


def _table(engine: Engine, times: Times, threads: int) -> LatencyTable:
    bundle = engine.bundle
    entries = [
        _entry("verify" if count > 1 else "decode", samples, rows=count, slots=length, filled=filled, texts=number)
        for (number, count, length, filled), samples in times.steps.items()
    ]
    entries += [
        _entry("draft", seconds, depth=depth, width=width, texts=number)
        for (number, depth, width), seconds in times.drafts.items()
    ]
    entries += [_entry("host", seconds, texts=number) for number, seconds in times.hosts.items()]
    offered = bundle.manifest.drafter
    return LatencyTable(
        source="measured",
        kv_read="filled",
        entries=tuple(entries),
        machine=_machine(threads) | {"engine": "bitwise" if engine.bitwise else "cpu"},
        teacher={"name": bundle.folder.resolve().name, "digest": bundle.manifest.teacher.digest},
        drafter=msgspec.to_builtins(offered) if offered else {},
        notes=NOTES,
    )


NOTES = (
    "A step reads the filled slots only, so an entry holds for a text of about its 'filled' tokens; the KV length"
    " itself costs nothing.",
    "One graph with run-time sizes serves every gear, so one more gear takes no graph memory and bytes is left out.",
    "The accepted rows are moved by the host, so there is no commit entry; host covers acceptance, commit,"
    " bookkeeping and the text.",
)


@dataclass(slots=True)
class Times:
    """Samples in seconds by texts: steps then by (rows, slots, filled), drafts by (depth, width)."""

    steps: dict[tuple[int, int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    drafts: dict[tuple[int, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    hosts: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


def _subjects(engine: Engine, rows: set[int], slots: int, texts: Sequence[int] = (1,)) -> list[Subject]:
    """The bundle's trees, one for each number of rows, and bushy ones of the other numbers, after the same caches. If
    each tree has a draft of its own, one for each number of rows and shape of a draft."""
    shared = _ranks_levels(engine.bundle)
    own = {(t.rows, *(() if shared else (t.depth, t.width))): t for t, _ in engine.bundle.trees.values()}
    trees = [*own.values(), *map(bushy, rows - {tree.rows for tree in own.values()})]
    most = max(tree.rows for tree in trees)
    filled, needed = slots // 2, most + (STEPS + 1) * max(len(committed_path(tree)) for tree in trees)
    if filled + needed >= slots:
        raise RequestError(
            f"--kv {slots}: too short to time steps of {most} rows behind {filled} tokens; expected at least"
            f" {2 * needed + 2}, or fewer --rows"
        )
    states = [engine.begin(slots) for _ in range(max(texts))]
    for number, state in enumerate(states):
        tokens = np.random.default_rng(number).integers(0, engine.bundle.manifest.dims.vocabulary, filled)
        engine.prefill(state, tokens)
    return [
        Subject(
            topology=tree,
            tree=tensorize(tree),
            path=committed_path(tree),
            states=states[:count],
            filled=filled,
            gear=_drafting(engine.bundle, tree),
        )
        for count in texts
        for tree in sorted(trees, key=lambda tree: tree.rows)
    ]


def _ranks_levels(bundle: Bundle) -> bool:
    """Whether one draft graph ranks levels for all trees; otherwise each drafts one tree alone."""
    drafts = (graph for graph in bundle.manifest.graphs_of("onnx") if graph.kind == "draft")
    return any(spec.name == "candidates" for graph in drafts for spec in graph.outputs)


def _drafting(bundle: Bundle, topology: Topology) -> Gear | None:
    """A gear that drafts a tree, or one as costly."""
    shared = _ranks_levels(bundle)
    gears = (gear for gear in bundle.manifest.gears if gear.neural and gear.tree in bundle.trees)
    fits = (gear for gear in gears if shared or bundle.trees[gear.tree][0] == topology)
    return next(fits, None) if topology.depth else None


def bushy(rows: int) -> Topology:
    """A tree of ``rows`` rows in which every node has four children, as far as they go."""
    below = range(rows - 1)
    return Topology((0, *(row // 4 for row in below)), (0, *(row % 4 for row in below)))


def committed_path(topology: Topology) -> tuple[int, ...]:
    """Rows from the root to the last row at half the tree's depth: as many as a step may accept, out of order."""
    depth = (topology.depth + 1) // 2
    row = max(row for row, at in enumerate(topology.depths) if at == depth)
    path = [row]
    while path[-1]:
        path.append(topology.parents[path[-1]])
    return tuple(reversed(path))


def _time(
    engines: Sequence[Engine], subjects: Sequence[Sequence[Subject]], rounds: int, texts: Sequence[int] = (1,)
) -> list[Times]:
    """The times of each engine's subjects, and of its host for each number of texts."""
    visits: list[tuple[int, Subject | int]] = []
    for place, of_engine in enumerate(subjects):
        visits += [(place, count) for count in texts]
        visits += [(place, subject) for subject in of_engine]
    times, order = [Times() for _ in engines], random.Random(0)
    _visit_all(engines, visits, [Times() for _ in engines], order)  # warm-up
    began, done = time.perf_counter(), itertools.count(1)

    def visit() -> None:
        _visit_all(engines, visits, times, order)
        passed, shapes = time.perf_counter() - began, sum(map(len, subjects))
        line = f"round {next(done)} of at least {rounds}: {shapes} shapes, {passed:.0f} s"
        print(line, file=sys.stderr, flush=True)

    in_rounds(visit, rounds, SECONDS * len(visits))
    return times


def _visit_all(
    engines: Sequence[Engine], visits: Sequence[tuple[int, Subject | int]], times: Sequence[Times], order: random.Random
) -> None:
    """Every subject of every engine, and for each number of texts the host."""
    for place, visited in order.sample(visits, len(visits)):
        engine = engines[place]
        if isinstance(visited, int):
            times[place].hosts[visited].append(_host_seconds(engine, _prompt(engine.bundle), visited))
        else:
            _visit(engine, visited, times[place])


def _visit(engine: Engine, subject: Subject, times: Times) -> None:
    """Some steps of one tree; the caches grow by the committed rows and are rolled back by the next visit."""
    states, tree, drafter = subject.states, subject.tree, engine.bundle.manifest.drafter
    tokens, count, slots = np.random.default_rng(tree.rows), len(subject.states), subject.states[0].slots
    for state in states:
        state.rollback(subject.filled)
    ranked = _ranks_levels(engine.bundle)
    entered, step = time.perf_counter(), 0
    while step <= STEPS or (time.perf_counter() - entered < VISIT_SECONDS and states[0].kv.room(tree.rows)):
        drafts = []
        for state in states:
            tokens_T = tokens.integers(0, engine.bundle.manifest.dims.vocabulary, tree.rows)
            state.root = int(tokens_T[0])
            drafts.append(Draft(tokens_T, np.zeros(0, np.float32), tree))
        spent = time_step(engine, states, subject.gear, drafts, subject.path)
        if step:  # the first step finds another tree's work in the processor's caches
            times.steps[count, tree.rows, slots, subject.filled].append(spent.verify / 1e6)
            if subject.gear and drafter:
                shape = subject.topology.depth, subject.topology.width
                offered = (drafter.levels, drafter.candidates) if ranked else shape
                times.drafts[count, *offered].append(spent.draft / 1e6)
        step += 1


def _prompt(bundle: Bundle) -> list[int]:
    """Token ids to decode a text from: a built-in prompt, or any ids if there is no tokenizer."""
    room = bundle.manifest.dims.context - HOST_TOKENS
    ids = bundle.tokenizer.encode(read_prompts(None)[0].text) if bundle.tokenizer else list(range(8))
    return ids[: max(1, room)]


def _host_seconds(engine: Engine, prompt: list[int], texts: int) -> float:
    """Time that a step of real texts spends outside graphs: the mean of plain decoding's and the largest tree's."""
    policies = [FixedTree(engine.bundle), FixedTree(engine.bundle, widest_gear(engine.bundle))]
    return sum(_host_step_seconds(engine, prompt, policy, texts) for policy in policies) / len(policies)


def _host_step_seconds(engine: Engine, prompt: list[int], policy: Policy, texts: int) -> float:
    options = Options(max_new_tokens=HOST_TOKENS, ignore_eos=True)
    going = [Decoding(engine, prompt[number % len(prompt) :], options, policy) for number in range(texts)]
    for text in going:
        text.start()
    seconds = graph_seconds = 0.0
    steps = 0
    while not any(text.finished for text in going):
        began = time.perf_counter()
        outcomes = advance(engine, going)
        seconds, steps = seconds + time.perf_counter() - began, steps + 1
        graph_seconds += sum((outcome.draft_us + outcome.verify_us) / outcome.texts for outcome in outcomes) / 1e6
    return (seconds - graph_seconds) / max(steps, 1)


def _entry(kind: EntryKind, samples: list[float], **shape: Any) -> LatencyEntry:
    low, middle, high = (round(float(value), 9) for value in np.percentile(samples, (25, 50, 75)))
    return LatencyEntry(kind=kind, seconds=middle, quartiles=(low, high), samples=len(samples), **shape)


def _machine(threads: int) -> dict[str, Any]:
    facts = {**processor(), "memory_bytes": memory()["total_bytes"], "onnxruntime": onnxruntime.__version__}
    return facts | ({"threads": threads} if threads else {})
