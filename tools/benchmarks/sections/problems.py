"""Problems with known answers: as many solved with drafts as without, and the price of a bundle's precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from draftwood.tools.benchmarks.judge import has_answer, solves
from draftwood.tools.benchmarks.open_bundles import Lab
from draftwood.tools.benchmarks.section import Block, Row, Section, Table, Task, grouped
from draftwood.tools.benchmarks.sections.turn import Ways
from draftwood.tools.benchmarks.suite import SectionSettings, Suite
from draftwood.tools.measure.conversations import by_conversation, continuation, tokenizer_of
from draftwood.tools.measure.runner import PLAIN, Way, decode, measure, median_seconds, warm_up
from draftwood.tools.measure.spread import ratio
from draftwood.tools.prompts import Prompt, read_families

NAME = "problems"


def tasks(ask: SectionSettings, suite: Suite) -> Iterator[Task]:
    """A problem with one bundle at a temperature: bundles may be of several precisions, and so of several texts."""
    for bundle, temperature, problem in product(ask.bundles, ask.temperatures, _problems(ask, suite)):
        at = {"model": suite.model, "bundle": bundle, "temperature": temperature, "problem": problem.id}
        yield Task(NAME, at)


def _problems(ask: SectionSettings, suite: Suite) -> list[Prompt]:
    with_answers = [prompt for prompt in read_families(suite.prompts) if has_answer(prompt)]
    return [turns[0] for turns in by_conversation(with_answers, ask.limit)]


def prepare(task: Task, ask: SectionSettings, lab: Lab) -> None:
    """Opens the bundle, and decodes a text with each way once."""
    if lab.enters(NAME, task.at["bundle"]):
        options = lab.options(ask, task.at["temperature"], ignore_eos=False)
        warm_up(_ways(task, ask, lab), lab.warming(task.at["bundle"], options), options)


def _ways(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Way]:
    opened = lab.opened(task.at["bundle"])
    return {name: Way(opened.engine, opened.policies(name)) for name in dict.fromkeys((PLAIN, *ask.policies))}


def measure_problem(task: Task, ask: SectionSettings, lab: Lab) -> dict[str, Any]:
    """The problem's text with every way, and whether it solves the problem."""
    ways, opened = _ways(task, ask, lab), lab.opened(task.at["bundle"])
    problem = next(prompt for prompt in lab.prompts if prompt.id == task.at["problem"])
    options, ids = lab.options(ask, task.at["temperature"], ignore_eos=False), opened.ids(problem)
    if not opened.holds(ids, options.max_new_tokens):
        lab.say(f"problem {problem.id}: left out: {len(ids)} tokens and an answer pass the context of a bundle")
        return {"ways": {}, "source": problem.source}
    by_way, plain = measure(ways, ids, options, ask.rounds, len(ids))
    for name, figures in by_way.items():
        text = plain if figures["equal"] else decode(ways[name], ids, options).result
        figures["solved"] = solves(problem, continuation(tokenizer_of(opened.engine), ids, text.token_ids))
    return {"ways": by_way, "source": problem.source}


def show(rows: list[Row]) -> Iterator[Block]:
    """Problems solved by family, bundle and way."""
    lines = []
    rows = [row for row in rows if row["found"]["ways"]]
    for (model, bundle, temperature), group in grouped(rows, "model", "bundle", "temperature").items():
        for source in dict.fromkeys(row["found"]["source"] for row in group):
            texts = [row["found"]["ways"] for row in group if row["found"]["source"] == source]
            lines += [[model, source, bundle, temperature, way, *_figures(way, texts)] for way in texts[0]]
    columns = (
        "model",
        "problems",
        "bundle",
        "temperature",
        "way",
        "solved",
        "texts of plain decoding",
        "tokens a step",
        "over plain",
    )
    yield Table("Problems solved", columns, lines, "Of one try: functions by their tests, sums by the last number.")


def _figures(way: str, texts: Sequence[Ways]) -> list[Any]:
    """Texts solved, texts equal, tokens a step and the speed-up of a way."""
    of_way = [ways[way] for ways in texts]
    solved, equal = (f"{sum(figures[name] for figures in of_way)} of {len(texts)}" for name in ("solved", "equal"))
    steps = max(1, sum(figures["steps"] for figures in of_way))
    gained = sum(figures["tokens"] - 1 for figures in of_way)
    times = [[median_seconds(ways[name]) for ways in texts] for name in (PLAIN, way)]
    return [solved, equal, round(gained / steps, 2), "" if way == PLAIN else str(ratio(*times))]


SECTION = Section(
    name=NAME,
    title="Problems",
    question="Are as many problems solved with drafts, and what does a precision cost?",
    source="HumanEval (arXiv 2107.03374) and GSM8K (arXiv 2110.14168), the first answer of each",
    tasks=tasks,
    prepare=prepare,
    measure=measure_problem,
    show=show,
)
