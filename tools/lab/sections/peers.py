"""Other programs on the same checkpoint, in the same run: what is installed takes turns, what is not is named.

Seconds are of a whole text, its prompt counted, for not every peer tells the two apart. Threads are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from draftwood.tools.comparison.differences import agreement
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.peers import PEERS, Generate, compiled_with
from draftwood.tools.lab.runner import Way, decode, in_turns
from draftwood.tools.lab.section import Block, Row, Section, Table, Task, grouped
from draftwood.tools.lab.spread import Interval, ratio
from draftwood.tools.lab.suite import Ask, Suite

NAME = "peers"
PROMPTS = 6
OURS, PLAIN = "draftwood", "plain"
# What is read from a peer's name: that it speculates.
LOOKUP = "lookup"


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt at a size and a temperature, with every peer."""
    for size, temperature in product(ask.sizes, ask.temperatures):
        for prompt in range(ask.limit_of(size) or PROMPTS):
            yield Task(NAME, {"size": size, "temperature": temperature, "prompt": prompt})


def _ways(task: Task, ask: Ask, lab: Lab) -> dict[str, Generate]:
    """Ours, plain and with every drafter and policy, in every precision; then the peers that are installed."""
    size = task.at["size"]
    found: dict[str, Generate] = {}
    for precision in ask.precisions or (None,):
        for drafter in ask.drafters:
            opened = lab.planned(size, drafter, precision=precision)
            for policy in (PLAIN, *ask.policies):
                drafted = "" if policy == PLAIN else f"{drafter.removeprefix('demo-')} "
                name = f"{_named(precision)} {drafted}{policy}"
                found.setdefault(name, partial(_ours, lab, ask, Way(opened.engine, opened.policies(policy))))
    others = {name: lab.peer(size, name) for name in ask.peers or PEERS}
    return found | {name: peer for name, peer in others.items() if not isinstance(peer, str)}


def _named(precision: str | None) -> str:
    return f"{OURS} {precision}" if precision else OURS


def _ours(lab: Lab, ask: Ask, way: Way, ids: Sequence[int], count: int, temperature: float) -> Sequence[int]:
    asked = replace(lab.options(ask, temperature, ignore_eos=False), max_new_tokens=count)
    return decode(way, ids, asked).result.token_ids


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Exports the checkpoint to whoever needs it, and lets each answer once."""
    if lab.enters(NAME, task.at["size"]):
        for generate in _ways(task, ask, lab).values():
            generate(_ids(task, ask, lab), 8, task.at["temperature"])


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Seconds and tokens of every program, and how many tokens agree with plain decoding's, from the first on: ours in
    the same precision, a peer's with that of the first."""
    ids, ways = _ids(task, ask, lab), _ways(task, ask, lab)
    takers = {
        name: partial(_timed, generate, ids, ask.max_new_tokens, task.at["temperature"])
        for name, generate in ways.items()
    }
    texts = in_turns(takers, ask.rounds, task.at["prompt"])
    plain = {name.removesuffix(f" {PLAIN}"): own[0][1] for name, own in texts.items() if _plain(name)}
    found: dict[str, dict[str, Any]] = {}
    for name, own in texts.items():
        base = next((text for form, text in plain.items() if name.startswith(f"{form} ")), next(iter(plain.values())))
        last = own[-1][1]
        found[name] = {
            "seconds": [one for one, _ in own], "tokens": len(last), "agree": agreement(base, last), "base": len(base)
        }  # fmt: skip
        if name.startswith(OURS):
            found[name]["equal"] = all(text == base for _, text in own)
    others = {name: lab.peer(task.at["size"], name) for name in ask.peers or PEERS}
    missing = {name: why for name, why in others.items() if isinstance(why, str)}
    compiled = compiled_with() if any(name.startswith("llama.cpp") for name in ways) else ""
    return {"prompt_tokens": len(ids), "programs": found, "missing": missing, "compiled": compiled}


def _plain(name: str) -> bool:
    return name.startswith(OURS) and name.endswith(f" {PLAIN}")


def _timed(generate: Generate, ids: list[int], count: int, temperature: float) -> tuple[float, list[int]]:
    began = time.perf_counter()
    text = list(map(int, generate(ids, count, temperature)))
    return round(time.perf_counter() - began, 6), text


def _ids(task: Task, ask: Ask, lab: Lab) -> list[int]:
    prompt = lab.prompt(task.at["prompt"], ask.limit_of(task.at["size"]) or PROMPTS)
    precision = ask.precisions[0] if ask.precisions else None
    return lab.planned(task.at["size"], ask.drafters[0], precision=precision).ids(prompt)


def show(rows: list[Row]) -> Iterator[Block]:
    """Tokens a second of every program and its agreement; ours over the best peer; and who is missing."""
    groups = grouped(rows, "size", "temperature")
    programs = [[*at, *line] for at, own in groups.items() for line in _rates(own)]
    columns = ("size", "T", "program", "tokens/s (95 %)", "same text", "tokens before the first that differs")
    note = "Other programs round otherwise: a close decision may fall either way, and the text goes on from it."
    yield Table("Programs", columns, programs, f"{note} Ours are held to plain decoding in the same precision.")
    over = [[*at, *line] for at, own in groups.items() for line in _compared(own)]
    if over:
        yield Table("Ours over others", ("size", "T", "ours", "over", "times as fast (95 %)"), over)
    if compiled := rows[-1]["found"].get("compiled"):
        yield f"llama.cpp was compiled with {compiled}."
    missing = rows[-1]["found"]["missing"]
    if missing:
        yield "Missing: " + "; ".join(f"{name} ({why})" for name, why in missing.items()) + "."


def _rates(rows: list[Row]) -> Iterator[tuple[str, Interval, str, str]]:
    for name in rows[0]["found"]["programs"]:
        held = [row["found"]["programs"][name] for row in rows]
        rate = ratio([one["tokens"] for one in held], [float(np.median(one["seconds"])) for one in held])
        same = sum(one["base"] == one["agree"] == one["tokens"] for one in held)
        agree, of = (sum(one[what] for one in held) for what in ("agree", "base"))
        yield name, rate, f"{same} of {len(rows)}", f"{agree} of {of}"


def _compared(rows: list[Row]) -> Iterator[tuple[str, str, Interval]]:
    """Each of ours over the fastest peer, of which plain decoding meets those that do not speculate, and plain over the
    fastest of ours in another precision."""
    names = list(rows[0]["found"]["programs"])
    for name in (one for one in names if one.startswith(OURS)):
        plain = _plain(name)
        peers = [one for one in names if not one.startswith(OURS) and not (plain and LOOKUP in one)]
        others = [one for one in names if _plain(one) and one != name] if plain else []
        for group in (peers, others):
            if group:
                best = min(group, key=lambda one: sum(_token_seconds(rows, one)))
                yield name, best, ratio(_token_seconds(rows, best), _token_seconds(rows, name))


def _token_seconds(rows: list[Row], name: str) -> list[float]:
    held = (row["found"]["programs"][name] for row in rows)
    return [float(np.median(one["seconds"])) / max(one["tokens"], 1) for one in held]


SECTION = Section(
    name=NAME,
    title="Peers",
    question="How do other programs do on the same checkpoint?",
    source="Draftwood",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
)
