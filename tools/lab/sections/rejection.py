"""Rejection sampling beside shared noise: what a chain of drafts gains of sampled text by each way of accepting it.

Wider trees have no one law of rejection to compare with: what is drawn without replacement, and in which order, differs
from program to program.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from draftwood.runtime.decoding import Decoding
from draftwood.tools.lab.opened import Lab
from draftwood.tools.lab.runner import PLAIN
from draftwood.tools.lab.section import CACHED, Block, Row, Section, Table, Task, grouped, has_cache
from draftwood.tools.lab.spread import mean
from draftwood.tools.lab.suite import Ask, Suite

if TYPE_CHECKING:
    from draftwood.tools.reference.eager import EagerEngine

NAME = "rejection"
PROMPTS, CONTEXTS, LEVELS = 24, 16, 5


def tasks(ask: Ask, suite: Suite) -> Iterator[Task]:
    """A prompt at a temperature, for a drafter; a wider model computes the same, so one size is enough."""
    drafters = [one for one in ask.drafters if one in CACHED or one in suite.bundles]
    for drafter, temperature in product(drafters, (one for one in ask.temperatures if one)):
        for prompt in range(ask.limit or PROMPTS):
            at = {"size": ask.sizes[0], "drafter": drafter, "temperature": temperature, "prompt": prompt}
            yield Task(NAME, at)


def prepare(task: Task, ask: Ask, lab: Lab) -> None:
    """Opens the bundle."""
    lab.on(lab.planned(task.at["size"], task.at["drafter"]), "eager")


def measure(task: Task, ask: Ask, lab: Lab) -> dict[str, Any]:
    """Tokens a step at contexts inside the teacher's own sampled answer, by way and depth of the chain."""
    from draftwood.tools.lab.attended import features_of
    from draftwood.tools.lab.rejecting import WAYS, accepted

    opened = lab.planned(task.at["size"], task.at["drafter"])
    eager, options = cast("EagerEngine", lab.on(opened, "eager")), lab.options(ask, task.at["temperature"])
    prompt = opened.ids(lab.prompt(task.at["prompt"], ask.limit or PROMPTS))
    plain = opened.policies(PLAIN).new(False, options.max_new_tokens)
    text = [*prompt, *Decoding(opened.engine, prompt, options, plain).run().token_ids]
    assert eager.bundle.manifest.drafter is not None
    levels = min(LEVELS, eager.bundle.manifest.drafter.levels)
    features, ends = features_of(eager, text), np.linspace(len(prompt) + 1, len(text) - levels, CONTEXTS)
    slots = min(gear.slots for gear in eager.bundle.manifest.gears if gear.slots > len(text) + 2 * levels + 1)
    state = eager.begin(slots, options.sampling)
    found = [accepted(eager, state, text, features, at, levels) for at in sorted({int(end) for end in ends})]
    tokens = {way: (1 + np.cumsum([one[way] for one in found], 1)).mean(0).round(6).tolist() for way in WAYS}
    return {"contexts": len(found), "tokens": tokens, "bundle": opened.digest[:16]}


def show(rows: list[Row]) -> Iterator[Block]:
    """A line a way."""
    lines = []
    for place, own in grouped(rows, "drafter", "temperature").items():
        for way in own[0]["found"]["tokens"]:
            by_depth = np.array([row["found"]["tokens"][way] for row in own])
            by_level = [*by_depth.mean(0).round(2).tolist(), *[None] * LEVELS][:LEVELS]
            lines.append([*place, way, mean(by_depth[:, -1]), *by_level])
    levels = tuple(f"of {level} levels" for level in range(1, LEVELS + 1))
    columns = ("drafter", "temperature", "accepted by", "tokens a step (95 %)", *levels)
    note = (
        "Tokens a step of a chain as deep as the drafter's levels, five at most, the bonus counted."
        " No noise: the most probable token, accepted with the teacher's probability of it, as EAGLE-2 and 3 do."
        " Rejection: a token drawn from the drafter's distribution, accepted with min(1, p / q)."
    )
    yield Table("Ways to accept a chain in sampled text", columns, lines, note)


SECTION = Section(
    name=NAME,
    title="Rejection sampling",
    question="What does the teacher's own noise gain over rejection sampling?",
    source="FastEagle and EAGLE at T > 0; speculative sampling (arXiv 2211.17192); Gumbel coupling (arXiv 2408.07978)",
    tasks=tasks,
    prepare=prepare,
    measure=measure,
    show=show,
    given=has_cache,
)
