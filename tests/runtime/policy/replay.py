"""Texts like SmolLM2's, decoded by any policy in a modelled time: a policy next to plain decoding and each fixed tree.

The shares of candidates that are right and the times of steps are those of docs/results/speed.md; texts differ from
each other, and in their course. All policies see the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from draftwood.planned import LOOKUP, Planning, Prior, StepTime
from draftwood.runtime.policy import Adaptive, Asking, Gears, Learned, gears_for
from draftwood.runtime.speculation.lookup import GOES_ON
from draftwood.runtime.speculation.step import Outcome
from draftwood.trees import Topology

from .samples import PLAIN_TREE, accepted, drafted, gear

NEURAL = {"chain-1": Topology.chain(1), "chain-3": Topology.chain(3), "tree-8": Topology.backbone(4, 2)}
LOOKED_UP = {"lookup-chain-3": Topology.chain(3), "lookup-chain-7": Topology.chain(7)}
EVERY = {**NEURAL, **LOOKED_UP}
NODES = {name: frozenset(tree.paths) for name, tree in EVERY.items()}
# Milliseconds of a launch: of its first row, of each further one, of a drafter's level a text, and of a token that the
# drafter's caches lack.
FIRST, ROW, LEVEL, LATE = 12.5, 1.6, 0.9, 0.12
# The share of first candidates that are right, greedy and sampled, and of second ones.
RIGHT, SECOND = {True: 0.55, False: 0.38}, 0.15
# Tokens of a prompt, which no draft has read.
PROMPT = 100
# Standard deviation of the log-odds of texts, and of the parts of one.
TEXTS, PARTS, PART = 0.7, 0.4, 40


class Cell(NamedTuple):
    """A situation in which policies are compared."""

    drafts: str  # "neural", "lookup" or "both"
    greedy: bool
    texts: int
    tokens: int
    timed: str  # "tuned", "guessed", or "wrong": timed on a machine with another cost of a row
    planned: bool

    @property
    def trees(self) -> dict[str, Topology]:
        return {"neural": NEURAL, "lookup": LOOKED_UP, "both": EVERY}[self.drafts]


class Truth(NamedTuple):
    """At every token of a text: the drafter's path, the class of the match, and the tokens of the match that hold."""

    neural: list[tuple[int, ...]]
    match: list[int]
    held: list[int]

    @classmethod
    def drawn(cls, random: np.random.Generator, greedy: bool, tokens: int) -> Truth:
        ease, copies = random.normal(0, TEXTS), random.beta(0.6, 2.5)
        neural, match, held, part = [], [], [], 0.0
        for at in range(tokens + 8):
            part = random.normal(0, PARTS) if at % PART == 0 else part
            odds = RIGHT[greedy] / (1 - RIGHT[greedy]) * np.exp(ease + part)
            first = odds / (1 + odds)
            draws, path = random.random(6), list[int]()
            for share in draws:
                if share >= first + SECOND * (1 - first):
                    break
                path.append(int(share >= first))
            neural.append(tuple(path))
            kind = int(random.integers(1, len(GOES_ON))) if random.random() < copies else 0
            match.append(kind)
            held.append(int(np.argmin(random.random(8) < GOES_ON[kind])) if kind else 0)
        return cls(neural, match, held)

    def taken(self, tree: str, at: int) -> tuple[int, ...]:
        """The path that the teacher accepts of a tree after ``at`` tokens."""
        path = (0,) * self.held[at] if tree in LOOKED_UP else self.neural[at]
        return accepted(NODES[tree], path)


def launch_ms(names: Sequence[str], late: int = 0, row: float = ROW) -> float:
    """The time of a launch of texts that take these gears; all take one tree, or none."""
    rows = sum(1 if name == "plain" else EVERY[name].rows for name in names)
    levels = sum(EVERY[name].depth for name in names if name in NEURAL)
    return FIRST + row * (rows - 1) + LEVEL * levels + LATE * late


def gears_of(cell: Cell) -> Gears:
    """The gears of a cell's bundle, with what is known of them beforehand."""
    names = ["plain", *cell.trees]
    every = [gear(name, draft=None if name == "plain" else LOOKUP if name in LOOKED_UP else "draft") for name in names]
    trees = [PLAIN_TREE, *(drafted(tree, name, name in LOOKED_UP) for name, tree in cell.trees.items())]
    row = {"tuned": ROW, "wrong": 0.4 * ROW}.get(cell.timed)
    times = [
        StepTime(gear=name, length=100, us=1e3 * launch_ms([name] * texts, row=row), texts=texts)
        for name in names
        for texts in (1, 2, 4, 8)
        if row
    ]
    return Gears(every, trees, planning() if cell.planned else None, times)


@cache
def planning() -> Planning:
    """What a plan counted on texts of this kind."""

    def prior(greedy: bool) -> Prior:
        random = np.random.default_rng(99)
        texts = [Truth.drawn(random, greedy, 100) for _ in range(30)]
        reached = {}
        for name, tree in NEURAL.items():
            depths = np.array([len(truth.taken(name, at)) for truth in texts for at in range(100)])
            reached[name] = tuple(float((depths > level).mean()) for level in range(tree.depth))
        return Prior(reached=reached, first=reached["chain-1"][0])

    return Planning(greedy=prior(True), sampled=prior(False), times=())


class Replayed(NamedTuple):
    """Milliseconds and tokens of a cell's texts, and each text's milliseconds over plain decoding's."""

    ms: float
    tokens: int
    plain_ms: float
    worst: float

    @property
    def speed(self) -> float:
        """How many times plain decoding's speed."""
        return self.plain_ms / self.ms


class Text:
    """A text on its way."""

    def __init__(self, truth: Truth, policy: Adaptive | None) -> None:
        self.truth, self.policy, self.at, self.late, self.ms, self.plain_ms = truth, policy, 0, PROMPT, 0.0, 0.0

    def asking(self) -> Asking:
        assert self.policy is not None
        return Asking(self.policy, 100 + self.at, self.late, self.truth.match[self.at])


def replay(cell: Cell, fixed: str | None = None, texts: int = 12, seed: int = 0) -> Replayed:
    """Decodes ``texts`` texts, as many of them at once as the cell says, by `Adaptive` or by a ``fixed`` tree."""
    random, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    gears = gears_of(cell)
    learned, by_name = Learned(gears), {gear.name: gear for gear in gears.gears}
    waiting = [
        Text(
            Truth.drawn(random, cell.greedy, cell.tokens),
            None if fixed else Adaptive(learned, cell.greedy, cell.tokens),
        )
        for _ in range(texts)
    ]
    every, running = waiting[:], list[Text]()
    ms = plain_ms = 0.0
    while waiting or running:
        while waiting and len(running) < cell.texts:
            running.append(waiting.pop(0))
        chosen = (
            [by_name[_fixed(fixed, text)] for text in running]
            if fixed
            else gears_for([text.asking() for text in running])
        )
        names = [each.name for each in chosen]
        late = sum(text.late for text, name in zip(running, names, strict=True) if name in NEURAL)
        slower = noise.lognormal(0, 0.05) * (4.0 if noise.random() < 0.01 else 1.0)
        took_ms, plainly_ms = launch_ms(names, late) * slower, launch_ms(["plain"] * len(running)) * 1.031
        for text, one in zip(running, chosen, strict=True):
            path = text.truth.taken(one.name, text.at) if one.draft else ()
            if text.policy is not None:
                text.policy.observe(
                    Outcome(
                        one, 100 + text.at, path, len(path) + 1,
                        verify_us=1e3 * took_ms, late=text.late, texts=len(running), match=text.truth.match[text.at],
                    )
                )  # fmt: skip
            gained = min(len(path) + 1, cell.tokens - text.at)
            text.late = 0 if one.name in NEURAL else text.late + 1
            text.at, text.ms, text.plain_ms = text.at + gained, text.ms + took_ms, text.plain_ms + gained * plainly_ms
            plain_ms += gained * plainly_ms / len(running)
        ms += took_ms
        running = [text for text in running if text.at < cell.tokens]
    return Replayed(ms, sum(text.at for text in every), plain_ms, max(text.ms / text.plain_ms for text in every))


def _fixed(name: str, text: Text) -> str:
    """A fixed tree that is looked up is plain decoding without a match."""
    return "plain" if name in LOOKED_UP and not text.truth.match[text.at] else name


def cells(
    drafts: Iterable[str] = ("neural", "lookup", "both"),
    texts: Iterable[int] = (1, 2, 8),
    tokens: Iterable[int] = (48, 128, 400),
    timed: Iterable[str] = ("tuned", "guessed", "wrong"),
) -> list[Cell]:
    """All of them, or those of some sizes."""
    every = product(drafts, (True, False), texts, tokens, timed, (False, True))
    return [cell for cell in map(Cell._make, every) if not cell.planned or cell.drafts != "lookup"]


def compared(cell: Cell, seed: int = 0) -> tuple[float, float, float]:
    """The speed of `Adaptive` over plain decoding, and over the fixed gear that is best in hindsight; the slowest text
    over plain decoding."""
    mine = replay(cell, seed=seed)
    best = max(replay(cell, fixed, seed=seed).speed for fixed in ("plain", *cell.trees))
    return mine.speed, mine.speed / best, mine.worst


def main(report: Callable[[str], None] = print) -> None:
    """A line for each cell, and the geometric means."""
    found = {cell: compared(cell) for cell in cells()}
    for cell, (speed, over_best, worst) in found.items():
        report(f"{' '.join(map(str, cell)):40} {speed:.3f} of best {over_best:.3f} slowest text {1 / worst:.3f}")
    speeds, ratios = (np.array([each[place] for each in found.values()]) for place in (0, 1))
    report(f"{len(found)} cells: {np.exp(np.log(speeds).mean()):.4f} of best {np.exp(np.log(ratios).mean()):.4f}, "
           f"least {ratios.min():.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
