"""The service under clients: when it is ready, what it costs over the library, and llama.cpp's server next to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import numpy as np

import draftwood
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.opened import OpenedBundle
from draftwood.tools.benchmarks import served
from draftwood.tools.benchmarks.open_bundles import Lab, Opened
from draftwood.tools.benchmarks.peers import gguf_file
from draftwood.tools.benchmarks.section import Block, Row, Section, Table, Task
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.measure.runner import in_turns

NAME = "service"
LIBRARY = "draftwood.open"
# Texts that a launch of the bundle takes; answers of a round, for each client, and in all at least.
TEXTS, TURNS, LEAST = 8, 4, 24
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "because": {"type": "string"}},
    "required": ["answer", "because"],
    "additionalProperties": False,
}


def tasks(ask: SectionSettings, suite: Suite) -> Iterator[Task]:
    """All bundles with so many clients at a time; RequestError if prompts are not of one length."""
    if len(ask.lengths) != 1:
        got = ", ".join(map(str, ask.lengths)) or "none"
        raise RequestError(f"suite {suite.name}: {NAME} takes prompts of one length, say lengths = [64]; got {got}")
    for clients in ask.texts:
        yield Task(NAME, {"model": suite.model, "clients": clients})


def _opened(ask: SectionSettings, lab: Lab) -> dict[str, Opened]:
    """Bundles by the names under which they are served; the first one is held to the goals."""
    return {f"{served.OURS} {bundle}": lab.opened(bundle) for bundle in ask.bundles}


def prepare(task: Task, ask: SectionSettings, lab: Lab) -> None:
    """Times the bundles."""
    _opened(ask, lab)


def measure(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Any]:
    """Every server's load by round, in turns; of one client also the library's, and texts held to a JSON schema."""
    bundles = {name: (opened.engine.bundle, opened.runs) for name, opened in _opened(ask, lab).items()}
    (bundle, engine), clients, (length,) = next(iter(bundles.values())), task.at["clients"], ask.lengths
    prompts, count = _prompts(bundle, lab, length, max(LEAST, TURNS * clients)), ask.max_new_tokens
    commands = {name: served.our_command(opened.folder, runs) for name, (opened, runs) in bundles.items()}
    missing = served.why_missing(lab.suite.checkpoint)
    if not missing and (file := gguf_file(lab.checkpoint)):
        commands[served.LLAMA] = served.llama_command(file, min(clients, TEXTS), length + 2 * count)
    with ExitStack() as open_:
        servers = [open_.enter_context(served.serving(name, command)) for name, command in commands.items()]
        takers: dict[str, Callable[[], dict[str, Any]]] = {}
        for server in servers:
            served.load(server, prompts[:clients], clients, 8)
            takers[server.name] = partial(served.load, server, prompts, clients, count)
        if clients == 1:
            model = open_.enter_context(draftwood.open(bundle.folder, engine=engine, prefixes=False))
            takers[LIBRARY] = partial(_library, model, prompts, count)
            takers[LIBRARY]()
        rounds = in_turns(takers, ask.rounds)
        ready = {server.name: server.ready_seconds for server in servers}
        constrained = _held(servers[0], lab, count) if clients == 1 else []
    return {"ready_seconds": ready, "rounds": rounds, "held": constrained, "missing": missing}


def _prompts(bundle: Bundle, lab: Lab, length: int, count: int) -> list[list[int]]:
    """Texts of ``length`` tokens, cut from the suite's prompts, all different as long as those last."""
    tokenizer = bundle.tokenizer
    assert tokenizer is not None, "a bundle without one is refused"
    ids = list(chain.from_iterable(tokenizer.encode(prompt.text) for prompt in lab.prompts))
    if len(ids) < length:
        raise RequestError(f"--prompts: {len(ids)} tokens in all, expected {length} for a text of {NAME}; give more")
    starts = islice(cycle(range(0, len(ids) - length + 1, length)), count)
    return [ids[start : start + length] for start in starts]


def _library(model: OpenedBundle, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
    """The answers from this process, one after the other."""
    streams = []
    for ids in prompts:
        began = time.perf_counter()
        result = model.generate(list(ids), max_new_tokens=count, ignore_eos=True)
        streams.append(
            served.StreamedAnswer(result.first_token_seconds, time.perf_counter() - began, len(result.token_ids))
        )
    return served.figures(streams, sum(stream.seconds for stream in streams))


def _held(server: served.Server, lab: Lab, count: int) -> list[list[float | None]]:
    """Tokens a drafted step of each prompt's answer: held to `SCHEMA`, and free."""
    texts = [prompt.text for prompt in lab.prompts[:LEAST]]
    return [[served.accepted(server.port, text, count, way) for way in (SCHEMA, None)] for text in texts]


def show(rows: list[Row]) -> Iterator[Block]:
    """A line a program and number of clients; then what was set as goals."""
    lines = []
    for row in rows:
        for name, rounds in row["found"]["rounds"].items():
            waits = [_percentile(rounds, what, point) for what in ("first_ms", "gap_ms") for point in (50, 99)]
            lines.append([row["at"]["model"], row["at"]["clients"], name, _rate(rounds), *waits])
    waited = [f"ms {what}, {point}" for what in ("to the first token", "a token after") for point in ("median", "p99")]
    columns = ("model", "clients", "program", "tokens/s", *waited)
    note = "The median round's tokens/s; a drafted step sends its tokens at once."
    yield Table("Servers under clients", columns, lines, note)
    goals = [[rows[0]["at"]["model"], *line] for line in _goals(rows)]
    yield Table("The service's own cost", ("model", "what", "value"), goals)
    if missing := rows[-1]["found"]["missing"]:
        yield f"Missing: {missing}."


def _rate(rounds: Sequence[dict[str, Any]]) -> float:
    return float(np.median([load["tokens_per_s"] for load in rounds]))


def _percentile(rounds: Sequence[dict[str, Any]], what: str, point: int) -> float:
    """Over the answers of all rounds."""
    return float(np.percentile([value for load in rounds for value in load[what]], point))


def _goals(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    by_clients = {row["at"]["clients"]: row["found"] for row in rows}
    server = next(iter(rows[0]["found"]["rounds"]))
    ready = [results["ready_seconds"][server] for results in by_clients.values()]
    yield "seconds from the command to ready", float(np.median(ready))
    alone = by_clients.get(1)
    if alone:
        over = _rate(alone["rounds"][server]) / _rate(alone["rounds"][LIBRARY])
        yield "tokens/s of one client over the library's", over
        pairs = [pair for pair in alone["held"] if None not in pair]
        if pairs:
            constrained, free = np.mean(pairs, 0)
            what = f"tokens a drafted step held to a JSON schema over free ones, {len(pairs)} texts"
            yield what, float(constrained / free)
    for clients, results in by_clients.items():
        ours = results["rounds"][server]
        if clients > 1 and alone:
            several, single = (_percentile(rounds, "first_ms", 99) for rounds in (ours, alone["rounds"][server]))
            yield f"p99 to the first token, {clients} clients over one", several / single
        if served.LLAMA in results["rounds"]:
            best = max(_rate(rounds) for name, rounds in results["rounds"].items() if name.startswith(served.OURS))
            other = _rate(results["rounds"][served.LLAMA])
            yield f"our best tokens/s over llama-server's, {clients} clients", best / other


SECTION = Section(
    name=NAME,
    title="The service",
    question="What does the service cost, and how does it compare with llama.cpp's?",
    source="Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
