"""Steps of several texts: the promises hold for each of them and for all, and the drafts' gain is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.planned import LOOKUP, Planning, Prior, StepTime
from draftwood.runtime.policy import Adaptive, Asking, Gears, Learned, gears_for
from draftwood.runtime.policy.bank import CREDIT, EXTRA, TEXT_EXTRA, TOKENS_A_CREDIT
from draftwood.runtime.speculation.step import Outcome

from .samples import PLAIN_TREE, chains, drafted, draw, gear, inside

TREES = chains(1, 3, 6)
NAMES = ("plain", *TREES)
MOST = 8
# Microseconds of a launch of some texts: the more of them, the dearer a row.
US = {
    n: {"plain": 1000.0 + 60 * n, **{f"chain-{d}": 1100.0 + 60 * n + 40.0 * n * d for d in (1, 3, 6)}}
    for n in (1, 2, 4, 8)
}
TOKENS = 400


# A plan whose counts promise nearly every draft.
PROMISING = Prior(
    reached={name: tuple(0.97**d for d in range(1, tree.depth + 1)) for name, tree in TREES.items()}, first=0.97
)


def shared_gears(
    us: dict[int, dict[str, float]] | None = US, graphs: bool = False, planning: Planning | None = None
) -> Gears:
    """All trees are drafted by one graph, or each by one of its own."""
    times = [StepTime(gear=g, length=100, us=t, texts=n) for n, own in (us or {}).items() for g, t in own.items()]
    every = [gear("plain", draft=None), *(gear(name, draft=name if graphs else "draft") for name in TREES)]
    return Gears(every, [PLAIN_TREE, *(drafted(tree, name) for name, tree in TREES.items())], planning, times)


def launch_us(names: Sequence[str]) -> float:
    """Times of a launch: every text's part of one in which all take its gear."""
    own = US[min(n for n in US if n >= len(names))]
    return sum(own[name] for name in names) / len(names)


@dataclass(eq=False)
class Text:
    """A simulated text: the tokens that the teacher takes of a draft, and its state."""

    policy: Adaptive
    path: Callable[[], tuple[int, ...]]
    tokens: int = 0
    # The time of its steps, and the time of plain batches of the same texts for its tokens.
    us: float = 0.0
    plain_us: float = 0.0
    names: list[str] = field(default_factory=list)


def step(texts: Sequence[Text], launch_us: Callable[[Sequence[str]], float] = launch_us) -> tuple[float, float]:
    """One step of all: its time, and a plain batch's time for each token of theirs."""
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

    return [Text(Adaptive(learned, True, tokens), path(level, n)) for n, level in enumerate(levels)]


def kept(text: Text, most_plain_us: float) -> bool:
    """The promise to one text."""
    credit = min(CREDIT, TOKENS / TOKENS_A_CREDIT)
    return text.us <= (1 + TEXT_EXTRA) * text.plain_us + (TEXT_EXTRA + credit) * most_plain_us


@pytest.mark.parametrize(
    "planning", [None, Planning(greedy=PROMISING, sampled=None, times=())], ids=["no plan", "a plan that is wrong"]
)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_promises_hold_though_no_draft_is_ever_accepted(count: int, planning: Planning | None) -> None:
    gears = shared_gears(planning=planning)
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

    texts = [Text(Adaptive(learned, True, TOKENS), path(number)) for number in range(MOST)]
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


def test_a_text_without_credit_ends_the_drafts_of_others() -> None:
    """It pays 3 % from then on, although the others would gain."""
    gears = shared_gears()
    texts = texts_of(gears, Learned(gears), [0.9, 0.0] * 2)
    for _ in range(300):
        step(texts)
    before = [(text.us, text.plain_us) for text in texts]
    for _ in range(300):
        step(texts)
    spent = [(text.us - us) / (text.plain_us - plain) for text, (us, plain) in zip(texts, before, strict=True)]
    assert max(spent) <= 1 + 2 * TEXT_EXTRA and min(spent[::2]) < 0.95


def test_all_texts_of_a_launch_draft_with_one_tree_or_none_does() -> None:
    """A launch with several draft graphs, or with one for few of the texts, takes longer than its parts."""
    gears = shared_gears(graphs=True)
    texts = texts_of(gears, Learned(gears), [0.0, 0.3, 0.6, 0.9] * 2)
    for _ in range(200):
        step(texts)
    launches = list(zip(*(text.names for text in texts), strict=True))
    assert all(len(set(names)) == 1 for names in launches) and len(set(launches)) > 1


def lookup_gears() -> Gears:
    every = [gear("plain", draft=None), gear("chain-3", draft=LOOKUP)]
    times = [StepTime(gear=one.name, length=100, us=US[2][one.name], texts=2) for one in every]
    return Gears(every, [PLAIN_TREE, drafted(TREES["chain-3"], "chain-3", looked_up=True)], times=times)


@pytest.mark.parametrize("padded", [False, True])
def test_a_text_without_a_match_decodes_plainly_next_to_one_that_looks_up(padded: bool) -> None:
    """Its rows are padded on an accelerator, so the launch takes the time of the tree for both."""
    gears = lookup_gears()
    learned = Learned(gears)
    one, other = Adaptive(learned, True, TOKENS), Adaptive(learned, True, TOKENS)
    chosen = gears_for([Asking(one, 100, match=5), Asking(other, 100)], padded)
    expected = [own.expected().us for own in (one, other)]
    assert [own.name for own in chosen] == ["chain-3", "plain"]
    mean_us = US[2]["chain-3"] if padded else (US[2]["chain-3"] + US[2]["plain"]) / 2
    assert expected == [pytest.approx(mean_us)] * 2


def test_a_drafters_launch_of_which_a_text_decodes_plainly_tells_nothing_of_its_gear() -> None:
    every = [gear("plain", draft=None), gear("chain-3", slots=112)]
    times = [StepTime(gear=own.name, length=100, us=US[2][own.name], texts=2) for own in every]
    gears = Gears(every, [PLAIN_TREE, drafted(TREES["chain-3"], "chain-3")], times=times)
    learned = Learned(gears)
    one, other = Adaptive(learned, True, TOKENS), Adaptive(learned, True, TOKENS)
    for _ in range(20):
        chosen = gears_for([Asking(one, 50), Asking(other, 110)])
        for own, length, own_gear in zip((one, other), (50, 110), chosen, strict=True):
            gained = 4 if own_gear.draft else 1
            us = US[2]["plain"] if chosen[0].draft is None else 1.3 * US[2]["chain-3"]
            own.observe(Outcome(own_gear, length, (0,) * (gained - 1), gained, verify_us=us, texts=2))
    assert chosen[0].draft and learned.times(2).us("chain-3", 100) == pytest.approx(US[2]["chain-3"])


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
