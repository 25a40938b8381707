"""Texts that share launches, against plain decoding: equal tokens, and tokens a second of all texts together.

A text that ends makes room for the next, whose prompt is not timed. Figures are of steps with every place taken, unless
they are listed by number of texts: at the end of a round there are fewer and fewer.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, NamedTuple

from draftwood.errors import RequestError
from draftwood.runtime.decoding import Decoding, Result
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.options import Options
from draftwood.runtime.policy import Policies
from draftwood.runtime.sharing import advance
from draftwood.runtime.speculation.step import Outcome
from draftwood.tools.comparison.differences import explain, logit_noise
from draftwood.tools.measure.conversations import turn_prompts
from draftwood.tools.measure.runner import PLAIN, Way, decode, warm_up
from draftwood.tools.measure.spread import spread
from draftwood.tools.prompts import Prompt

FAST = "speculative"
# Turns of a round at least, by places: all but the last of them begin while others run.
TURNS_A_PLACE = 2
# How long one way decodes before the other does.
SLICE_SECONDS = 0.3


class PlainTurn(NamedTuple):
    """A prompt, and what plain decoding of it alone gives."""

    id: str
    ids: list[int]
    alone: Result


@dataclass(slots=True)
class OccupancySteps:
    """Steps of so many texts. ``chosen`` are their launches, each by its number of texts and gear, a text at a time."""

    tokens: int = 0
    seconds: float = 0.0
    graph_seconds: float = 0.0
    steps: int = 0
    chosen: Counter[tuple[int, str]] = field(default_factory=Counter)

    def __add__(self, other: OccupancySteps) -> OccupancySteps:
        names = [field.name for field in fields(OccupancySteps)]
        return OccupancySteps(*(getattr(self, name) + getattr(other, name) for name in names))

    def add(self, outcomes: Sequence[Outcome], seconds: float) -> None:
        """A step has ended."""
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        self.graph_seconds += sum((outcome.draft_us + outcome.verify_us) / outcome.texts for outcome in outcomes) / 1e6
        self.tokens += sum(outcome.gained for outcome in outcomes)
        self.chosen.update((outcome.texts, outcome.gear.name) for outcome in outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Turns that were decoded together, and its steps by how many texts were there."""

    results: list[Result]
    occupancies: dict[int, OccupancySteps]
    texts: int

    @property
    def full(self) -> OccupancySteps:
        """Steps with every place taken."""
        return self.occupancies[self.texts]

    @property
    def rate(self) -> float:
        """Tokens a second of all texts, with every place taken."""
        return self.full.tokens / self.full.seconds


def bench_batches(
    engine: Engine,
    prompts: Sequence[Prompt],
    options: Options,
    plain: Policies,
    speculative: Policies,
    texts: int,
) -> dict[str, Any]:
    """Every turn alone and plain, then turns together: plain, and as the policies choose; keys as ``_report`` has them.

    Raises:
        RequestError: the engine takes fewer texts, there are not enough prompts for a round, or answers are too short
            to share a launch.
    """
    if not 1 <= texts <= engine.max_batch:
        raise RequestError(f"--batch-size {texts}: {engine.bundle.folder} has graphs for 1 to {engine.max_batch}")
    if len(prompts) < texts * TURNS_A_PLACE:
        raise RequestError(f"--batch-size {texts}: needs {texts * TURNS_A_PLACE} prompts or more, got {len(prompts)}")
    engine.open_all()
    ways = {PLAIN: Way(engine, plain), FAST: Way(engine, speculative)}
    rounds: list[tuple[list[PlainTurn], dict[str, Pass]]] = []
    decoded = _alone(ways[PLAIN], prompts, options)
    for number, turns in enumerate(_shares(len(prompts), len(prompts) // (texts * TURNS_A_PLACE))):
        group = list(islice(decoded, turns))
        if len(group) < texts:  # prompts that have no room were left out
            if rounds:
                break
            raise RequestError(
                f"--batch-size {texts}: only {len(group)} of the prompts have room; name more, or shorter ones"
            )
        if not number:  # warms up
            side_by_side(ways, group, options, texts)
        passes = side_by_side(ways, group, options, texts, number)
        if any(texts not in passed.occupancies for passed in passes.values()):
            raise RequestError(
                f"--batch-size {texts}: so many answers never ran together, since most end with their first token;"
                " raise --max-new-tokens, or name other prompts"
            )
        rounds.append((group, passes))
        _progress(rounds)
    return _report(engine, rounds, options, texts)


def _shares(turns: int, rounds: int) -> list[int]:
    """All turns, shared out evenly among the rounds."""
    return [turns * (number + 1) // rounds - turns * number // rounds for number in range(rounds)]


class _Texts:
    """A way's turns, ``texts`` of them at a time."""

    def __init__(self, way: Way, turns: Sequence[PlainTurn], options: Options, texts: int) -> None:
        of_text = options.sampling.greedy, options.max_new_tokens
        self._engine, self._texts = way.engine, texts
        self._waiting = deque(Decoding(way.engine, turn.ids, options, way.policies.new(*of_text)) for turn in turns)
        self._ordered, self._running = list(self._waiting), list[Decoding]()
        self._found = defaultdict[int, OccupancySteps](OccupancySteps)

    @property
    def going(self) -> bool:
        return bool(self._waiting or self._running)

    def run(self) -> None:
        """Steps, for about `SLICE_SECONDS`."""
        until = time.perf_counter() + SLICE_SECONDS
        while self.going and time.perf_counter() < until:
            while self._waiting and len(self._running) < self._texts:
                text = self._waiting.popleft()
                text.start()
                if text.finished:  # by its first token
                    text.end()
                else:
                    self._running.append(text)
            if self._running:
                self._step()

    def _step(self) -> None:
        began = time.perf_counter()
        outcomes = advance(self._engine, self._running)
        self._found[len(self._running)].add(outcomes, time.perf_counter() - began)
        for text in self._running:
            if text.finished:
                text.end()
        self._running = [text for text in self._running if not text.finished]

    def passed(self) -> Pass:
        """All turns have ended."""
        results = [text.result for text in self._ordered if text.result is not None]
        return Pass(results=results, occupancies=dict(self._found), texts=self._texts)


def side_by_side(
    ways: Mapping[str, Way], turns: Sequence[PlainTurn], options: Options, texts: int, number: int = 0
) -> dict[str, Pass]:
    """Decodes the turns in every way, a few steps of each in turn, so that the machine's changes meet all alike. The
    order alternates with the round's ``number``."""
    going = {name: _Texts(way, turns, options, texts) for name, way in ways.items()}
    order = list(going.values())[:: -1 if number % 2 else 1]
    while any(group.going for group in order):
        for group in order:
            group.run()
    return {name: group.passed() for name, group in going.items()}


def _alone(way: Way, prompts: Sequence[Prompt], options: Options) -> Iterator[PlainTurn]:
    """Every turn, decoded when it is asked for: what was answered is in the conversation's next prompt."""
    answers: dict[str, Sequence[int]] = {}
    for number, (prompt, ids) in enumerate(turn_prompts(way.engine, prompts, answers)):
        if not number:
            warm_up({PLAIN: way}, ids, options)
        result = decode(way, ids, options).result
        answers[prompt.conversation] = result.token_ids
        yield PlainTurn(prompt.id, ids, result)


def _rate_alone(turns: Sequence[PlainTurn]) -> float:
    """Tokens a second of plain decoding, one text at a time."""
    measured = [turn.alone for turn in turns if turn.alone.steps]
    return sum(result.steps for result in measured) / sum(result.decode_seconds for result in measured)


def _report(
    engine: Engine, rounds: Sequence[tuple[list[PlainTurn], dict[str, Pass]]], options: Options, texts: int
) -> dict[str, Any]:
    """Rates in tokens a second; a speed-up is of one round."""
    differences = [
        asdict(explain(engine, turn.id, turn.ids, turn.alone.token_ids, result.token_ids, options, noise))
        for turns, passes in rounds
        for name in (PLAIN, FAST)
        for turn, result in zip(turns, passes[name].results, strict=True)
        if turn.alone.token_ids != result.token_ids
        for noise in [logit_noise(engine, [*turn.ids, *turn.alone.token_ids])]
    ]
    plain, fast = ([passes[name] for _, passes in rounds] for name in (PLAIN, FAST))
    alone = [_rate_alone(turns) for turns, _ in rounds]
    turns = sum(len(turns) for turns, _ in rounds)
    return {
        "ok": all(difference["tie"] for difference in differences),
        "texts": texts,
        "turns": turns,
        "identical": 2 * turns - len(differences),
        "differences": differences,
        "plain_over_alone": spread([passed.rate / rate for passed, rate in zip(plain, alone, strict=True)], (50,)),
        "speedup": spread([passed.rate / base.rate for passed, base in zip(fast, plain, strict=True)], (50,)),
        "alone_tokens_per_s": sum(alone) / len(alone),
        "plain_tokens_per_s": _rate(plain),
        "speculative_tokens_per_s": _rate(fast),
        "tokens_per_step": _full(fast).tokens / _full(fast).steps / texts,
        "plain_host_share": _host_share(plain),
        "host_share": _host_share(fast),
        "occupancies": [_occupancy(count, plain, fast) for count in range(1, texts + 1)],
        "temperature": options.sampling.temperature,
    }


def _full(passes: Sequence[Pass]) -> OccupancySteps:
    return sum((passed.full for passed in passes), OccupancySteps())


def _rate(passes: Sequence[Pass]) -> float:
    return _full(passes).tokens / _full(passes).seconds


def _host_share(passes: Sequence[Pass]) -> float:
    return 1 - _full(passes).graph_seconds / _full(passes).seconds


def _occupancy(count: int, plain: Sequence[Pass], fast: Sequence[Pass]) -> dict[str, Any]:
    """Figures of the steps of so many texts, if there were any. They are goodput in tokens a second and the ms that a
    text waits for a token. For each gear and number of texts in a launch there is also its share of the texts'
    steps."""
    occupancy: dict[str, Any] = {"texts": count}
    for name, passes in ((PLAIN, plain), (FAST, fast)):
        steps = sum((passed.occupancies.get(count, OccupancySteps()) for passed in passes), OccupancySteps())
        occupancy[f"{name}_steps"] = steps.steps
        occupancy[f"{name}_tokens_per_s"] = steps.tokens / steps.seconds if steps.steps else None
        occupancy[f"{name}_ms_per_token"] = 1e3 * count * steps.seconds / steps.tokens if steps.steps else None
    chosen = sorted(steps.chosen.items(), key=lambda choice: -choice[1])
    occupancy["chosen"] = [
        {"launch": size, "gear": gear, "share": number / steps.chosen.total()} for (size, gear), number in chosen
    ]
    return occupancy


def _progress(rounds: Sequence[tuple[list[PlainTurn], dict[str, Pass]]]) -> None:
    plain, fast = (_rate([passes[name] for _, passes in rounds]) for name in (PLAIN, FAST))
    done = sum(len(turns) for turns, _ in rounds)
    print(
        f"{done} turns, {plain:.0f} tokens/s plain, {fast / plain:.2f} times that so far", file=sys.stderr, flush=True
    )
