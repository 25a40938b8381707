"""Other programs on the same checkpoint, in the same run: what is installed takes turns, what is not is named.

Seconds are of a whole greedy text, its prompt counted, for not every peer tells the two apart. Threads are equal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from draftwood.runtime.decoding import Options
from draftwood.tools.lab.differences import agreement
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.peers import PEERS, Generate
from draftwood.tools.lab.runner import Way, decode, in_turns
from draftwood.tools.lab.section import Block, Row, Section, Table, Task
from draftwood.tools.lab.spread import Interval, ratio
from draftwood.tools.lab.suite import Ask, Suite

NAME = "peers"
PROMPTS = 6
TOKEN_SECONDS = {"native": 0.02, "110m": 0.15, "500m": 0.6}
PLAIN = "draftwood plain"


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt at a size, with every peer."""
    for size in ask.sizes:
        for prompt in range(ask.limit_of(size) or PROMPTS):
            yield Task(NAME, {"size": size, "prompt": prompt}, TOKEN_SECONDS[size] * ask.max_new_tokens * ask.rounds)


def _ways(task: Task, ask: Ask, lab: Lab) -> dict[str, Generate]:
    """Ours, plain and with every drafter and policy; then the peers that are installed."""
    size = task.at["size"]
    found: dict[str, Generate] = {}
    for drafter in ask.drafters:
        opened = lab.planned(size, drafter)
        for policy in ("plain", *ask.policies):
            name = PLAIN if policy == "plain" else f"draftwood {drafter.removeprefix('demo-')} {policy}"
            found.setdefault(name, partial(_ours, Way(opened.engine, opened.policies(policy))))
    others = {name: lab.peer(size, name) for name in PEERS}
    return found | {name: peer for name, peer in others.items() if not isinstance(peer, str)}


def _ours(way: Way, ids: Sequence[int], count: int) -> Sequence[int]:
    return decode(way, ids, Options(max_new_tokens=count)).result.token_ids


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Exports the checkpoint to whoever needs it, and lets each answer once."""
    if lab.warmed != (NAME, task.at["size"]):
        for generate in _ways(task, ask, lab).values():
            generate(_ids(task, ask, lab), 8)
        lab.warmed = (NAME, task.at["size"])


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Seconds and tokens of every program, and how many tokens agree with plain decoding's, from the first on."""
    ids = _ids(task, ask, lab)
    takers = {
        name: partial(_timed, generate, ids, ask.max_new_tokens) for name, generate in _ways(task, ask, lab).items()
    }
    texts = in_turns(takers, ask.rounds, task.at["prompt"])
    plain = texts[PLAIN][0][1]
    found = {
        name: {"seconds": [one for one, _ in own], "tokens": len(own[-1][1]), "agree": agreement(plain, own[-1][1])}
        for name, own in texts.items()
    }
    others = {name: lab.peer(task.at["size"], name) for name in PEERS}
    missing = {name: why for name, why in others.items() if isinstance(why, str)}
    return {"prompt_tokens": len(ids), "programs": found, "missing": missing}


def _timed(generate: Generate, ids: list[int], count: int) -> tuple[float, list[int]]:
    began = time.perf_counter()
    text = list(map(int, generate(ids, count)))
    return round(time.perf_counter() - began, 6), text


def _ids(task: Task, ask: Ask, lab: Lab) -> list[int]:
    prompt = lab.prompt(task.at["prompt"], ask.limit_of(task.at["size"]) or PROMPTS)
    return lab.planned(task.at["size"], ask.drafters[0]).ids(prompt)


Line = tuple[str, str, Interval, list[Row]]


def show(rows: list[Row]) -> Iterator[Block]:
    """Tokens a second of every program, its agreement, and who is missing."""
    lines: list[Line] = []
    for size in dict.fromkeys(row["at"]["size"] for row in rows):
        own = [row for row in rows if row["at"]["size"] == size]
        for name in own[0]["found"]["programs"]:
            held = [row["found"]["programs"][name] for row in own]
            rate = ratio([one["tokens"] for one in held], [float(np.median(one["seconds"])) for one in held])
            lines.append((size, name, rate, own))
    cells = []
    for size, name, rate, own in lines:
        held = [row["found"]["programs"][name] for row in own]
        plain = [row["found"]["programs"][PLAIN]["tokens"] for row in own]
        same = sum(count == one["agree"] == one["tokens"] for count, one in zip(plain, held, strict=True))
        agree = sum(one["agree"] for one in held)
        cells.append([size, name, rate, f"{same} of {len(own)}", f"{agree} of {sum(plain)}"])
    columns = ("size", "program", "tokens/s (95 %)", "same text", "tokens before the first that differs")
    note = "Other programs round otherwise: a close decision may fall either way, and the text goes on from it."
    yield Table("Programs", columns, cells, [[row["key"] for row in own] for *_, own in lines], note)
    missing = rows[-1]["found"]["missing"]
    if missing:
        yield "Missing: " + "; ".join(f"{name} ({why})" for name, why in missing.items()) + "."


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
