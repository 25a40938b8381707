"""The rule: its promise, its way back from plain decoding, its patience, and its checks."""

from collections.abc import Callable
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.planned import LOOKUP, Gear, LengthEase, Planning, Prior, StepTime
from draftwood.runtime.policy import Adaptive, Gears, Learned
from draftwood.runtime.policy.bank import CREDIT, EXTRA, TEXT_EXTRA, TOKENS_A_CREDIT
from draftwood.runtime.policy.gains import Drafted, Ease
from draftwood.runtime.policy.times import AGED
from draftwood.runtime.speculation.step import Outcome
from draftwood.trees import Topology

from .samples import PLAIN_TREE, chains, drafted, draw, gear, gears_of, played

US = {"plain": 1000.0, "chain-1": 1200.0, "chain-3": 1400.0, "chain-6": 1900.0}
TREES = chains(1, 3, 6)
TOKENS = 1000
GOOD, BAD = ([0.9],) * 6, ([0.02],) * 6


def adaptive(us: dict[str, float] | None = US, greedy: bool = True, **options: object) -> tuple[Adaptive, Gears]:
    """The first text of a bundle."""
    gears = gears_of(TREES, us, **options)
    return Adaptive(Learned(gears), greedy, TOKENS), gears


def broken(outcomes: list[Outcome], us: dict[str, float]) -> float:
    """The most by which the promise was ever broken, in plain steps; negative if it held throughout."""
    spent = np.cumsum([us[one.gear.name] for one in outcomes])
    tokens = np.cumsum([one.gained for one in outcomes])
    return float((spent / us["plain"] - (1 + EXTRA) * tokens).max()) - CREDIT


def speed_of(outcomes: list[Outcome], us: dict[str, float]) -> float:
    return us["plain"] * sum(one.gained for one in outcomes) / sum(us[one.gear.name] for one in outcomes)


def text(
    gears: Gears, learned: Learned, us: dict[str, float], tokens: int, level: float | None = None, seed: int = 0
) -> list[Outcome]:
    """Steps of a text whose best candidates are right at ``level``, at None never."""
    policy, random, found = Adaptive(learned, True, tokens), np.random.default_rng(seed), list[Outcome]()
    while sum(one.gained for one in found) < tokens:
        found.append(played(policy, gears, draw(random, ([level],) * 6) if level else (), us))
    return found


def test_the_promise_holds_though_no_draft_is_ever_accepted() -> None:
    policy, gears = adaptive()
    outcomes = [played(policy, gears, (), US) for _ in range(3000)]
    assert any(one.gear.name != "plain" for one in outcomes)
    assert broken(outcomes, US) <= 0


@settings(max_examples=40)
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=150), st.booleans(), st.booleans())
def test_the_promise_holds_against_whoever_sees_the_choice(bait: list[int], tuned: bool, greedy: bool) -> None:
    """Accepts what makes the policy bold, then nothing; -1 begins another text."""
    gears = gears_of(TREES, US if tuned else None)
    learned = Learned(gears)
    texts: list[list[Outcome]] = []
    for accepted in [-1, *bait, *[-1, *[0] * 60] * 5]:
        if accepted < 0:
            policy = Adaptive(learned, greedy, TOKENS)
            texts.append([])
        else:
            texts[-1].append(played(policy, gears, (0,) * accepted, US))
    # Without a table a gear's first two steps may take more than was guessed.
    unknown = 0 if tuned else sum(2 * us / US["plain"] for us in US.values())
    assert broken([one for outcomes in texts for one in outcomes], US) <= unknown
    for outcomes in texts:
        gained = sum(one.gained for one in outcomes)
        spent = sum(US[one.gear.name] for one in outcomes) / US["plain"]
        assert spent <= (1 + TEXT_EXTRA) * gained + TEXT_EXTRA + CREDIT + unknown


def test_a_table_that_is_wrong_breaks_the_promise_by_no_more_than_its_error() -> None:
    policy, gears = adaptive({name: us * (1.0 if name == "plain" else 0.8) for name, us in US.items()})
    outcomes = [played(policy, gears, (), US) for _ in range(2000)]
    assert broken(outcomes, US) <= 2 * 0.25 * max(US.values()) / US["plain"]  # a first step is not yet believed


def test_no_text_loses_more_than_it_may_though_others_have_won() -> None:
    gears = gears_of(TREES, US)
    learned = Learned(gears)
    rich = text(gears, learned, US, 3000, level=0.95)
    assert speed_of(rich, US) > 2
    for tokens in (32, 64, 200):
        credit = min(CREDIT, tokens / TOKENS_A_CREDIT)
        assert speed_of(text(gears, learned, US, tokens), US) >= 1 / (1 + TEXT_EXTRA + credit / tokens)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [30, 500])
def test_a_text_that_turns_good_is_drafted_again_in_time(bad: int, greedy: bool) -> None:
    policy, gears = adaptive(greedy=greedy)
    for _ in range(bad):
        played(policy, gears, (), US)
    dearest = max(US[name] / US["plain"] - 1 for name in TREES)
    bound = 3 * int(dearest / EXTRA)  # the price of tries that gain nothing, over what may be spent on them
    names = [played(policy, gears, (0,) * 6, US).gear.name for _ in range(bound)]
    assert set(names[-15:]) == {"chain-6"}


def test_trying_costs_what_it_may() -> None:
    policy, gears = adaptive()
    outcomes = [played(policy, gears, (), US) for _ in range(4000)][400:]
    spent = sum(US[one.gear.name] for one in outcomes) / (US["plain"] * len(outcomes))
    assert 1 < spent < 1 + EXTRA


@pytest.mark.parametrize("level", [0.02, 0.3, 0.6, 0.8, 0.95])
def test_the_gear_that_is_best_in_hindsight_is_nearly_reached(level: float) -> None:
    random, paths = np.random.default_rng(5), []
    paths = [draw(random, ([level],) * 6) for _ in range(2000)]
    policy, gears = adaptive()
    outcomes = [played(policy, gears, path, US) for path in paths]
    speed = sum(one.gained for one in outcomes) / sum(US[one.gear.name] for one in outcomes)
    single = [np.mean([min(len(p), d) + 1 for p in paths]) / US[f"chain-{d}"] for d in (1, 3, 6)]
    assert speed > 0.95 * max(*single, 1 / US["plain"])


def test_the_best_of_a_staircase_is_found_behind_its_hump() -> None:
    """One level more costs more than it gains, until the rows are free again."""
    us = {"plain": 1000.0, "chain-1": 1300.0, "chain-3": 2600.0, "chain-6": 2650.0}
    policy, gears = adaptive(us)
    random = np.random.default_rng(2)
    names = [played(policy, gears, draw(random, GOOD), us).gear.name for _ in range(100)]
    assert set(names[-50:]) == {"chain-6"}


def test_what_earlier_texts_accepted_is_believed_of_the_next() -> None:
    """Of trees that were given by hand nothing else is known; in a bundle of bad texts the next begins plainly."""

    def first(level: float, after: int) -> str:
        gears = gears_of(TREES, US)
        learned = Learned(gears)
        for seed in range(after):
            text(gears, learned, US, 100, level, seed)
        chosen = Adaptive(learned, True, 100).choose(100)
        assert chosen is not None
        return chosen.name

    assert first(0.95, 5) == "chain-6" and first(0.05, 5) == "plain"


def test_one_text_that_is_hard_does_not_end_the_drafts_of_the_next() -> None:
    gears = gears_of(TREES, US)
    learned = Learned(gears)
    for seed in range(5):
        text(gears, learned, US, 100, 0.8, seed)
    text(gears, learned, US, 100, 0.02)
    assert "plain" not in {one.gear.name for one in text(gears, learned, US, 100, 0.8)[:5]}


def test_greedy_and_sampled_texts_are_counted_apart() -> None:
    gears = gears_of(TREES, US)
    learned = Learned(gears)
    before = Ease(learned.gains[False, False]).tokens("chain-6")
    text(gears, learned, US, 100, 0.05)
    assert Ease(learned.gains[False, False]).tokens("chain-6") == before


def test_texts_of_several_threads_share_one_account() -> None:
    gears = gears_of(TREES, US)
    learned, found = Learned(gears), list[Outcome]()
    threads = [Thread(target=lambda s=seed: found.extend(text(gears, learned, US, 300, 0.7, s))) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain_us = sum(one.gained for one in found) * US["plain"]
    saved_us = plain_us - sum(US[one.gear.name] for one in found)
    assert learned.bank.plain_us == pytest.approx(plain_us) and learned.bank.saved_us == pytest.approx(saved_us)


def test_asking_twice_changes_nothing() -> None:
    (asked, gears), (policy, _) = adaptive(), adaptive()
    random = np.random.default_rng(4)
    for step in range(300):
        path = draw(random, GOOD if step % 100 < 40 else BAD)
        assert asked.choose(100) is asked.choose(100)
        assert played(asked, gears, path, US).gear.name == played(policy, gears, path, US).gear.name


def test_lengths_decide_what_fits_and_a_text_never_shrinks() -> None:
    shapes = [(s, n, d) for s in (128, 256) for n, d in (("plain", None), ("tree", "draft"))]
    gears = [Gear(name=f"{n}-{s}", tree=n, slots=s, graph=n, draft=d) for s, n, d in shapes]
    times = [StepTime(gear=one.name, length=10, us=1000.0 if one.draft is None else 1100.0) for one in gears]
    known = Gears(gears, [PLAIN_TREE, drafted(Topology.chain(3), "tree")], times=times)
    policy, chosen = Adaptive(Learned(known), True, TOKENS), []
    for length in [*range(10, 256), 10]:
        now = policy.choose(length)
        chosen.append((length, now.name if now else None))
        if now:
            accepted = 0 if now.draft is None else 3
            policy.observe(Outcome(now, length, (0,) * accepted, accepted + 1, verify_us=1000.0))
    found = dict(chosen[:-1])
    assert found[123] == "tree-128" and found[124] == "tree-256" and found[251] == "tree-256"
    assert found[252] == found[254] == "plain-256" and found[255] is None
    assert chosen[-1] == (10, "tree-256")


def test_a_drafter_that_fell_behind_has_its_price() -> None:
    """Where catching up is dear, tries are rarer."""

    def drafts(late_us: float) -> int:
        policy, _ = adaptive()
        late = count = 0
        for _ in range(1200):
            chosen = policy.choose(100, late)
            assert chosen is not None
            us = US[chosen.name] + (late_us * late if chosen.draft else 0.0)
            policy.observe(Outcome(chosen, 100, (), 1, verify_us=us, late=late))
            late = 0 if chosen.draft else late + 1
            count += chosen.draft is not None
        return count

    assert drafts(0.0) > drafts(10.0) > 0


def test_a_prompt_that_is_dear_to_catch_up_with_is_not_drafted_from() -> None:
    """Much is hoped of the text, but the first draft would take more than the bank lends."""

    def begins(late_us: float) -> bool:
        late = StepTime(gear="chain-3", length=100, us=US["chain-3"] + 100 * late_us, late=100)
        gears = gears_of(TREES, US)
        gears.times += (late,)
        policy = Adaptive(Learned(gears), True, TOKENS)
        for _ in range(3):  # what plain decoding takes is seen first
            policy.learned.times(1).observe("plain", 100, US["plain"])
        chosen = policy.choose(100, late=100)
        return chosen is not None and chosen.draft is not None

    assert begins(0.0) and begins(5.0) and begins(50.0) and not begins(5000.0)


def test_a_machine_that_is_slower_than_its_table_is_known_to_the_next_text() -> None:
    slow, gears = {name: 1.45 * us for name, us in US.items()}, gears_of(TREES, US)
    learned = Learned(gears)
    found = [[one.gear.name for one in text(gears, learned, slow, 60, 0.7, seed)].count("plain") for seed in range(3)]
    assert found[0] > 0 and found[1] == found[2] == 0


def test_plain_decoding_that_has_become_faster_is_noticed() -> None:
    """All drafts take what the table says and seem to pay; plain decoding, which would show it, is never needed."""
    gears = gears_of(chains(1), US)
    now = US | {"plain": 0.75 * US["plain"]}
    learned = Learned(gears)
    text(gears, learned, US, 200, 0.5)
    assert speed_of([one for seed in range(12) for one in text(gears, learned, now, 60, 0.5, seed)], now) > 0.96
    # The reach of a drafted text alone.
    assert 1.5 * now["plain"] / now["chain-1"] < 0.95


def test_checks_are_rare_and_none_are_made_where_much_is_won() -> None:
    def plain_steps(us: dict[str, float]) -> tuple[int, int]:
        """Plain steps of a text whose every draft is accepted: in its beginning, and from then on."""
        gears = gears_of(chains(1), us)
        policy = Adaptive(Learned(gears), True, TOKENS)
        names = [played(policy, gears, (0,), us).gear.name for _ in range(6 * AGED)]
        return names[:AGED].count("plain"), names[AGED:].count("plain")

    assert 0 < plain_steps({"plain": 1000.0, "chain-1": 1600.0})[1] <= 5 * 3
    assert plain_steps({"plain": 1000.0, "chain-1": 1350.0}) == (3, 0), "at first it is not known that much is won"


def test_a_text_of_little_hope_begins_plainly() -> None:
    """No gear is tried before its price is earned where even the plan's counts say that it is slower."""
    slow = {name: us * (1.0 if name == "plain" else 4.0) for name, us in US.items()}
    policy, gears = adaptive(slow, greedy=False)
    assert [played(policy, gears, (), slow).gear.name for _ in range(20)] == ["plain"] * 20


def test_a_length_at_which_drafts_were_not_worth_it_is_believed() -> None:
    lengths = (LengthEase(tokens=0, ease=1.0), LengthEase(tokens=1024, ease=-2.0))
    counted = Prior(reached={"chain-3": (0.5, 0.25, 0.125)}, first=0.5, lengths=lengths)
    planning = Planning(greedy=counted, sampled=None, times=())
    gears = gears_of(chains(3), US, planning=planning)

    def first(length: int) -> tuple[str, float]:
        policy = Adaptive(Learned(gears), True, TOKENS)
        for _ in range(3):  # what plain decoding takes is seen first
            policy.learned.times(1).observe("plain", length, US["plain"])
        policy = Adaptive(policy.learned, True, TOKENS)
        chosen = policy.choose(length)
        assert chosen is not None
        return chosen.name, Ease(policy.learned.gains[True, False], length).tokens("chain-3")

    short, long = (sum((1 / (1 + np.exp(-ease))) ** level for level in range(4)) for ease in (1.0, -2.0))
    for length in (100, 1023):
        assert first(length) == ("chain-3", pytest.approx(short, rel=0.15))
    for length in (1024, 4000):
        assert first(length) == ("plain", pytest.approx(long, rel=0.15))


@pytest.mark.parametrize("tuned", [True, False])
def test_graphs_that_are_opened_in_a_text_do_not_end_its_drafts(tuned: bool) -> None:
    policy, gears = adaptive(US if tuned else None)
    ran: set[str] = set()
    names = []
    for _ in range(80):
        chosen = policy.choose(100)
        assert chosen is not None
        first = 1.0 if chosen.name in ran else 20.0
        ran.add(chosen.name)
        names.append(played(policy, gears, (0,) * 6, {name: first * us for name, us in US.items()}).gear.name)
    assert set(names[-40:]) == {"chain-6"}


def looked_up(depth: int) -> Drafted:
    return drafted(Topology.chain(depth), f"lookup-chain-{depth}", looked_up=True)


def matched(match: int, us: dict[str, float], gained: Callable[[Gear], int], steps: int = 60) -> list[str]:
    """Gears that a first text chooses after matches of a class, if a drafting one gains so many tokens."""
    every = [gear("plain", draft=None), gear("lookup-chain-3", draft=LOOKUP), gear("lookup-chain-7", draft=LOOKUP)]
    times = [StepTime(gear=name, length=100, us=value) for name, value in us.items()]
    gears = Gears(every, [PLAIN_TREE, looked_up(3), looked_up(7)], times=times)
    policy, names = Adaptive(Learned(gears), True, TOKENS), []
    for _ in range(steps):
        chosen = policy.choose(100, match=match)
        assert chosen is not None
        names.append(chosen.name)
        path = (0,) * (gained(chosen) - 1)
        policy.observe(Outcome(chosen, 100, path, len(path) + 1, verify_us=us[chosen.name], match=match))
    return names


LOOKING_US = {"plain": 1000.0, "lookup-chain-3": 1200.0, "lookup-chain-7": 1500.0}


def test_without_a_match_nothing_is_looked_up() -> None:
    assert set(matched(0, LOOKING_US, lambda _: 1)) == {"plain"}


def test_a_long_match_that_holds_takes_the_longest_tree() -> None:
    names = matched(5, LOOKING_US, lambda chosen: {"plain": 1, "lookup-chain-3": 4, "lookup-chain-7": 8}[chosen.name])
    assert set(names[-20:]) <= {"lookup-chain-7", "plain"}
    assert names[-20:].count("lookup-chain-7") > 15


def test_a_match_that_misleads_is_given_up() -> None:
    names = matched(5, LOOKING_US, lambda _: 1, 200)
    # A try costs a fifth of a plain step. The bank saves a fiftieth of each plain step, so one in ten is tried.
    assert names[-50:].count("plain") >= 44


def test_what_one_class_of_matches_shows_is_not_believed_of_another() -> None:
    every = [gear("plain", draft=None), gear("lookup-chain-3", draft=LOOKUP)]
    gears = Gears(every, [PLAIN_TREE, looked_up(3)])
    learned = Learned(gears)
    ease = Ease(learned.gains[True, False])
    tree, before = "lookup-chain-3", ease.tokens("lookup-chain-3", 5)
    for _ in range(50):
        ease.saw(tree, 2, ())
    assert ease.tokens(tree, 2) < 1.1
    eased = before - ease.tokens(tree, 5)  # a text's ease is shared, its counts are not
    assert 0 <= eased < 1.2 and ease.tokens(tree, 5) > ease.tokens(tree, 2) + 0.5
