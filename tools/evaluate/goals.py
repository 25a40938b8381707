"""What drafters in one pass reach beside EAGLE-3, and what they were set out to reach: measured where it is missing.

    python -m draftwood.tools.evaluate.goals --prompts eval240.jsonl --sizes 110m --out DIR

Tokens a step with the likeliest tree of at most 16 rows; the time of a draft of five levels over EAGLE-3's; decoding's
speed over EAGLE-3's, both with the default policy, paired turn by turn. A run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from draftwood.errors import RequestError
from draftwood.files import cache_home
from draftwood.tools.evaluate.protocol import median_seconds
from draftwood.tools.evaluate.registry import SECTIONS
from draftwood.tools.evaluate.run import evaluate
from draftwood.tools.evaluate.section import Row
from draftwood.tools.evaluate.sections import coupled, steps, turns
from draftwood.tools.evaluate.spread import Interval, ratio
from draftwood.tools.evaluate.suite import Suite, read_suite
from draftwood.tools.script import refusing

BESIDE = "eagle3"
LEVELS = 5
TOKENS, DRAFT, SPEED = "tokens a step, 16 rows", "draft over EAGLE-3's", "speed over EAGLE-3's"
# By figure and, where it is of a temperature, that; a draft's time is an upper bound.
GOALS = {(TOKENS, 0.0): 5.0, (DRAFT, None): 0.3, (SPEED, 0.0): 1.1, (SPEED, 0.8): 1.0}


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a drafter, and its goal where there is one."""

    what: str
    size: str
    temperature: float | None
    drafter: str
    value: float
    # The interval of a bootstrap over texts; None for a median of steps.
    low: float | None
    high: float | None
    # Texts, or steps, that it is of.
    count: int

    @property
    def goal(self) -> float | None:
        """What it should be at least, or at most where it is a draft's time."""
        return None if self.drafter == BESIDE else GOALS.get((self.what, self.temperature))

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value < self.goal if self.what == DRAFT else self.value >= self.goal


def lines_of(rows: Sequence[Row]) -> Iterator[Line]:
    """All figures that the rows of a run make."""
    own = {name: [row for row in rows if row["section"] == name] for name in (coupled.NAME, steps.NAME, turns.NAME)}
    for line in coupled.lines_of(own[coupled.NAME]):
        if line.way == coupled.COUPLED:
            yield _line(TOKENS, *line.place, line.drafter, line.tokens_a_step, len(line.keys))
    for size in dict.fromkeys(row["at"]["size"] for row in own[steps.NAME]):
        yield from _drafts(size, [row for row in own[steps.NAME] if row["at"]["size"] == size])
    for place in dict.fromkeys((row["at"]["size"], row["at"]["temperature"]) for row in own[turns.NAME]):
        at = [row for row in own[turns.NAME] if (row["at"]["size"], row["at"]["temperature"]) == place]
        yield from _speeds(*place, at)


def _line(what: str, size: str, temperature: float | None, drafter: str, found: Interval, count: int) -> Line:
    return Line(what, size, temperature, drafter, *(round(value, 4) for value in found), count)


def _drafts(size: str, rows: Sequence[Row]) -> Iterator[Line]:
    """The draft of a chain of `LEVELS` levels over EAGLE-3's."""
    chain, ms = f"{steps.CHAIN}-{LEVELS}", {}
    for row in rows:
        found = [gear["draft_ms"] for gear in row["found"]["gears"] if gear["tree"] == chain]
        ms |= {row["at"]["drafter"].removeprefix("demo-"): one for one in found}
    for drafter in _others(ms):
        yield Line(DRAFT, size, None, drafter, round(ms[drafter] / ms[BESIDE], 4), None, None, 1)


def _speeds(size: str, temperature: float, rows: Sequence[Row]) -> Iterator[Line]:
    """Seconds of EAGLE-3's decoding over those of others, conversation by conversation."""
    seconds: dict[str, list[float]] = {}
    for row in (row for row in rows if row["found"]["turns"]):
        told = [turn["ways"] for turn in row["found"]["turns"]]
        for way in told[0]:
            drafter, _, policy = way.partition(" ")
            if policy == "adaptive":
                seconds.setdefault(drafter, []).append(sum(median_seconds(ways[way]) for ways in told))
    for drafter in _others(seconds):
        own = seconds[drafter]
        yield _line(SPEED, size, temperature, drafter, ratio(seconds[BESIDE], own), len(own))


def _others(found: Mapping[str, object]) -> list[str]:
    """The drafters that are held against EAGLE-3; none where it was not measured."""
    return [name for name in found if name != BESIDE] if BESIDE in found else []


def asked_suite(sizes: str | None, prompts: Sequence[str], limit: int | None = None) -> Suite:
    """The suite, with other sizes where a size matters; with ``limit`` conversations of every kind."""
    suite = read_suite("goals", SECTIONS).only(None, None, prompts)
    timed = suite.only(tuple(sizes.split(",")) if sizes else None, (steps.NAME, turns.NAME), ())
    sections = suite.sections | timed.sections
    if limit is not None:
        if limit < 1:
            raise RequestError(f"--limit {limit}: expected 1 or more")
        sections = {name: msgspec.structs.replace(ask, limit=limit, limits={}) for name, ask in sections.items()}
    return msgspec.structs.replace(suite, sections=sections)


def shown(lines: Sequence[Line]) -> str:
    """A table for people."""
    found = [f"{'figure':24} {'size':7} {'T':>4} {'drafter':10} {'value':>7}  {'95 %':14} goal"]
    for line in lines:
        spread = "" if line.low is None else f"{line.low:.2f} to {line.high:.2f}"
        temperature = "" if line.temperature is None else f"{line.temperature:g}"
        goal = "" if line.goal is None else f"{line.goal:g}: {'met' if line.met else 'missed'}"
        found.append(
            f"{line.what:24} {line.size:7} {temperature:>4} {line.drafter:10} {line.value:7.3f}  {spread:14} {goal}"
        )
    return "\n".join(line.rstrip() for line in found)


@refusing
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", action="append", default=[], metavar="FILE.jsonl", help="(the built-in ones)")
    parser.add_argument("--sizes", metavar="S[,S...]", help="of what is timed: native, 110m, 500m (110m)")
    parser.add_argument("--limit", type=int, metavar="N", help="conversations at a size and temperature (the suite's)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="rows; kept and resumed")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps models and bundles (default: a cache folder)")
    parser.add_argument("--threads", type=int, metavar="N", help="processors to use (default: all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    work = args.work or cache_home() / "draftwood" / "evaluate"
    lines = list(
        lines_of(evaluate(asked_suite(args.sizes, args.prompts, args.limit), args.out, work, args.threads).rows)
    )
    found = [{**asdict(line), "goal": line.goal, "met": line.met} for line in lines]
    print(json.dumps(found) if args.json else shown(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
