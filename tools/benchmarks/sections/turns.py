"""Conversations, answered plainly and with every bundle: EAGLE-Pangu's distributions over turns, FastEagle's families.

A task is a conversation: a later turn follows the model's own answers to the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftwood.tools.benchmarks.open_bundles import Lab
from draftwood.tools.benchmarks.section import Section, Task
from draftwood.tools.benchmarks.sections.turns_shown import show
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.measure.conversations import Conversation, by_conversation, tokenizer_of
from draftwood.tools.measure.runner import PLAIN, Way, measure, warm_up
from draftwood.tools.prompts import read_families

NAME = "turns"


def tasks(ask: SectionSettings, suite: Suite) -> Iterator[Task]:
    """A conversation at a temperature."""
    whole = by_conversation(read_families(suite.prompts), ask.limit)
    for temperature in ask.temperatures:
        for turns in whole:
            at = {"model": suite.model, "temperature": temperature, "conversation": turns[0].conversation}
            yield Task(NAME, at)


def ways_of(lab: Lab, ask: SectionSettings) -> dict[str, Way]:
    """``plain BUNDLE`` of every bundle, then ``BUNDLE POLICY``. All bundles hold the same teacher.

    Plain decoding goes round the bundles: one in each round, or as many as it takes for each to have one.
    """
    opened = {bundle: lab.opened(bundle) for bundle in ask.bundles}
    every = min(ask.rounds, len(opened))
    ways = {
        f"{PLAIN} {bundle}": Way(source.engine, source.policies(PLAIN), (at % every, every))
        for at, (bundle, source) in enumerate(opened.items())
    }
    for bundle, source in opened.items():
        for policy in ask.policies:
            ways[f"{bundle} {policy}"] = Way(source.engine, source.policies(policy))
    return ways


def prepare(task: Task, ask: SectionSettings, lab: Lab) -> None:
    """Opens the bundles, and decodes a text with each way once."""
    if lab.enters(NAME):
        options = lab.options(ask, task.at["temperature"], ignore_eos=False)
        warm_up(ways_of(lab, ask), lab.warming(ask.bundles[0], options), options)


def measure_conversation(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Any]:
    """Every turn with every way; a turn whose text and answer pass the context ends the conversation."""
    ways = ways_of(lab, ask)
    options = lab.options(ask, task.at["temperature"], ignore_eos=False)
    (turns,) = (t for t in lab.conversations(None) if t[0].conversation == task.at["conversation"])
    engine = next(iter(ways.values())).engine
    conversation, measured = Conversation(tokenizer_of(engine)), []
    for number, prompt in enumerate(turns):
        ids = conversation.ask(prompt)
        if len(ids) + options.max_new_tokens > engine.bundle.manifest.dims.context:
            break
        by_way, plain = measure(ways, ids, options, ask.rounds, number + len(prompt.text))
        conversation.answer(plain.token_ids)
        measured.append(
            {"id": prompt.id, "source": prompt.source, "turn": number + 1, "prompt_tokens": len(ids), "ways": by_way}
        )
    digests = {bundle: lab.opened(bundle).digest[:16] for bundle in ask.bundles}
    return {"turns": measured, "bundles": digests}


SECTION = Section(
    name=NAME,
    title="Turns",
    question="Is the text the same, and how much sooner is it there?",
    source="EAGLE-Pangu (arXiv 2603.08088) over turns; FastEagle (arXiv 2509.20416) by task family and temperature",
    tasks=tasks,
    prepare=prepare,
    measure=measure_conversation,
    show=show,
    one_text=True,
)
