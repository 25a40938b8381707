"""Other programs on the same checkpoint, in the same run: what is installed takes turns, what is not is named.

Seconds are of a whole text, its prompt included, since not every peer times the two separately. Threads are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from draftwood.tools.benchmarks.open_bundles import Lab
from draftwood.tools.benchmarks.peers import PEERS, Generate, compiled_with
from draftwood.tools.benchmarks.section import Block, Row, Section, Table, Task, grouped
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.comparison.differences import agreement, explained
from draftwood.tools.measure.conversations import by_conversation
from draftwood.tools.measure.runner import Way, decode, in_turns
from draftwood.tools.measure.spread import Interval, ratio
from draftwood.tools.prompts import read_families

NAME = "peers"
PROMPTS = 6
OURS, PLAIN = "draftwood", "plain"
# A peer with this in its name speculates.
LOOKUP = "lookup"


def tasks(ask: SectionSettings, suite: Suite) -> Iterator[Task]:
    """A prompt at a temperature, with every peer."""
    prompts = len(by_conversation(read_families(suite.prompts), ask.limit or PROMPTS))
    for temperature, prompt in product(ask.temperatures, range(prompts)):
        yield Task(NAME, {"model": suite.model, "temperature": temperature, "prompt": prompt})


def _ways(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Generate]:
    """Ours, with every bundle, plain and with every policy; then the peers that are installed."""
    ways: dict[str, Generate] = {}
    for bundle in ask.bundles:
        opened = lab.opened(bundle)
        for policy in (PLAIN, *ask.policies):
            ways[f"{OURS} {bundle} {policy}"] = partial(_ours, lab, ask, Way(opened.engine, opened.policies(policy)))
    others = {name: lab.peer(name) for name in ask.peers or PEERS}
    return ways | {name: peer for name, peer in others.items() if not isinstance(peer, str)}


def _ours(
    lab: Lab, ask: SectionSettings, way: Way, ids: Sequence[int], count: int, temperature: float
) -> Sequence[int]:
    options = replace(lab.options(ask, temperature, ignore_eos=False), max_new_tokens=count)
    return decode(way, ids, options).result.token_ids


def prepare(task: Task, ask: SectionSettings, lab: Lab) -> None:
    """Exports the checkpoint for the programs that need it, and lets each program answer once."""
    if lab.enters(NAME):
        ids = lab.warming(ask.bundles[0], lab.options(ask, task.at["temperature"]))
        for generate in _ways(task, ask, lab).values():
            generate(ids, 8, task.at["temperature"])


def measure(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Any]:
    """Seconds and tokens of every program, and how many tokens agree with plain decoding's, from the first on.

    Ours are compared with plain decoding of the same bundle, a peer with that of the first.
    """
    ids, ways = _ids(task, ask, lab), _ways(task, ask, lab)
    if not all(lab.opened(name).holds(ids, ask.max_new_tokens) for name in ask.bundles):
        lab.say(f"prompt {task.at['prompt']}: left out: {len(ids)} tokens and an answer pass the context of a bundle")
        return {"prompt_tokens": len(ids), "programs": {}, "missing": {}, "compiled": ""}
    takers = {
        name: partial(_timed, generate, ids, ask.max_new_tokens, task.at["temperature"])
        for name, generate in ways.items()
    }
    texts = in_turns(takers, ask.rounds, task.at["prompt"])
    plain = {name.removesuffix(f" {PLAIN}"): runs[0][1] for name, runs in texts.items() if _plain(name)}
    programs: dict[str, dict[str, Any]] = {}
    for name, runs in texts.items():
        base = next((text for form, text in plain.items() if name.startswith(f"{form} ")), next(iter(plain.values())))
        last = runs[-1][1]
        seconds = [seconds for seconds, _ in runs]
        programs[name] = {
            "seconds": seconds, "tokens": len(last), "agree": agreement(base, last), "base": len(base)
        }  # fmt: skip
        if name.startswith(OURS):
            programs[name] |= _equality(task, ask, lab, name, ids, base, [text for _, text in runs])
    others = {name: lab.peer(name) for name in ask.peers or PEERS}
    missing = {name: why for name, why in others.items() if isinstance(why, str)}
    compiled = compiled_with() if any(name.startswith("llama.cpp") for name in ways) else ""
    return {"prompt_tokens": len(ids), "programs": programs, "missing": missing, "compiled": compiled}


def _equality(
    task: Task, ask: SectionSettings, lab: Lab, name: str, ids: list[int], base: list[int], texts: list[list[int]]
) -> dict[str, Any]:
    """Whether all texts of one of ours are plain decoding's; if one is not, whether the noise of logits explains it."""
    other = next((text for text in texts if text != base), None)
    if other is None:
        return {"equal": True}
    engine = lab.opened(name.removeprefix(f"{OURS} ").rpartition(" ")[0]).engine
    options = lab.options(ask, task.at["temperature"], ignore_eos=False)
    return {"equal": False, "difference": explained(engine, ids, base, other, options)}


def _plain(name: str) -> bool:
    return name.startswith(OURS) and name.endswith(f" {PLAIN}")


def _timed(generate: Generate, ids: list[int], count: int, temperature: float) -> tuple[float, list[int]]:
    began = time.perf_counter()
    text = list(map(int, generate(ids, count, temperature)))
    return round(time.perf_counter() - began, 6), text


def _ids(task: Task, ask: SectionSettings, lab: Lab) -> list[int]:
    return lab.opened(ask.bundles[0]).ids(lab.prompt(task.at["prompt"], ask.limit or PROMPTS))


def show(rows: list[Row]) -> Iterator[Block]:
    """Tokens a second of every program and its agreement; ours over the best peer; and who is missing."""
    if not (rows := [row for row in rows if row["found"]["programs"]]):
        return
    # A run may go on where fewer programs are installed, or more: compared are those that every row has.
    common = set.intersection(*(set(row["found"]["programs"]) for row in rows))
    groups = grouped([_only(row, common) for row in rows], "model", "temperature")
    programs = [[*at, *line] for at, group in groups.items() for line in _rates(group)]
    columns = ("model", "T", "program", "tokens/s (95 %)", "same text", "tokens before the first that differs")
    note = "Other programs round otherwise: a close decision may fall either way, and the text goes on from it."
    yield Table("Programs", columns, programs, f"{note} Ours are held to plain decoding with the same bundle.")
    over = [[*at, *line] for at, group in groups.items() for line in _compared(group)]
    if over:
        yield Table("Ours over others", ("model", "T", "ours", "over", "times as fast (95 %)"), over)
    if compiled := rows[-1]["found"].get("compiled"):
        yield f"llama.cpp was compiled with {compiled}."
    left = (name for row in rows for name in row["found"]["programs"] if name not in common)
    missing = dict.fromkeys(left, "not of every row") | rows[-1]["found"]["missing"]
    if missing:
        yield "Missing: " + "; ".join(f"{name} ({why})" for name, why in missing.items()) + "."


def _only(row: Row, programs: set[str]) -> Row:
    """The row without other programs."""
    kept = {name: figures for name, figures in row["found"]["programs"].items() if name in programs}
    return row | {"found": row["found"] | {"programs": kept}}


def _rates(rows: list[Row]) -> Iterator[tuple[str, Interval, str, str]]:
    for name in rows[0]["found"]["programs"]:
        runs = [row["found"]["programs"][name] for row in rows]
        rate = ratio([run["tokens"] for run in runs], [float(np.median(run["seconds"])) for run in runs])
        same = sum(run["base"] == run["agree"] == run["tokens"] for run in runs)
        agree, of = (sum(run[what] for run in runs) for what in ("agree", "base"))
        yield name, rate, f"{same} of {len(rows)}", f"{agree} of {of}"


def _compared(rows: list[Row]) -> Iterator[tuple[str, str, Interval]]:
    """Each of ours over the fastest peer, and plain decoding over the fastest of our other bundles. Plain decoding is
    compared only with peers that do not speculate."""
    names = list(rows[0]["found"]["programs"])
    for name in (program for program in names if program.startswith(OURS)):
        plain = _plain(name)
        peers = [program for program in names if not program.startswith(OURS) and not (plain and LOOKUP in program)]
        others = [program for program in names if _plain(program) and program != name] if plain else []
        for group in (peers, others):
            if group:
                best = min(group, key=lambda program: sum(_token_seconds(rows, program)))
                yield name, best, ratio(_token_seconds(rows, best), _token_seconds(rows, name))


def _token_seconds(rows: list[Row], name: str) -> list[float]:
    runs = (row["found"]["programs"][name] for row in rows)
    return [float(np.median(run["seconds"])) / max(run["tokens"], 1) for run in runs]


SECTION = Section(
    name=NAME,
    title="Peers",
    question="How do other programs do on the same checkpoint?",
    source="Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    needs_checkpoint=True,
)
