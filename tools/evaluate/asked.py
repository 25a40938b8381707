"""What sections that take prompts one by one ask for: their tasks, a task's prompt, and how it is decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from draftwood.runtime.decoding import Options
from draftwood.runtime.engines import Engine
from draftwood.runtime.speculation.sampling import Sampling
from draftwood.tools.evaluate.lab import Lab
from draftwood.tools.evaluate.section import Task
from draftwood.tools.evaluate.suite import Ask
from draftwood.tools.prompts import Prompt


def tasks_of(name: str, ask: Ask, prompts: int, token_seconds: Mapping[str, float]) -> Iterator[Task]:
    """A prompt at a size and a temperature, with every drafter; ``prompts`` where the suite says no limit."""
    for size, temperature in product(ask.sizes, ask.temperatures):
        for prompt in range(ask.limit_of(size) or prompts):
            at = {"size": size, "temperature": temperature, "prompt": prompt}
            yield Task(name, at, token_seconds[size] * ask.max_new_tokens)


def prompt_of(task: Task, ask: Ask, lab: Lab, prompts: int) -> Prompt:
    """The first turn of the task's conversation."""
    own = lab.conversations(ask.limit_of(task.at["size"]) or prompts)
    return own[task.at["prompt"] % len(own)][0]


def ids_of(prompt: Prompt, engine: Engine) -> list[int]:
    """A prompt as the engine's bundle reads it."""
    tokenizer = engine.bundle.tokenizer
    assert tokenizer is not None, "the demo teacher has a tokenizer"
    return tokenizer.chat([{"role": "user", "content": prompt.text}])


def options_of(task: Task, ask: Ask, lab: Lab, ignore_eos: bool = True) -> Options:
    """How the task's texts are decoded; past the end token where all texts shall weigh the same."""
    sampling = Sampling(temperature=task.at["temperature"], seed=lab.suite.seed)
    return Options(max_new_tokens=ask.max_new_tokens, sampling=sampling, ignore_eos=ignore_eos)
