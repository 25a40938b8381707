"""The waits of a text for others: a second turn with and without kept prefixes, and steps while a prompt is read.

Both go through the result of ``draftwood.open``, as a service does, and are timed by the waiting client's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import Opening
from draftwood.runtime.opened import OpenedBundle
from draftwood.runtime.trace import Trace
from draftwood.tools.measure.conversations import Conversation, tokenizer_of
from draftwood.tools.prompts import Prompt

# Tokens of a chat before its second turn, and of the prompt that others wait for; less if the context is shorter.
BEHIND, LONG = 2000, 4000
ROUNDS = 5
ANSWER, FOLLOWING = 16, 24
# Tokens of each text before the long prompt comes, and of the answers of both.
BEFORE = 8
_PATIENCE_S = 600.0


def bench_waits(engine: Engine, prompts: Sequence[Prompt], texts: int) -> dict[str, Any]:
    """Both measurements: ``second_turn`` and ``long_prompt``."""
    context = engine.bundle.manifest.dims.context
    ids = _ids(engine, prompts, max(BEHIND, LONG) + FOLLOWING)
    return {
        "second_turn": _second_turn(engine, ids, min(BEHIND, context - 2 * ANSWER - FOLLOWING)),
        "long_prompt": _long_prompt(engine, ids, min(LONG, context - ANSWER), texts),
    }


def _ids(engine: Engine, prompts: Sequence[Prompt], count: int) -> list[int]:
    """Tokens of the prompts, one after another, over and over."""
    ids = [token for prompt in prompts for token in Conversation(tokenizer_of(engine)).ask(prompt)]
    return (ids * (count // len(ids) + 1))[:count]


def _second_turn(engine: Engine, ids: Sequence[int], first_tokens: int) -> dict[str, Any]:
    """Median seconds to the first token of a second turn."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    results = dict[bool, Result]()
    for number in range(ROUNDS):
        for prefixes in (True, False) if number % 2 else (False, True):
            model = OpenedBundle(engine.bundle, engine, Opening(prefixes=prefixes))
            first = ids[:first_tokens]
            answer = model.generate(first, policy="plain", max_new_tokens=ANSWER, ignore_eos=True)
            turn = [*first, *answer.token_ids, *ids[first_tokens : first_tokens + FOLLOWING]]
            results[prefixes] = model.generate(turn, policy="plain", max_new_tokens=ANSWER, ignore_eos=True)
            seconds[prefixes].append(results[prefixes].first_token_seconds)
    with_prefix, read = (statistics.median(seconds[prefixes]) for prefixes in (True, False))
    return {
        "first_turn_tokens": first_tokens,
        "prefix_tokens": results[True].prefix_tokens,
        "equal": results[True].token_ids == results[False].token_ids,
        "kept_seconds": with_prefix,
        "read_seconds": read,
        "ratio": with_prefix / read,
    }


def _long_prompt(engine: Engine, ids: Sequence[int], length: int, texts: int) -> dict[str, Any]:
    """The longest wait of texts that run plainly, in ms, while a prompt is read in launches between their steps."""
    model, trace = OpenedBundle(engine.bundle, engine, Opening(prefixes=False)), Trace()
    room = engine.bundle.manifest.dims.context - BEFORE
    streams = [
        model.stream(ids[number : number + BEFORE], policy="plain", max_new_tokens=room, ignore_eos=True)
        for number in range(texts)
    ]
    times: list[list[float]] = [[] for _ in streams]

    def run(stream: Decoding, moments: list[float]) -> None:
        for _ in stream:
            moments.append(time.perf_counter())

    with ThreadPoolExecutor(texts) as threads:
        running = [threads.submit(run, stream, moments) for stream, moments in zip(streams, times, strict=True)]
        try:
            until = time.monotonic() + _PATIENCE_S
            while min(map(len, times)) < BEFORE and time.monotonic() < until:
                time.sleep(0.001)
            began = time.perf_counter()
            model.generate(ids[:length], policy="plain", max_new_tokens=1, trace=trace)
            ended = time.perf_counter()
        finally:
            for stream in streams:
                stream.cancel()
        for reader in running:
            reader.result()
    waits = [1e3 * (b - a) for moments in times for a, b in pairwise(moments) if b > began and a < ended]
    steps = [1e3 * (b - a) for moments in times for a, b in pairwise(moments) if b <= began]
    launch_ms, step_ms = trace.events[0].verify_us / 1e3 / _launches(engine, length), statistics.median(steps)
    return {
        "prompt_tokens": length,
        "texts": texts,
        "longest_wait_ms": max(waits, default=0.0),
        "prompt_launch_ms": launch_ms,
        "step_ms": step_ms,
        "ratio": max(waits, default=0.0) / (launch_ms + step_ms),
    }


def _launches(engine: Engine, length: int) -> int:
    """How many launches read so many tokens; without a graph for prompts, one each."""
    sizes = engine.launches(engine.bundle.manifest.dims.context + 1)
    return -(-length // sizes[-1]) if sizes else length
