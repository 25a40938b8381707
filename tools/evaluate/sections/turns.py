"""Conversations, answered plainly and by every drafter: EAGLE-Pangu's distributions over turns, FastEagle's families.

A task is a conversation: a later turn follows the model's own answers to the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftwood.tools.evaluate import asked
from draftwood.tools.evaluate.lab import Lab, conversations
from draftwood.tools.evaluate.protocol import PLAIN, Way, measure, warm_up
from draftwood.tools.evaluate.section import Section, Task
from draftwood.tools.evaluate.sections.turns_shown import show
from draftwood.tools.evaluate.suite import Ask, Suite
from draftwood.tools.prompts import Prompt, read_families

NAME = "turns"
# Seconds that a token took in all ways and rounds, at first, by size.
TOKEN_SECONDS = {"native": 0.003, "110m": 0.02, "500m": 0.09}


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A conversation at a size and a temperature."""
    prompts = read_families(suite.prompts)
    for size in ask.sizes:
        whole = conversations(prompts, ask.limit_of(size))
        for temperature in ask.temperatures:
            for turns in whole:
                weight = TOKEN_SECONDS[size] * ask.max_new_tokens * ask.rounds * len(turns)
                at = {"size": size, "temperature": temperature, "conversation": turns[0].conversation}
                yield Task(NAME, at, weight)


def ways_of(lab: Lab, ask: Ask, size: str) -> dict[str, Way]:
    """``plain drafter`` of every bundle, then ``drafter policy``. All bundles of a size hold the same teacher.

    Plain decoding goes round the bundles: one in each round, or as many as it takes for each to have one.
    """
    opened = {drafter.removeprefix("demo-"): lab.planned(size, drafter) for drafter in ask.drafters}
    every = min(ask.rounds, len(opened))
    found = {
        f"{PLAIN} {drafter}": Way(one.engine, one.policies(PLAIN), (at % every, every))
        for at, (drafter, one) in enumerate(opened.items())
    }
    for drafter, one in opened.items():
        for policy in ask.policies:
            found[f"{drafter} {policy}"] = Way(one.engine, one.policies(policy))
    return found


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundles of the size, and decodes a text with each way once."""
    size = task.at["size"]
    if lab.warmed != (NAME, size):
        ways = ways_of(lab, ask, size)
        warm_up(ways, _ids(_first(ways), [lab.prompts[0]], []), asked.options_of(task, ask, lab, ignore_eos=False))
        lab.warmed = (NAME, size)


def measure_conversation(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Every turn with every way; a turn whose text and answer pass the context ends the conversation."""
    ways, options = ways_of(lab, ask, task.at["size"]), asked.options_of(task, ask, lab, ignore_eos=False)
    (turns,) = (t for t in conversations(lab.prompts, None) if t[0].conversation == task.at["conversation"])
    context = _first(ways).engine.bundle.manifest.dims.context
    answers: list[str] = []
    found = []
    for number, prompt in enumerate(turns):
        ids = _ids(_first(ways), turns[: number + 1], answers)
        if len(ids) + options.max_new_tokens > context:
            break
        by_way, plain = measure(ways, ids, options, ask.rounds, number + len(prompt.text))
        answers.append(plain.text or "")
        found.append(
            {"id": prompt.id, "source": prompt.source, "turn": number + 1, "prompt_tokens": len(ids), "ways": by_way}
        )
    digests = {drafter: lab.planned(task.at["size"], drafter).digest[:16] for drafter in ask.drafters}
    return {"turns": found, "bundles": digests}


def _first(ways: dict[str, Way]) -> Way:
    return next(iter(ways.values()))


def _ids(way: Way, turns: list[Prompt], answers: list[str]) -> list[int]:
    tokenizer = way.engine.bundle.tokenizer
    assert tokenizer is not None, "the demo teacher has a tokenizer"
    messages: list[dict[str, str]] = []
    for number, prompt in enumerate(turns):
        messages.append({"role": "user", "content": prompt.text})
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    return tokenizer.chat(messages)


SECTION = Section(
    name=NAME,
    title="Turns",
    question="Is the text the same, and how much sooner is it there?",
    source="EAGLE-Pangu (arXiv 2603.08088) over turns; FastEagle (arXiv 2509.20416) by task family and temperature",
    tasks=tasks,
    prepare=prepare,
    measure=measure_conversation,
    show=show,
)
