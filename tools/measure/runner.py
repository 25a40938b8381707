"""The one runner: the compared ways take turns, in an order that changes from round to round.

So a drift of the machine meets all ways alike. The first way is plain decoding; the others' tokens are compared with
its tokens, exactly.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.runtime.trace import Trace
from draftwood.tools.comparison.differences import explained
from draftwood.tools.measure.prefilled import Prefilled

PLAIN = "plain"

Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Way:
    """An engine and the policies that choose its gears. With ``turn`` (n, of) it takes part in every of-th round, from
    the n-th."""

    engine: Engine
    policies: Policies
    turn: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One text, decoded once, with the record of every step."""

    result: Result
    trace: Trace


def in_turns(
    ways: Mapping[str, Callable[[], Taken]],
    rounds: int,
    number: int = 0,
    turns: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, list[Taken]]:
    """The result of every way in every round that it takes part in.

    Args:
        number: the text's, by which the order and ``turns`` alternate.
        turns: (n, of) of a way that takes part in every of-th round only, from the n-th.
    """
    names, results = list(ways), {name: list[Taken]() for name in ways}
    for round in range(number, number + rounds):
        shift = round % len(names)
        order = names[shift:] + names[:shift]
        for name in order[::-1] if round // len(names) % 2 else order:
            first, every = (turns or {}).get(name, (0, 1))
            if round % every == first:
                results[name].append(ways[name]())
    return results


def is_plain(way: str) -> bool:
    """Whether a way of this name is plain decoding: ``plain``, or ``plain`` with a word that tells it from others."""
    return way.split(" ")[0] == PLAIN


def decode(way: Way, ids: Sequence[int], options: Options) -> Decoded:
    """The text after a prompt."""
    trace, policy = Trace(), way.policies.new(options.sampling.greedy, options.max_new_tokens)
    return Decoded(Decoding(way.engine, ids, options, policy, trace).run(), trace)


def warm_up(ways: Mapping[str, Way], ids: Sequence[int], options: Options) -> None:
    """A text of its own, which is not measured: graphs are opened, buffers and caches are there."""
    for way in ways.values():
        decode(way, ids, options)


def measure(
    ways: Mapping[str, Way], ids: Sequence[int], options: Options, rounds: int, number: int = 0
) -> tuple[dict[str, dict[str, Any]], Result]:
    """Figures by way, and the plain text. ``number`` is the text's, by which order and turns alternate."""
    takers = {name: partial(decode, way, ids, options) for name, way in ways.items()}
    texts = in_turns(takers, rounds, number, {name: way.turn for name, way in ways.items()})
    plain = texts[next(iter(ways))][0].result
    report = {name: figures(decoded, plain) for name, decoded in texts.items()}
    for name, decoded in texts.items():
        other = next((decoding.result for decoding in decoded if decoding.result.token_ids != plain.token_ids), None)
        if other is not None:
            engine = ways[name].engine
            engine = engine.wrapped if isinstance(engine, Prefilled) else engine
            report[name]["difference"] = explained(engine, ids, plain.token_ids, other.token_ids, options)
    return report, plain


def figures(texts: Sequence[Decoded], plain: Result) -> dict[str, Any]:
    """Figures of one way: times of every round in seconds, and the steps of the last round.

    ``accepted`` are tokens gained, by step. ``depths`` are counts of steps: those that drafted, and those that accepted
    a draft at depth 1, 2, ... ``held`` counts steps whose invariants a reference engine checked.
    """
    results, last = [text.result for text in texts], texts[-1].result
    steps = [event for event in texts[-1].trace.events if event.kind != "prefill"]
    drafted = [event for event in steps if event.kind == "verify"]
    deepest = max((len(event.path) for event in drafted), default=0)
    base = plain.token_ids, plain.finish_reason
    return {
        "seconds": [round(result.decode_seconds, 7) for result in results],
        "first_seconds": [round(result.first_token_seconds, 7) for result in results],
        "tokens": len(last.token_ids),
        "steps": last.steps,
        "equal": all((result.token_ids, result.finish_reason) == base for result in results),
        "accepted": [event.accepted for event in steps],
        "depths": [len(drafted), *(sum(len(e.path) >= d for e in drafted) for d in range(1, deepest + 1))],
        "held": sum(event.invariants is not None for event in steps),
        "gears": dict(sorted(Counter(event.gear for event in steps).items())),
        "stages_us": {
            "draft": round(sum(event.draft_us for event in steps), 1),
            "verify": round(sum(event.verify_us for event in steps), 1),
            "accept and commit": round(sum(event.accept_us for event in steps), 1),
            "host": round(sum(event.host_us for event in steps), 1),
        },
        "host_share": last.host_share,
    }


def median_seconds(figures: Mapping[str, Any]) -> float:
    """A text's decoding time: the median of its rounds."""
    return statistics.median(figures["seconds"])
