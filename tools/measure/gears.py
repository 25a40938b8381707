"""Every gear of a bundle tried on whole answers, for trees without counts of their gain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from draftwood.runtime.engines.cpu import CpuEngine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.tools.measure.runner import Way, decode, in_turns
from draftwood.tools.prompts import chat_ids


def tried_gears(engine: CpuEngine, questions: Sequence[str], max_new_tokens: int) -> list[dict[str, Any]]:
    """Tokens a step, milliseconds a step and tokens a second of each gear; ``fixed`` marks the fastest tree."""
    bundle, options = engine.bundle, Options(max_new_tokens=max_new_tokens)
    assert bundle.tokenizer is not None, "whoever asks questions has checked that there is a tokenizer"
    prompts = [chat_ids(bundle.tokenizer, [{"role": "user", "content": text}]) for text in questions]
    ways = {gear.name: Way(engine, Policies(bundle, gear.name)) for gear in bundle.manifest.gears}

    def answers(way: Way) -> list[tuple[int, int, float]]:
        results = [decode(way, ids, options).result for ids in prompts]
        return [(len(result.token_ids) - 1, result.steps, result.decode_seconds) for result in results]

    answers(next(iter(ways.values())))  # a first text opens graphs and fills buffers
    measured = in_turns({name: partial(answers, way) for name, way in ways.items()}, 1)
    gears = []
    for gear in bundle.manifest.gears:
        tokens, steps, seconds = (sum(column) for column in zip(*measured[gear.name][0], strict=True))
        gears.append(
            {
                "gear": gear.name,
                "rows": bundle.trees[gear.tree][0].rows,
                "accept_length": tokens / max(steps, 1),
                "ms_a_step": 1e3 * seconds / max(steps, 1),
                "tokens_per_s": tokens / max(seconds, 1e-9),
            }
        )
    best = max((gear for gear in gears if gear["rows"] > 1), key=lambda gear: gear["tokens_per_s"])
    return [{**gear, "fixed": gear is best} for gear in gears]
