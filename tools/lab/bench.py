"""One bundle against plain decoding: token equality and speed, turn by turn.

A turn's speed-up is the ratio of its two decode times (prefill left out: it is the same work). Where texts are held to
a grammar, the same turns are decoded without it, too: what drafts gain then is what the grammar should not cost.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from draftwood.runtime.decoding import Options, Result
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policies
from draftwood.tools.lab.conversations import turn_prompts
from draftwood.tools.lab.differences import TIES_PER_TOKEN, Difference, Noise, explain, noise_of
from draftwood.tools.lab.runner import PLAIN, Decoded, Way, decode, in_turns, warm_up
from draftwood.tools.lab.spread import spread
from draftwood.tools.prompts import Prompt

NOISE_TURNS = 24  # turns whose logits are compared row by row
FAST = "speculative"
FREE = "free"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn, decoded both ways. Times in seconds; ``accepted`` are the tokens gained by each step, ``free`` those
    without the grammar, where there is one."""

    id: str
    source: str
    tokens: int
    equal: bool
    plain_seconds: float
    speculative_seconds: float
    speedup: float
    accept_length: float
    accepted: tuple[int, ...]
    free: tuple[int, ...]
    host_share: float
    finish_reason: str


def bench(
    engine: StagedEngine, prompts: Sequence[Prompt], options: Options, plain: Policies, speculative: Policies
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
        if options.grammar is not None:
            takers[FREE] = partial(decode, ways[FAST], ids, replace(options, grammar=None))
        texts = {name: taken[0] for name, taken in in_turns(takers, 1, number).items()}
        base, fast = texts[PLAIN], texts[FAST]
        answers[prompt.conversation] = base.result.token_ids
        turns.append(_turn(prompt, base.result, fast, texts.get(FREE)))
        if not turns[-1].equal:
            differing.append((prompt.id, ids, base.result, fast.result))
        if number % max(1, len(prompts) // NOISE_TURNS) == 0:
            noise = noise.with_(noise_of(engine, [*ids, *base.result.token_ids]))
        _progress(number + 1, len(prompts), turns)
    explained = [
        explain(engine, name, ids, base.token_ids, fast.token_ids, options, noise.apart)
        for name, ids, base, fast in differing
    ]
    return _report(turns, explained, noise, options)


def _turn(prompt: Prompt, base: Result, decoded: Decoded, free: Decoded | None) -> Turn:
    fast = decoded.result
    return Turn(
        id=prompt.id,
        source=prompt.source,
        tokens=len(base.token_ids),
        equal=base.token_ids == fast.token_ids,
        plain_seconds=base.decode_seconds,
        speculative_seconds=fast.decode_seconds,
        # A turn that ended with its first token has no decode step to compare.
        speedup=base.decode_seconds / fast.decode_seconds if base.steps and fast.steps else 1.0,
        accept_length=fast.accept_length_mean,
        accepted=_accepted(decoded),
        free=_accepted(free) if free else (),
        host_share=fast.host_share,
        finish_reason=base.finish_reason,
    )


def _accepted(decoded: Decoded) -> tuple[int, ...]:
    return tuple(event.accepted for event in decoded.trace.events if event.kind != "prefill")


def by_position(accepted: Sequence[int]) -> list[float]:
    """The share of steps that accepted the draft at depth 1, 2, ...; ``accepted`` counts the bonus token of each."""
    deepest = max(accepted, default=1)
    return [sum(one > depth for one in accepted) / len(accepted) for depth in range(1, deepest)]


def _report(turns: list[Turn], differences: list[Difference], noise: Noise, options: Options) -> dict[str, Any]:
    measured = [turn for turn in turns if turn.accepted]
    tokens = sum(turn.tokens for turn in turns)
    decoded = sum(turn.tokens - 1 for turn in measured)
    plain, fast = (max(sum(getattr(turn, f"{side}_seconds") for turn in measured), 1e-9) for side in (PLAIN, FAST))
    ties = sum(difference.tie for difference in differences)
    accepted = [n for turn in measured for n in turn.accepted]
    free = [n for turn in turns for n in turn.free]
    sources = {turn.source: [one for one in measured if one.source == turn.source] for turn in measured}
    return {
        "ok": ties == len(differences) and ties <= math.ceil(tokens * TIES_PER_TOKEN),
        "turns": len(turns),
        "identical": sum(turn.equal for turn in turns),
        "ties": ties,
        "tokens": tokens,
        "differences": [asdict(difference) for difference in differences],
        "logit_noise": noise.apart,
        "rows_compared": noise.rows,
        "rows_bit_equal": noise.equal,
        "speedup": spread([turn.speedup for turn in measured], (1, 50, 99)),
        "accept_length": spread(accepted, (50, 99)),
        "accept_by_position": by_position(accepted),
        "accept_length_without_grammar": spread(free, (50, 99)) if free else None,
        "plain_tokens_per_s": decoded / plain,
        "speculative_tokens_per_s": decoded / fast,
        "host_share": sum(turn.host_share * turn.speculative_seconds for turn in measured) / fast,
        "by_source": {
            source: {
                "speedup": spread([turn.speedup for turn in own], (50,)),
                "accept_length": spread([n for turn in own for n in turn.accepted], (50,)),
            }
            for source, own in sorted(sources.items())
        },
        "temperature": options.sampling.temperature,
        "seed": options.sampling.seed,
        "per_turn": [asdict(turn) for turn in turns],
    }


def _progress(done: int, total: int, turns: list[Turn]) -> None:
    if done % 10 == 0 or done == total:
        equal = sum(turn.equal for turn in turns)
        ratio = sum(t.plain_seconds for t in turns) / max(sum(t.speculative_seconds for t in turns), 1e-9)
        print(f"{done}/{total} turns, {equal} identical, speed-up so far {ratio:.2f}", file=sys.stderr, flush=True)
