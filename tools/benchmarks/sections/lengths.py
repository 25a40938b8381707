"""Speed-up against the length of the text before the answer: OpenPangu-Medusa's sweep, with and without the policy.

Every text is decoded plainly, by the adaptive policy, plainly again, and with every tree alone, after one prefill.
Plain against plain is the noise floor; the best tree alone in hindsight gives the policy's regret.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from draftwood.tools.benchmarks.open_bundles import Lab, Opened
from draftwood.tools.benchmarks.section import Section, Task
from draftwood.tools.benchmarks.sections import lengths_shown
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.measure.runner import PLAIN, Way, measure, warm_up

NAME = "lengths"
TEXTS = 4


def tasks(ask: SectionSettings, suite: Suite) -> Iterator[Task]:
    """A text of a length, for a bundle and a temperature."""
    for bundle, length in product(ask.bundles, ask.lengths):
        # Temperatures come last: they share the text's prefill.
        for text, temperature in product(range(ask.limit or TEXTS), ask.temperatures):
            at = {"model": suite.model, "bundle": bundle, "length": length, "text": text, "temperature": temperature}
            yield Task(NAME, at)


def _opened(task: Task, lab: Lab) -> Opened:
    return lab.opened(task.at["bundle"])


def _ways(opened: Opened, ids: list[int], lab: Lab) -> dict[str, Way]:
    """Trees are named without their KV lengths: one way grows through them."""
    gears = opened.engine.bundle.manifest.gears
    slots = min(gear.slots for gear in gears if gear.slots > len(ids) + 1)
    prefilled = lab.prefilled(opened, ids, slots)
    names = {PLAIN: PLAIN, "adaptive": "adaptive", "plain again": PLAIN}
    names |= {gear.tree: gear.name for gear in gears if (gear.draft or gear.looks_up) and gear.slots == slots}
    return {name: Way(prefilled, opened.policies(policy)) for name, policy in names.items()}


def prepare(task: Task, ask: SectionSettings, lab: Lab) -> None:
    """Opens the bundle, and decodes a text of the length with each way once."""
    if lab.enters(NAME, task.at["bundle"], task.at["length"]):
        opened = _opened(task, lab)
        _, ids = lab.text(opened.engine, task.at["length"], task.at["text"])
        warm_up(_ways(opened, ids, lab), ids, lab.options(ask, task.at["temperature"]))


def measure_text(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Any]:
    """The text with every way; its answer goes on past the end token, so that all texts weigh the same."""
    opened = _opened(task, lab)
    name, ids = lab.text(opened.engine, task.at["length"], task.at["text"])
    ways, _ = measure(
        _ways(opened, ids, lab),
        ids,
        lab.options(ask, task.at["temperature"]),
        ask.rounds,
        task.at["text"],
    )
    text = {"text": name, "prompt_tokens": len(ids), "ways": ways}
    return text | {"bundle": opened.digest[:16]}


SECTION = Section(
    name=NAME,
    title="Lengths",
    question="Where does it not pay: how does the speed-up change with the length of the text?",
    source="OpenPangu-Medusa (arXiv 2603.03383), speed-up, overhead ratio and break-even against L",
    tasks=tasks,
    prepare=prepare,
    measure=measure_text,
    show=lengths_shown.show,
)
