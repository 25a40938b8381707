"""Token equality and speed of speculation against plain decoding, paired turn by turn.

Both run in one process on one engine, in alternating order. A turn's speed-up is the ratio of its two decode
times (prefill left out: it is the same work). A difference is excused as a numeric tie only where the
teacher's own decision was closer than the measured noise of its logits; anything else is a failure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from draftwood.runtime.decoding import Decoding, Options, Result
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policies
from draftwood.runtime.speculation.sampling import Sampling, margin
from draftwood.runtime.trace import Trace
from draftwood.tools.comparison import single
from draftwood.tools.prompts import Prompt, chat_ids
from draftwood.trees import Topology, tensorize

# Two logits decide, each off by the noise; and the noise is the worst of a sample, so twice that again.
NOISE_FACTOR = 4
NOISE_TURNS = 24  # turns whose logits are compared row by row
TIES_PER_TOKEN = 1e-4  # more ties than this are a failure too


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn, decoded both ways. Times in seconds; ``accepted`` are the tokens gained by each step."""

    id: str
    source: str
    tokens: int
    equal: bool
    plain_seconds: float
    speculative_seconds: float
    speedup: float
    accept_length: float
    accepted: tuple[int, ...]
    host_share: float
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where the two texts of a turn part. ``margin`` is the lead of the teacher's token over the next, in logits, the
    noise of a draw counted."""

    id: str
    position: int
    plain_token: int
    speculative_token: int
    margin: float
    tolerance: float
    tie: bool


def bench(
    engine: StagedEngine, prompts: list[Prompt], options: Options, plain: Policies, speculative: Policies
) -> dict[str, Any]:
    """Runs every turn both ways; see the report's keys in ``_report``."""
    turns: list[Turn] = []
    differences: list[tuple[Prompt, list[int], Result, Result]] = []
    answers: dict[str, Sequence[int]] = {}
    noise = Noise()
    _warm_up(engine, prompts[0], options, (plain, speculative))
    for number, (prompt, ids) in enumerate(turn_prompts(engine, prompts, answers)):
        order = (plain, speculative) if number % 2 else (speculative, plain)
        results = {id(policy): _decode(engine, ids, options, policy) for policy in order}
        (base, _), (fast, accepted) = results[id(plain)], results[id(speculative)]
        answers[prompt.conversation] = base.token_ids
        turns.append(_turn(prompt, base, fast, accepted))
        if not turns[-1].equal:
            differences.append((prompt, ids, base, fast))
        if number % max(1, len(prompts) // NOISE_TURNS) == 0:
            noise = noise.with_(noise_of(engine, [*ids, *base.token_ids]))
        _progress(number + 1, len(prompts), turns)
    explained = [
        explain(engine, prompt.id, ids, base.token_ids, fast.token_ids, options.sampling, noise.apart)
        for prompt, ids, base, fast in differences
    ]
    return _report(turns, explained, noise, options)


def turn_prompts(
    engine: StagedEngine, prompts: list[Prompt], answers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[Prompt, list[int]]]:
    """Token ids of every turn; a later turn of a conversation carries the earlier ones and their answers, the last of
    which is looked up by the conversation's name."""
    tokenizer = engine.bundle.tokenizer
    assert tokenizer is not None
    history: dict[str, list[dict[str, str]]] = {}
    for prompt in prompts:
        messages = history.setdefault(prompt.conversation, [])
        if prompt.conversation in answers:
            messages.append({"role": "assistant", "content": tokenizer.decode(answers[prompt.conversation])})
        messages.append({"role": "user", "content": prompt.text})
        yield prompt, chat_ids(tokenizer, messages)


def _decode(
    engine: StagedEngine, ids: list[int], options: Options, policies: Policies
) -> tuple[Result, tuple[int, ...]]:
    trace = Trace()
    result = Decoding(engine, ids, options, policies.new(options.sampling.greedy, options.max_new_tokens), trace).run()
    return result, tuple(event.accepted for event in trace.events if event.kind != "prefill")


def _warm_up(engine: StagedEngine, prompt: Prompt, options: Options, policies: tuple[Policies, ...]) -> None:
    for _, ids in turn_prompts(engine, [prompt], {}):
        for policy in policies:
            _decode(engine, ids, options, policy)


def _turn(prompt: Prompt, base: Result, fast: Result, accepted: tuple[int, ...]) -> Turn:
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
        accepted=accepted,
        host_share=fast.host_share,
        finish_reason=base.finish_reason,
    )


class Noise(NamedTuple):
    """Logits of one position in different company: the largest absolute difference, how many rows were held against
    each other, and how many of them had equal bits."""

    apart: float = 0.0
    rows: int = 0
    equal: int = 0

    def with_(self, other: Noise) -> Noise:
        """Both together."""
        return Noise(max(self.apart, other.apart), self.rows + other.rows, self.equal + other.equal)


def logit_noise(engine: StagedEngine, ids: list[int]) -> float:
    """Largest absolute difference between logits of one position computed in different company."""
    return noise_of(engine, ids).apart


def noise_of(engine: StagedEngine, ids: list[int]) -> Noise:
    """The last tokens are computed as a chain of one tree and one by one; in exact arithmetic both are equal."""
    bundle = engine.bundle
    rows = min(max(tree.rows for tree in bundle.manifest.trees), len(ids) - 1)
    if rows < 2:
        return Noise()
    chain, one = tensorize(Topology.chain(rows - 1)), bundle.trees["plain"][1]
    slots = max(gear.slots for gear in bundle.manifest.gears)
    together, alone = engine.begin(slots), engine.begin(slots)
    head, tail = np.array(ids[:-rows]), np.array(ids[-rows:])
    engine.prefill(together, head)
    engine.prefill(alone, head)
    logits_TV = single.verify(engine, together, tail, chain).logits_RV.copy()
    found = Noise()
    for row in range(rows):
        one_V = single.verify(engine, alone, tail[row : row + 1], one).logits_RV[0]
        equal = np.array_equal(one_V.view(np.int32), logits_TV[row].view(np.int32))
        found = found.with_(Noise(float(np.abs(one_V - logits_TV[row]).max()), 1, int(equal)))
        alone.commit([0])
    return found


def explain(
    engine: StagedEngine,
    name: str,
    ids: Sequence[int],
    plain: Sequence[int],
    found: Sequence[int],
    sampling: Sampling,
    noise: float,
) -> Difference:
    """The first difference of two texts behind a prompt, and whether noise in the logits explains it."""
    pairs = zip(plain, found, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(found)))
    state = engine.begin(max(gear.slots for gear in engine.bundle.manifest.gears))
    logits_V = single.prefill(engine, state, np.array([*ids, *plain[:at]])).logits_RV[0]
    distance = margin(logits_V, sampling, len(ids) + at)
    allowed = NOISE_FACTOR * noise
    token = [text[at] if at < len(text) else -1 for text in (plain, found)]
    return Difference(
        id=name,
        position=at,
        plain_token=token[0],
        speculative_token=token[1],
        margin=distance,
        tolerance=allowed,
        tie=distance <= allowed and -1 not in token,
    )


def _spread(values: list[float], points: tuple[int, ...]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, **{f"p{point}": 0.0 for point in points}}
    return {"mean": float(np.mean(values)), **{f"p{p}": float(np.percentile(values, p)) for p in points}}


def by_position(accepted: list[float]) -> list[float]:
    """The share of steps that accepted the draft at depth 1, 2, ...; ``accepted`` counts the bonus token of each."""
    deepest = int(max(accepted, default=1))
    return [float(np.mean(np.array(accepted) > depth)) for depth in range(1, deepest)]


def _report(turns: list[Turn], differences: list[Difference], noise: Noise, options: Options) -> dict[str, Any]:
    measured = [turn for turn in turns if turn.accepted]
    tokens = sum(turn.tokens for turn in turns)
    decoded = sum(turn.tokens - 1 for turn in measured)
    seconds = {side: sum(getattr(t, f"{side}_seconds") for t in measured) for side in ("plain", "speculative")}
    ties = sum(difference.tie for difference in differences)
    sources = sorted({turn.source for turn in measured})
    accepted = [float(n) for turn in measured for n in turn.accepted]
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
        "speedup": _spread([turn.speedup for turn in measured], (1, 50, 99)),
        "accept_length": _spread(accepted, (50, 99)),
        "accept_by_position": by_position(accepted),
        "plain_tokens_per_s": decoded / max(seconds["plain"], 1e-9),
        "speculative_tokens_per_s": decoded / max(seconds["speculative"], 1e-9),
        "host_share": sum(t.host_share * t.speculative_seconds for t in measured) / max(seconds["speculative"], 1e-9),
        "by_source": {
            source: {
                "speedup": _spread([t.speedup for t in measured if t.source == source], (50,)),
                "accept_length": _spread([float(n) for t in measured if t.source == source for n in t.accepted], (50,)),
            }
            for source in sources
        },
        "temperature": options.sampling.temperature,
        "seed": options.sampling.seed,
        "per_turn": [asdict(turn) for turn in turns],
    }


def _progress(done: int, total: int, turns: list[Turn]) -> None:
    if done % 10 == 0 or done == total:
        equal = sum(turn.equal for turn in turns)
        ratio = sum(t.plain_seconds for t in turns) / max(sum(t.speculative_seconds for t in turns), 1e-9)
        print(
            f"{done}/{total} turns, {equal} identical, speed-up so far {ratio:.2f}",
            file=sys.stderr,
            flush=True,
        )
