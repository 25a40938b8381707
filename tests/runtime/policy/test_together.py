"""Steps of several texts: the promises hold for each of them and for all, and what drafts gain is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.planned import StepTime
from draftwood.runtime.policy import Adaptive, Asking, Gears, Learned, Outcome, gears_for
from draftwood.runtime.policy.bank import CREDIT, EXTRA, SHARED_EXTRA, TOKENS_A_CREDIT
from draftwood.runtime.policy.learned import Cost, Step

from .samples import chains, draw, gear, inside

TREES = chains(1, 3, 6)
NAMES = ("plain", *TREES)
MOST = 8
# Microseconds of a launch of so many texts: the more of them, the dearer a row.
US = {
    n: {"plain": 1000.0 + 60 * n, **{f"chain-{d}": 1100.0 + 60 * n + 40.0 * n * d for d in (1, 3, 6)}}
    for n in (1, 2, 4, 8)
}
TOKENS = 400


def shared_gears(us: dict[int, dict[str, float]] | None = US, graphs: bool = False) -> Gears:
    """All trees are drafted by one graph, or each by one of its own."""
    times = [StepTime(gear=g, length=100, us=t, texts=n) for n, own in (us or {}).items() for g, t in own.items()]
    every = [gear("plain", draft=None), *(gear(name, draft=name if graphs else "draft") for name in TREES)]
    rows = [1, *(tree.rows for tree in TREES.values())]
    return Gears(every, rows, [None, *((tree,) for tree in TREES.values())], times=times)


def launch_us(names: Sequence[str]) -> float:
    """Of a launch: every text's part of one in which all take its gear."""
    own = US[min(n for n in US if n >= len(names))]
    return sum(own[name] for name in names) / len(names)


def mixed_us(names: Sequence[str]) -> float:
    """Of a launch where every tree has a draft graph of its own: each takes half of its time for however few texts."""
    fixed = {name: 500 + 40 * US[1][name] / 100 for name in names if name != "plain"}
    return launch_us(names) + sum(us * (1 - names.count(name) / len(names)) for name, us in fixed.items())


@dataclass(eq=False)
class Text:
    """A text that is played: what the teacher takes of a draft, and what it has come to."""

    policy: Adaptive
    path: Callable[[], tuple[int, ...]]
    tokens: int = 0
    # Of its steps, and what plain batches of the same texts would have taken for its tokens.
    us: float = 0.0
    plain_us: float = 0.0
    names: list[str] = field(default_factory=list)


def step(texts: Sequence[Text], launch_us: Callable[[Sequence[str]], float] = launch_us) -> tuple[float, float]:
    """One step of all: what it took, and what a plain batch of them would have taken for each token of theirs."""
    gears = gears_for([Asking(text.policy, 100) for text in texts])
    names = [one.name for one in gears]
    took_us, plain_us = launch_us(names), launch_us(["plain"] * len(texts))
    gained = 0
    for text, chosen in zip(texts, gears, strict=True):
        path = inside(TREES[chosen.name], text.path()) if chosen.draft else ()
        text.policy.observe(Outcome(chosen, 100, path, len(path) + 1, verify_us=took_us, texts=len(texts)))
        text.tokens, text.us = text.tokens + len(path) + 1, text.us + took_us
        text.plain_us += (len(path) + 1) * plain_us
        text.names.append(chosen.name)
        gained += len(path) + 1
    return took_us, gained * plain_us / len(texts)


def texts_of(gears: Gears, learned: Learned, levels: Sequence[float], tokens: int = TOKENS) -> list[Text]:
    """Texts whose candidates are right so often."""

    def path(level: float, seed: int) -> Callable[[], tuple[int, ...]]:
        random = np.random.default_rng(seed)
        return lambda: draw(random, ([level],) * 6)

    return [Text(Adaptive(gears, learned, True, tokens), path(level, n)) for n, level in enumerate(levels)]


def kept(text: Text, most_plain_us: float) -> bool:
    """The promise to one text."""
    credit = min(CREDIT, TOKENS / TOKENS_A_CREDIT)
    return text.us <= (1 + SHARED_EXTRA) * text.plain_us + (SHARED_EXTRA + credit) * most_plain_us


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_promises_hold_though_no_draft_is_ever_accepted(count: int) -> None:
    gears = shared_gears()
    learned = Learned(gears)
    texts, took, plain, most = texts_of(gears, learned, [0.0] * count), 0.0, 0.0, launch_us(["plain"] * count)
    for _ in range(1500):
        one, other = step(texts)
        took, plain = took + one, plain + other
        assert took <= (1 + EXTRA) * plain + (EXTRA + CREDIT / count) * most
        assert all(kept(text, most) for text in texts)
    assert any(name != "plain" for text in texts for name in text.names)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=8, max_size=8), min_size=1, max_size=30),
    st.lists(st.integers(2, 8), min_size=1, max_size=30),
)
def test_the_promises_hold_against_whoever_sees_the_choice(bait: list[list[int]], occupancy: list[int]) -> None:
    """Accepts what makes the policies bold, then nothing of half of the texts; texts come and go all the while."""
    gears = shared_gears()
    learned, accepted = Learned(gears), [0] * MOST

    def path(number: int) -> Callable[[], tuple[int, ...]]:
        return lambda: (0,) * accepted[number]

    texts = [Text(Adaptive(gears, learned, True, TOKENS), path(number)) for number in range(MOST)]
    took = plain = 0.0
    most = launch_us(["plain"] * MOST)
    credit = CREDIT * max(launch_us(["plain"] * count) / count for count in set(occupancy))
    for at, row in enumerate([*bait, *[[0, 6] * 4] * 40]):
        accepted[:] = row
        one, other = step(texts[: occupancy[at % len(occupancy)]])
        took, plain = took + one, plain + other
        assert took <= (1 + EXTRA) * plain + EXTRA * most + credit
    assert all(kept(text, most) for text in texts)


def goodput(texts: Sequence[Text], steps: int = 400) -> float:
    """Tokens a microsecond over those of plain batches, when the policies have learned."""
    for _ in range(100):
        step(texts)
    pairs = [step(texts) for _ in range(steps)]
    return sum(plain for _, plain in pairs) / sum(took for took, _ in pairs)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.9])
def test_goodput_is_nearly_that_of_the_best_gear(count: int, level: float) -> None:
    gears = shared_gears()
    plain = launch_us(["plain"] * count)
    chains_only = [sum(level**k for k in range(d + 1)) * plain / launch_us([f"chain-{d}"] * count) for d in (1, 3, 6)]
    found = goodput(texts_of(gears, Learned(gears), [level] * count))
    assert found > 0.95 * max(1.0, *chains_only)


def test_those_that_draft_well_do_so_beside_those_that_do_not() -> None:
    """As long as the slow ones have credit, that gains more than any one gear for all."""
    gears = shared_gears()
    learned = Learned(gears)
    for _ in range(5):
        texts = texts_of(gears, learned, [0.9, 0.05] * 4)
        pairs = [step(texts) for _ in range(25)][12:]
    found = sum(plain for _, plain in pairs) / sum(took for took, _ in pairs)
    every = [(sum(0.9**k + 0.05**k for k in range(d + 1)) / 2, launch_us([f"chain-{d}"] * 8)) for d in (1, 3, 6)]
    assert found > max(1.0, *(tokens * launch_us(["plain"] * 8) / us for tokens, us in every))
    drafts = [sum(name != "plain" for name in text.names[12:]) for text in texts]
    assert min(drafts[::2]) > 2 * max(drafts[1::2])


def test_a_text_without_credit_ends_the_drafts_of_others() -> None:
    """What it pays is 3 % from then on, though the others would gain."""
    gears = shared_gears()
    texts = texts_of(gears, Learned(gears), [0.9, 0.0] * 2)
    for _ in range(300):
        step(texts)
    before = [(text.us, text.plain_us) for text in texts]
    for _ in range(300):
        step(texts)
    spent = [(text.us - us) / (text.plain_us - plain) for text, (us, plain) in zip(texts, before, strict=True)]
    assert max(spent) <= 1 + 2 * SHARED_EXTRA and min(spent[::2]) < 0.8


@pytest.mark.parametrize("levels", [[0.5] * 8, [0.8, 0.3] * 4, [0.0, 0.2, 0.5, 0.9] * 2])
def test_a_graph_for_few_of_the_texts_is_paid_for(levels: list[float]) -> None:
    """Texts that draft with different graphs make a step longer than their parts: the promise holds all the same, and
    no gear is thought slower for it."""
    gears = shared_gears(graphs=True)
    learned = Learned(gears)
    took = plain = 0.0
    for _ in range(12):
        texts = texts_of(gears, learned, levels)
        for _ in range(60):
            one, other = step(texts, mixed_us)
            took, plain = took + one, plain + other
    assert took <= (1 + EXTRA) * plain + (EXTRA + CREDIT / 8) * launch_us(["plain"] * 8)
    times = learned.times(8)
    assert all(times.us(g, 100) == pytest.approx(US[8][name], rel=0.02) for g, name in enumerate(NAMES))


def test_a_late_draft_of_a_mixed_launch_pays_for_its_tokens_alone() -> None:
    """What the launch takes for being mixed is no price of late tokens, which would keep texts from drafting again."""
    learned = Learned(shared_gears(graphs=True))
    costs, plain, late = [Cost(0, 100), Cost(1, 100)], [Cost(0, 100)] * 2, 200
    own_us = Step(learned, costs, plain).us
    Step(learned, costs, plain, late, mixed_us=5000.0).ended(own_us + 5000.0 + 10.0 * late)
    fresh = Learned(shared_gears(graphs=True))
    fresh.times(1).caught_up(late, 10.0 * late)
    assert learned.catch_up_us(1) == pytest.approx(fresh.catch_up_us(1))


def test_what_nobody_has_timed_is_seen_first() -> None:
    """Without a table: plain batches of every number of texts, then drafts."""
    gears = shared_gears(None)
    learned = Learned(gears)
    texts = texts_of(gears, learned, [0.95] * 4)
    for count in (4, 2, 3):
        for text in texts:
            text.names.clear()
        for _ in range(40):
            step(texts[:count])
        assert all(text.names[:3] == ["plain"] * 3 and "plain" not in text.names[-20:] for text in texts[:count])


def test_a_text_with_a_policy_of_its_own_takes_its_own_gear() -> None:
    gears = shared_gears()

    class Always:
        def choose(self, length: int, late: int = 0, match: int = 0):  # type: ignore[no-untyped-def]
            return gears.gears[2]

    (first, *others), learned = texts_of(gears, Learned(gears), [0.9] * 3), Learned(gears)
    (stranger,) = texts_of(gears, learned, [0.9])
    asking = [
        Asking(first.policy, 100),
        Asking(Always(), 100),
        *(Asking(one.policy, 100) for one in (stranger, *others)),
    ]  # type: ignore[arg-type]
    assert len(gears_for(asking)) == 5 and gears_for(asking)[1].name == "chain-3"
    assert gears_for(asking[1:2]) == [gears.gears[2]]
