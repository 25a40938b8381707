"""Texts that share launches, against plain decoding: equal tokens, and tokens a second of all texts together.

Only launches with every place taken are timed: a text that ends makes room for the next, whose prompt is not timed.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from draftwood.errors import RequestError
from draftwood.runtime.decoding import Decoding, Options, Result
from draftwood.runtime.engines import StagedEngine
from draftwood.runtime.policy import Policies
from draftwood.runtime.sharing import advance
from draftwood.tools.lab.conversations import turn_prompts
from draftwood.tools.lab.differences import explain, logit_noise
from draftwood.tools.lab.runner import PLAIN, Way, decode, in_turns, warm_up
from draftwood.tools.lab.spread import spread
from draftwood.tools.prompts import Prompt

FAST = "speculative"
# Turns of a round, by places: all but the last of them begin while others run.
TURNS_A_PLACE = 2


class Turn(NamedTuple):
    """A prompt, and what plain decoding of it alone gives."""

    id: str
    ids: list[int]
    alone: Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Turns that were decoded together. ``tokens`` and times in seconds are of launches with every place taken."""

    results: list[Result]
    tokens: int
    seconds: float
    graph_seconds: float
    launches: int

    @property
    def rate(self) -> float:
        """Tokens a second of all texts."""
        return self.tokens / self.seconds


def bench_batches(
    engine: StagedEngine,
    prompts: Sequence[Prompt],
    options: Options,
    plain: Policies,
    speculative: Policies,
    texts: int,
) -> dict[str, Any]:
    """Every turn alone and plain, then turns together: plain, and as the policies choose; keys as ``_report`` has them.

    Raises:
        RequestError: the engine takes fewer texts, or there are not enough prompts for a round.
    """
    if texts > engine.max_batch:
        raise RequestError(f"--texts {texts}: {engine.bundle.folder} has graphs for at most {engine.max_batch}")
    if len(prompts) < texts * TURNS_A_PLACE:
        raise RequestError(f"--texts {texts}: needs {texts * TURNS_A_PLACE} prompts or more, got {len(prompts)}")
    ways = {PLAIN: Way(engine, plain), FAST: Way(engine, speculative)}
    rounds: list[tuple[list[Turn], dict[str, Pass]]] = []
    asked = _alone(ways[PLAIN], prompts, options)
    for number in range(len(prompts) // (texts * TURNS_A_PLACE)):
        group = list(islice(asked, texts * TURNS_A_PLACE))
        takers = {name: partial(together, way, group, options, texts) for name, way in ways.items()}
        if not number:
            for take in takers.values():  # opens the graphs
                take()
        rounds.append((group, {name: taken[0] for name, taken in in_turns(takers, 1, number).items()}))
        _progress(rounds)
    return _report(engine, rounds, options, texts)


def together(way: Way, turns: Sequence[Turn], options: Options, texts: int) -> Pass:
    """Decodes the turns, ``texts`` of them at a time."""
    waiting = deque(
        Decoding(way.engine, turn.ids, options, way.policies.new(options.sampling.greedy, options.max_new_tokens))
        for turn in turns
    )
    ordered, running = list(waiting), list[Decoding]()
    tokens, seconds, graph_seconds, launches = 0, 0.0, 0.0, 0
    while waiting or running:
        while waiting and len(running) < texts:
            waiting[0].start()
            running.append(waiting.popleft())
        began = time.perf_counter()
        outcomes = advance(way.engine, running)
        if len(running) == texts:
            seconds += time.perf_counter() - began
            graph_seconds += (outcomes[0].draft_us + outcomes[0].verify_us) / 1e6
            tokens += sum(outcome.gained for outcome in outcomes)
            launches += 1
        for text in running:
            if text.finished:
                text.end()
        running = [text for text in running if not text.finished]
    results = [text.result for text in ordered if text.result is not None]
    return Pass(results=results, tokens=tokens, seconds=seconds, graph_seconds=graph_seconds, launches=launches)


def _alone(way: Way, prompts: Sequence[Prompt], options: Options) -> Iterator[Turn]:
    """Every turn, decoded when it is asked for: what was answered is in the conversation's next prompt."""
    answers: dict[str, Sequence[int]] = {}
    for number, (prompt, ids) in enumerate(turn_prompts(way.engine, prompts, answers)):
        if not number:
            warm_up({PLAIN: way}, ids, options)
        result = decode(way, ids, options).result
        answers[prompt.conversation] = result.token_ids
        yield Turn(prompt.id, ids, result)


def _rate_alone(turns: Sequence[Turn]) -> float:
    """Tokens a second of plain decoding, one text at a time."""
    measured = [turn.alone for turn in turns if turn.alone.steps]
    return sum(one.steps for one in measured) / sum(one.decode_seconds for one in measured)


def _report(
    engine: StagedEngine, rounds: Sequence[tuple[list[Turn], dict[str, Pass]]], options: Options, texts: int
) -> dict[str, Any]:
    """Rates in tokens a second; a speed-up is of one round."""
    differences = [
        asdict(explain(engine, turn.id, turn.ids, turn.alone.token_ids, one.token_ids, options.sampling, noise))
        for turns, passes in rounds
        for name in (PLAIN, FAST)
        for turn, one in zip(turns, passes[name].results, strict=True)
        if turn.alone.token_ids != one.token_ids
        for noise in [logit_noise(engine, [*turn.ids, *turn.alone.token_ids])]
    ]
    plain, fast = ([passes[name] for _, passes in rounds] for name in (PLAIN, FAST))
    alone = [_rate_alone(turns) for turns, _ in rounds]
    turns = sum(len(turns) for turns, _ in rounds)
    return {
        "ok": all(one["tie"] for one in differences),
        "texts": texts,
        "turns": turns,
        "identical": 2 * turns - len(differences),
        "differences": differences,
        "plain_over_alone": spread([one.rate / rate for one, rate in zip(plain, alone, strict=True)], (50,)),
        "speedup": spread([one.rate / base.rate for one, base in zip(fast, plain, strict=True)], (50,)),
        "alone_tokens_per_s": sum(alone) / len(alone),
        "plain_tokens_per_s": _rate(plain),
        "speculative_tokens_per_s": _rate(fast),
        "tokens_per_launch": sum(one.tokens for one in fast) / sum(one.launches for one in fast) / texts,
        "plain_host_share": _host_share(plain),
        "host_share": _host_share(fast),
        "temperature": options.sampling.temperature,
    }


def _rate(passes: Sequence[Pass]) -> float:
    return sum(one.tokens for one in passes) / sum(one.seconds for one in passes)


def _host_share(passes: Sequence[Pass]) -> float:
    return 1 - sum(one.graph_seconds for one in passes) / sum(one.seconds for one in passes)


def _progress(rounds: Sequence[tuple[list[Turn], dict[str, Pass]]]) -> None:
    plain, fast = (_rate([passes[name] for _, passes in rounds]) for name in (PLAIN, FAST))
    done = sum(len(turns) for turns, _ in rounds)
    print(
        f"{done} turns, {plain:.0f} tokens/s plain, {fast / plain:.2f} times that so far", file=sys.stderr, flush=True
    )
