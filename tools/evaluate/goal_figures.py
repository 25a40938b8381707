"""The figures that goals were set for, from the rows of a run.

* tokens a step with the likeliest tree of at most 16 rows, drafts coupled to the teacher's noise (section ``coupled``);
* the time of a draft of five levels over EAGLE-3's (``steps``);
* decoding's speed with the default policy, over plain decoding's, over EAGLE-3's and over that of the same drafter in
  fp32, paired turn by turn (``turns``);
* texts that are plain decoding's (``coupled`` and ``turns``), rows with the bits of plain decoding (``bitwise``);
* launches of a step on an NPU, and bytes that the host reads back (``launches``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftwood.tools import demo
from draftwood.tools.evaluate.bases import base_seconds, bundle_factors
from draftwood.tools.evaluate.protocol import PLAIN, median_seconds
from draftwood.tools.evaluate.section import Row
from draftwood.tools.evaluate.sections import bitwise, coupled, launches, steps, turns
from draftwood.tools.evaluate.spread import Interval, ratio

BESIDE = "eagle3"
POLICY = "adaptive"
# Drafters in one pass, for whom goals are set together.
ONE_PASS = ("fasteagle", "dspark")
LEVELS = 5
TOKENS, DRAFT = "tokens a step, 16 rows", "draft over EAGLE-3's"
SPEED, OVER_PLAIN, BEST = "speed over EAGLE-3's", "speed over plain", "speed over plain, best"
OVER_FP32 = "speed over its own in fp32"
TEXTS, BITS = "texts equal to plain", "rows with plain's bits"
LAUNCHES, READ = "launches a step", "bytes read a step"
# By figure, temperature and drafter, the latter None where the figure has one drafter anyway.
GOALS = {
    **{
        (TOKENS, temperature, drafter): round(goal * share, 2)
        for drafter, goal in coupled.GOALS.items()
        for temperature, share in coupled.SHARE.items()
    },
    **{
        (what, temperature, drafter): goal
        for drafter in ONE_PASS
        for what, temperature, goal in ((TOKENS, 0.0, 5.0), (DRAFT, None, 0.3), (SPEED, 0.0, 1.1), (SPEED, 0.8, 1.0))
    },
    (BEST, 0.0, None): 2.0,
    (BEST, 0.8, None): 1.5,
}
# Goals of every drafter at every temperature.
OF_ALL = {TEXTS: 1.0, BITS: 1.0, LAUNCHES: 1.0, READ: 4096.0}
# Of these less is better.
AT_MOST = {DRAFT, LAUNCHES, READ}


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a drafter, and its goal where there is one."""

    what: str
    size: str
    temperature: float | None
    drafter: str
    value: float
    # The interval of a bootstrap over texts; None where nothing was drawn.
    low: float | None
    high: float | None
    # Texts, rows or steps that it is of.
    count: int

    @property
    def goal(self) -> float | None:
        """What it should be at least, or at most where less is better."""
        drafter = None if self.what == BEST else self.drafter.removesuffix(demo.W8A8)
        return GOALS.get((self.what, self.temperature, drafter), OF_ALL.get(self.what))

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.what in AT_MOST else self.value >= self.goal


def lines_of(rows: Sequence[Row]) -> Iterator[Line]:
    """All figures that the rows of a run make."""
    names = (coupled.NAME, steps.NAME, turns.NAME, bitwise.NAME, launches.NAME)
    own = {name: [row for row in rows if row["section"] == name] for name in names}
    for line in coupled.lines_of(own[coupled.NAME]):
        if line.way == coupled.COUPLED:
            yield _line(TOKENS, *line.place, line.drafter, line.tokens_a_step, len(line.keys))
    for size in dict.fromkeys(row["at"]["size"] for row in own[steps.NAME]):
        yield from _drafts(size, [row for row in own[steps.NAME] if row["at"]["size"] == size])
    for place, found in _places(own[turns.NAME]).items():
        yield from _speeds(*place, found)
    yield from _texts(own[coupled.NAME], own[turns.NAME])
    yield from _bits(own[bitwise.NAME])
    yield from _launches(own[launches.NAME])


def _line(what: str, size: str, temperature: float | None, drafter: str, found: Interval, count: int) -> Line:
    return Line(what, size, temperature, drafter, *(round(value, 4) for value in found), count)


def _places(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows by size and temperature."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((row["at"]["size"], row["at"]["temperature"]), []).append(row)
    return found


def _drafts(size: str, rows: Sequence[Row]) -> Iterator[Line]:
    """The draft of a chain of `LEVELS` levels over EAGLE-3's."""
    chain, ms = f"{steps.CHAIN}-{LEVELS}", {}
    for row in rows:
        found = [gear["draft_ms"] for gear in row["found"]["gears"] if gear["tree"] == chain]
        ms |= {row["at"]["drafter"].removeprefix("demo-"): one for one in found}
    for drafter, beside in _beside(ms):
        yield Line(DRAFT, size, None, drafter, round(ms[drafter] / ms[beside], 4), None, None, 1)


def _speeds(size: str, temperature: float, rows: Sequence[Row]) -> Iterator[Line]:
    """Speed over plain decoding and over other drafters, conversation by conversation; the best drafter's once more."""
    told = [[turn["ways"] for turn in row["found"]["turns"]] for row in rows if row["found"]["turns"]]
    if not told:
        return
    factors = bundle_factors([ways for turns in told for ways in turns])
    names = [way for way in told[0][0] if way.endswith(f" {POLICY}")]
    own = {way.partition(" ")[0]: [sum(median_seconds(ways[way]) for ways in turns) for turns in told] for way in names}
    plain = {
        way.partition(" ")[0]: [sum(base_seconds(way, ways, factors) for ways in turns) for turns in told]
        for way in names
    }
    lines = [_line(OVER_PLAIN, size, temperature, name, ratio(plain[name], own[name]), len(told)) for name in own]
    yield from lines
    best = max(lines, key=lambda line: line.value)
    yield Line(BEST, size, temperature, best.drafter, best.value, best.low, best.high, best.count)
    for name, beside in _beside(own):
        yield _line(SPEED, size, temperature, name, ratio(own[beside], own[name]), len(told))
    for name in (name for name in own if demo.in_int8(name) and name.removesuffix(demo.W8A8) in own):
        fp32 = own[name.removesuffix(demo.W8A8)]
        yield _line(OVER_FP32, size, temperature, name, ratio(fp32, own[name]), len(told))


def _texts(counted: Sequence[Row], timed: Sequence[Row]) -> Iterator[Line]:
    """Shares of texts that are plain decoding's, over all ways of a drafter."""
    equal: dict[tuple[str, float, str], list[bool]] = {}
    for row in (*counted, *timed):
        told = [turn["ways"] for turn in row["found"]["turns"]] if "turns" in row["found"] else [row["found"]["ways"]]
        for ways in told:
            for way, figures in ways.items():
                drafter = way.partition(" ")[0]
                if drafter != PLAIN:
                    place = row["at"]["size"], row["at"]["temperature"], drafter
                    equal.setdefault(place, []).append(figures["equal"])
    for (size, temperature, drafter), found in equal.items():
        share = sum(found) / len(found)
        yield Line(TEXTS, size, temperature, drafter, round(share, 4), None, None, len(found))


def _bits(rows: Sequence[Row]) -> Iterator[Line]:
    """Shares of rows that have the bits of plain decoding with the engine of ``--bitwise``."""
    by: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        drafter = row["at"]["drafter"].removeprefix("demo-")
        by.setdefault((row["at"]["size"], row["at"]["temperature"], drafter), []).append(row)
    for (size, temperature, drafter), own in by.items():
        kinds = [bitwise.counted(own, size, bitwise.BITWISE, kind) for kind in bitwise.KINDS]
        equal, count = (int(sum(kind[of] for kind in kinds)) for of in ("equal_one", "rows"))
        yield Line(BITS, size, temperature, drafter, round(equal / count, 4), None, None, count)


def _launches(rows: Sequence[Row]) -> Iterator[Line]:
    """The most that a step of a drafter asks for, over gears, greedy and sampled."""
    for row in rows:
        size, drafter = row["at"]["size"], row["at"]["drafter"].removeprefix("demo-")
        told = row["found"]["steps"]
        for what, of in ((LAUNCHES, "launches"), (READ, "read_bytes")):
            yield Line(what, size, None, drafter, float(max(step[of] for step in told)), None, None, len(told))


def _beside(found: Mapping[str, object]) -> list[tuple[str, str]]:
    """The drafters that are held against EAGLE-3, each against it in the same precision where that was measured."""
    pairs = []
    for name in found:
        beside = BESIDE + (demo.W8A8 if demo.in_int8(name) else "")
        if name != beside and beside in found:
            pairs.append((name, beside))
    return pairs
