"""The demo on a language model that people use: SmolLM2, its file's own four bits, trees looked up in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftwood.tools import demo
from draftwood.tools.demo import fetch
from draftwood.trees.spec import LOOKUPS, parse_specs

if TYPE_CHECKING:
    from draftwood.compiler.bundle.request import BuildRequest
    from draftwood.runtime.engines.cpu import CpuEngine
    from draftwood.tools.prompts import Prompt

# Copies of 3 and 7 tokens; the chain of 15 lost to both on two cores.
ROWS = (4, 8)
SLOTS, PREFILL_ROWS, SEQUENCES = 1024, (128,), 8
# Two questions that choose the fixed tree, and are not asked again.
CHOOSING = (
    "Give me three reasons to learn to cook, and repeat each reason in other words.",
    "Write a Python class for a point with x and y, and a method that adds another point.",
)


def request() -> BuildRequest:
    """The bundle: the model's blocks as its file has them, with the graphs of up to eight sequences a launch.

    Raises:
        RequestError: the model is not in the cache and cannot be downloaded.
    """
    import draftwood

    return draftwood.BuildRequest(
        model=fetch.model(),
        drafter=None,
        trees=tuple(parse_specs(",".join(LOOKUPS[rows] for rows in ROWS))),
        slots=(SLOTS,),
        prefill_rows=PREFILL_ROWS,
        precision="nbits",
        texts=SEQUENCES,
    )


def questions() -> list[Prompt]:
    """Twelve questions that a person would ask; the last turn of one conversation follows its first."""
    from draftwood.tools.prompts import read_prompts

    return read_prompts(demo.FOLDER / "questions.jsonl")


def choose_fixed(engine: CpuEngine, max_new_tokens: int) -> list[dict[str, Any]]:
    """Every gear with its tokens and milliseconds a step on two questions; ``fixed`` marks the fastest tree."""
    from draftwood.runtime.decoding import Options
    from draftwood.runtime.policy import Policies
    from draftwood.tools.lab.runner import Way, decode, in_turns
    from draftwood.tools.prompts import chat_ids

    bundle, options = engine.bundle, Options(max_new_tokens=max_new_tokens)
    assert bundle.tokenizer is not None, "SmolLM2 has a tokenizer"
    texts = [chat_ids(bundle.tokenizer, [{"role": "user", "content": text}]) for text in CHOOSING]
    ways = {gear.name: Way(engine, Policies(bundle, gear.name)) for gear in bundle.manifest.gears}

    def answers(way: Way) -> list[tuple[int, int, float]]:
        results = [decode(way, ids, options).result for ids in texts]
        return [(len(one.token_ids) - 1, one.steps, one.decode_seconds) for one in results]

    answers(next(iter(ways.values())))  # a first text opens graphs and fills buffers
    measured = in_turns({name: lambda way=way: answers(way) for name, way in ways.items()}, 1)
    gears = [_figures(name, rounds[0]) for name, rounds in measured.items()]
    trees = [gear for gear in gears if gear["expected_accept_length"] > 1]
    best = max(trees or gears, key=lambda gear: gear["expected_tokens_per_s"])
    rows = {gear.name: bundle.trees[gear.tree][0].rows for gear in bundle.manifest.gears}
    return [{**gear, "rows": rows[gear["gear"]], "fixed": gear is best} for gear in gears]


def _figures(name: str, answers: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    tokens, steps, seconds = (sum(column) for column in zip(*answers, strict=True))
    return {
        "gear": name,
        "expected_accept_length": tokens / max(steps, 1),
        "ms_a_step": 1e3 * seconds / max(steps, 1),
        "expected_tokens_per_s": tokens / max(seconds, 1e-9),
    }
