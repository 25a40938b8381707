"""How one text is measured: every way of decoding it in turns, in alternating order, round after round.

The first way is plain decoding, and what the others' tokens are held against, exactly.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftwood.runtime.decoding import Decoding, Options, Result
from draftwood.runtime.engines import Engine, StagedEngine
from draftwood.runtime.policy import Policies
from draftwood.runtime.trace import Trace
from draftwood.tools.measure.bench import explain, logit_noise

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Way:
    """An engine and what chooses its gears. With ``turn`` (n, of) it takes part in every of-th round, from the n-th."""

    engine: Engine
    policies: Policies
    turn: tuple[int, int] = (0, 1)


def is_plain(way: str) -> bool:
    """Whether a way of this name is plain decoding: ``plain``, or ``plain`` with a word that tells it from others."""
    return way.split(" ")[0] == PLAIN


def measure(
    ways: Mapping[str, Way], ids: Sequence[int], options: Options, rounds: int, number: int = 0
) -> tuple[dict[str, dict[str, Any]], Result]:
    """Figures by way, and the plain text. ``number`` is the text's, by which order and turns alternate."""
    results: dict[str, list[Result]] = {name: [] for name in ways}
    traces: dict[str, Trace] = {}
    names = list(ways)
    for round in range(rounds):
        shift = (number + round) % len(names)
        order = names[shift:] + names[:shift]
        for name in order[::-1] if (number + round) % 2 else order:
            first, every = ways[name].turn
            if (number + round) % every != first:
                continue
            traces[name] = Trace()
            results[name].append(_decode(ways[name], ids, options, traces[name]))
    plain = results[names[0]][0]
    found = {name: figures(results[name], traces[name], plain) for name in names}
    for name, own in results.items():
        differing = next((one for one in own if one.token_ids != plain.token_ids), None)
        if differing is not None:
            found[name]["difference"] = _explained(ways[name].engine, ids, plain, differing, options)
    return found, plain


def _decode(way: Way, ids: Sequence[int], options: Options, trace: Trace | None = None) -> Result:
    return Decoding(
        way.engine, ids, options, way.policies.new(options.sampling.greedy, options.max_new_tokens), trace
    ).run()


def warm_up(ways: Mapping[str, Way], ids: Sequence[int], options: Options) -> None:
    """A text of its own, which is not measured: graphs are opened, buffers and caches are there."""
    for way in ways.values():
        _decode(way, ids, options)


def figures(results: Sequence[Result], trace: Trace, plain: Result) -> dict[str, Any]:
    """Of one way: times of every round in seconds, and what the last round's steps did.

    ``accepted`` are tokens gained, by step; ``depths`` how many steps drafted, and accepted a draft at depth 1, 2, ...
    """
    last, steps = results[-1], [event for event in trace.events if event.kind != "prefill"]
    drafted = [event for event in steps if event.kind == "verify"]
    deepest = max((len(event.path) for event in drafted), default=0)
    own = _decoding(plain)
    return {
        "seconds": [round(one.decode_seconds, 7) for one in results],
        "first_seconds": [round(one.first_token_seconds, 7) for one in results],
        "tokens": len(last.token_ids),
        "steps": last.steps,
        "equal": all(_decoding(one) == own for one in results),
        "accepted": [event.accepted for event in steps],
        "depths": [len(drafted), *(sum(len(e.path) >= d for e in drafted) for d in range(1, deepest + 1))],
        "gears": dict(sorted(Counter(event.gear for event in steps).items())),
        "stages_us": {
            "draft": round(sum(event.draft_us for event in steps), 1),
            "verify": round(sum(event.verify_us for event in steps), 1),
            "accept and commit": round(sum(event.accept_us for event in steps), 1),
            "host": round(sum(event.host_us for event in steps), 1),
        },
        "host_share": last.host_share,
    }


def _decoding(result: Result) -> tuple[tuple[int, ...], str]:
    return result.token_ids, result.finish_reason


def _explained(engine: Engine, ids: Sequence[int], plain: Result, other: Result, options: Options) -> dict[str, Any]:
    """Where two texts part, and whether the noise of the logits explains it."""
    staged = engine if isinstance(engine, StagedEngine) else getattr(engine, "behind", None)
    assert isinstance(staged, StagedEngine), "an engine that has parts"
    noise = logit_noise(staged, [*ids, *plain.token_ids])
    return asdict(explain(staged, "", ids, plain.token_ids, other.token_ids, options.sampling, noise))


def median_seconds(figures: Mapping[str, Any]) -> float:
    """A text's decoding time: the median of its rounds."""
    return statistics.median(figures["seconds"])
