"""One bundle against plain decoding: token equality and speed, turn by turn.

A turn's speed-up is the ratio of its two decode times (prefill left out: it is the same work).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from draftwood.runtime.decoding import Result
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.tools.comparison.differences import TIES_PER_TOKEN, Difference, Noise, explain, noise_of
from draftwood.tools.measure.conversations import turn_prompts
from draftwood.tools.measure.runner import PLAIN, Way, decode, figures, in_turns, warm_up
from draftwood.tools.measure.spread import spread
from draftwood.tools.prompts import Prompt

NOISE_TURNS = 24  # turns whose logits are compared row by row
FAST = "speculative"


# A prompt's name and family, and the figures of its answer by way.
Turn = dict[str, Any]


def bench(
    engine: Engine, prompts: Sequence[Prompt], options: Options, plain: Policies, speculative: Policies
) -> dict[str, Any]:
    """Runs every turn both ways; see the report's keys in ``_report``."""
    ways = {PLAIN: Way(engine, plain), FAST: Way(engine, speculative)}
    turns: list[Turn] = []
    differing: list[tuple[str, list[int], Result, Result]] = []
    answers: dict[str, Sequence[int]] = {}
    noise = Noise()
    for number, (prompt, ids) in enumerate(turn_prompts(engine, prompts, answers)):
        if not turns:
            warm_up(ways, ids, options)
        takers = {name: partial(decode, way, ids, options) for name, way in ways.items()}
        texts = in_turns(takers, 1, number)
        base, fast = (texts[name][0].result for name in ways)
        answers[prompt.conversation] = base.token_ids
        by_way = {name: figures(results, base) for name, results in texts.items()}
        turns.append({"id": prompt.id, "source": prompt.source, **by_way})
        if not turns[-1][FAST]["equal"]:
            differing.append((prompt.id, ids, base, fast))
        if number % max(1, len(prompts) // NOISE_TURNS) == 0:
            noise = noise.with_(noise_of(engine, [*ids, *base.token_ids]))
        _progress(number + 1, len(prompts), turns)
    explained = [
        explain(engine, name, ids, base.token_ids, fast.token_ids, options, noise.apart)
        for name, ids, base, fast in differing
    ]
    return _report(turns, explained, noise, options)


def _seconds(turns: Sequence[Turn], way: str) -> float:
    return max(sum(turn[way]["seconds"][0] for turn in turns), 1e-9)


def _speedups(turns: Sequence[Turn]) -> list[float]:
    return [_seconds([turn], PLAIN) / _seconds([turn], FAST) for turn in turns]


def _accepted(turns: Sequence[Turn]) -> list[int]:
    """Tokens that each step gained."""
    return [gained for turn in turns for gained in turn[FAST]["accepted"]]


def by_position(accepted: Sequence[int]) -> list[float]:
    """The share of steps that accepted the draft at depth 1, 2, ...; ``accepted`` counts the bonus token of each."""
    deepest = max(accepted, default=1)
    return [sum(length > depth for length in accepted) / len(accepted) for depth in range(1, deepest)]


def _report(turns: list[Turn], differences: list[Difference], noise: Noise, options: Options) -> dict[str, Any]:
    measured = [turn for turn in turns if turn[FAST]["steps"]]  # another has ended with its first token
    tokens = sum(turn[PLAIN]["tokens"] for turn in turns)
    decoded = sum(turn[PLAIN]["tokens"] - 1 for turn in measured)
    plain, fast = (_seconds(measured, way) for way in (PLAIN, FAST))
    ties = sum(difference.tie for difference in differences)
    accepted = _accepted(measured)
    sources = {turn["source"]: [other for other in measured if other["source"] == turn["source"]] for turn in measured}
    return {
        "ok": ties == len(differences) and ties <= math.ceil(tokens * TIES_PER_TOKEN),
        "turns": len(turns),
        "identical": sum(turn[FAST]["equal"] for turn in turns),
        "ties": ties,
        "tokens": tokens,
        "differences": [asdict(difference) for difference in differences],
        "logit_noise": noise.apart,
        "rows_compared": noise.rows,
        "rows_bit_equal": noise.equal,
        "speedup": spread(_speedups(measured), (1, 50, 99)),
        "accept_length": spread(accepted, (50, 99)),
        "accept_by_position": by_position(accepted),
        "plain_tokens_per_s": decoded / plain,
        "speculative_tokens_per_s": decoded / fast,
        "host_share": sum(turn[FAST]["host_share"] * turn[FAST]["seconds"][0] for turn in measured) / fast,
        "by_source": {
            source: {
                "speedup": spread(_speedups(turns), (50,)),
                "accept_length": spread(_accepted(turns), (50,)),
            }
            for source, turns in sorted(sources.items())
        },
        "temperature": options.sampling.temperature,
        "seed": options.sampling.seed,
        "per_turn": turns,
    }


def _progress(done: int, total: int, turns: list[Turn]) -> None:
    if done % 10 == 0 or done == total:
        equal = sum(turn[FAST]["equal"] for turn in turns)
        ratio = _seconds(turns, PLAIN) / _seconds(turns, FAST)
        print(f"{done}/{total} turns, {equal} identical, speed-up so far {ratio:.2f}", file=sys.stderr, flush=True)
