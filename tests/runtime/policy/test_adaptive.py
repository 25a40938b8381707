"""The rule: its promise, its way back from plain decoding, its patience, and where it looks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.planned import LengthWeights, Planning, Prior, StepTime, TextClass
from draftwood.runtime.policy import Adaptive, Gears, Outcome
from draftwood.runtime.policy.adaptive import DWELL, LONGEST_WAIT, TRY, UPPER
from draftwood.runtime.policy.bank import EXTRA, HOPED, LEAST_CREDIT, LEAST_SHARE, MOST_CREDIT, credit
from draftwood.runtime.policy.fixed import Planned
from draftwood.runtime.policy.times import AGED, BELIEVED, Paces, time_table
from draftwood.trees import Topology

from .samples import chains, draw, gear, gears_of, played

US = {"plain": 1000.0, "chain-1": 1200.0, "chain-3": 1400.0, "chain-6": 1900.0}
TREES = chains(1, 3, 6)
# Of an answer that may be long, so that it is lent the most.
TOKENS = 1000
GOOD, BAD = ([0.9],) * 6, ([0.02],) * 6


def adaptive(us: dict[str, float] | None = US, greedy: bool = True, **options: object) -> tuple[Adaptive, Gears]:
    gears = gears_of(TREES, us, **options)
    return Adaptive(gears, gears.greedy if greedy else gears.sampled, TOKENS), gears


def broken(outcomes: list[Outcome], us: dict[str, float], plain: float = US["plain"]) -> float:
    """The most by which the promise was ever broken, in plain steps; negative where it held throughout."""
    spent = np.cumsum([us[one.gear.name] for one in outcomes])
    tokens = np.cumsum([one.gained for one in outcomes])
    return float((spent / plain - (1 + EXTRA) * tokens).max()) - MOST_CREDIT


def test_the_promise_holds_though_no_draft_is_ever_accepted() -> None:
    policy, gears = adaptive()
    outcomes = [played(policy, gears, (), US) for _ in range(3000)]
    assert any(one.gear.name != "plain" for one in outcomes)
    assert broken(outcomes, US) <= 0


@given(st.lists(st.integers(0, 6), min_size=1, max_size=150), st.booleans(), st.booleans())
def test_the_promise_holds_against_whoever_sees_the_choice(bait: list[int], tuned: bool, greedy: bool) -> None:
    """Accepts what makes the policy bold, then nothing."""
    policy, gears = adaptive(US if tuned else None, greedy)
    outcomes = [played(policy, gears, (0,) * accepted, US) for accepted in bait]
    outcomes += [played(policy, gears, (), US) for _ in range(200)]
    # Without a table a gear's first two steps may take more than was guessed.
    unknown = 0 if tuned else sum(2 * max(0.0, us / US["plain"] - UPPER) for us in US.values())
    assert broken(outcomes, US) <= unknown


def test_a_table_that_is_wrong_breaks_the_promise_by_no_more_than_its_error() -> None:
    policy, gears = adaptive({name: us * (1.0 if name == "plain" else 0.8) for name, us in US.items()})
    outcomes = [played(policy, gears, (), US) for _ in range(2000)]
    assert broken(outcomes, US) <= 0.25 * max(US.values()) / US["plain"]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [30, 500])
def test_a_text_that_turns_good_is_drafted_again_in_time(bad: int, greedy: bool) -> None:
    policy, gears = adaptive(greedy=greedy)
    for _ in range(bad):
        played(policy, gears, (), US)
    dearest = max(US[name] / US["plain"] - 1 for name in TREES)
    bound = int(dearest / TRY)  # the price of a try that gains nothing, over what may be spent on tries
    assert policy.wait <= bound <= LONGEST_WAIT
    names = [played(policy, gears, (0,) * 6, US).gear.name for _ in range(policy.wait + 30)]
    assert set(names[-15:]) == {"chain-6"}
    names = [played(policy, gears, (), US).gear.name for _ in range(400)]
    first = names.index("plain")
    lost = sum(US[name] / US["plain"] - 1 for name in names[first:])
    assert first < 20 and 0 < lost < 1.25 * TRY * len(names[first:])


def test_trying_costs_what_it_may() -> None:
    policy, gears = adaptive()
    outcomes = [played(policy, gears, (), US) for _ in range(4000)][400:]
    spent = sum(US[one.gear.name] for one in outcomes) / (US["plain"] * len(outcomes))
    assert 1 < spent < 1 + 3 * TRY  # a try is now and then two steps, since beliefs have relaxed


@pytest.mark.parametrize("level", [0.02, 0.3, 0.6, 0.8, 0.95])
def test_the_gear_that_is_best_in_hindsight_is_nearly_reached(level: float) -> None:
    random, paths = np.random.default_rng(5), []
    paths = [draw(random, ([level],) * 6) for _ in range(2000)]
    policy, gears = adaptive()
    outcomes = [played(policy, gears, path, US) for path in paths]
    speed = sum(one.gained for one in outcomes) / sum(US[one.gear.name] for one in outcomes)
    single = [np.mean([min(len(p), d) + 1 for p in paths]) / US[f"chain-{d}"] for d in (1, 3, 6)]
    assert speed > 0.95 * max(*single, 1 / US["plain"])


def test_equal_gears_do_not_take_turns() -> None:
    us = {"plain": 1000.0, "chain-2": 1250.0, "chain-3": 1250.0 * (1 + 0.7 + 0.49 + 0.343) / (1 + 0.7 + 0.49)}
    gears = gears_of(chains(2, 3), us)
    policy, random = Adaptive(gears, gears.greedy, TOKENS), np.random.default_rng(1)
    outcomes = []
    for _ in range(2000):
        noisy = {name: value * random.normal(1, 0.03) for name, value in us.items()}
        outcomes.append(played(policy, gears, draw(random, ([0.7],) * 3), noisy))
    names = [one.gear.name for one in outcomes]
    moves = sum(one != other for one, other in pairwise(names))
    assert moves < 2 * len(names) / 100


def test_the_best_of_a_staircase_is_found_behind_its_hump() -> None:
    """One level more costs more than it gains, until the rows are free again."""
    us = {"plain": 1000.0, "chain-1": 1300.0, "chain-3": 2600.0, "chain-6": 2650.0}
    policy, gears = adaptive(us)
    random = np.random.default_rng(2)
    names = [played(policy, gears, draw(random, GOOD), us).gear.name for _ in range(100)]
    assert set(names[-50:]) == {"chain-6"}


def test_texts_do_not_know_of_each_other() -> None:
    gears = gears_of(TREES, US)

    def names(policies: list[Adaptive], which: int) -> list[str]:
        random, found = np.random.default_rng(3), []
        for _ in range(200):
            good, bad = draw(random, GOOD), draw(random, BAD)
            for i, policy in enumerate(policies):
                outcome = played(policy, gears, (good, bad)[i], US)
                found += [outcome.gear.name] if i == which else []
        return found

    alone = names([Adaptive(gears, gears.greedy, TOKENS)], 0)
    assert names([Adaptive(gears, gears.greedy, TOKENS), Adaptive(gears, gears.greedy, TOKENS)], 0) == alone
    assert names([Adaptive(gears, gears.greedy, TOKENS), Adaptive(gears, gears.greedy, TOKENS)], 1) != alone


def test_asking_twice_changes_nothing() -> None:
    (asked, gears), (policy, _) = adaptive(), adaptive()
    random = np.random.default_rng(4)
    for step in range(300):
        path = draw(random, GOOD if step % 100 < 40 else BAD)
        assert asked.choose(100) is asked.choose(100)
        assert played(asked, gears, path, US).gear.name == played(policy, gears, path, US).gear.name


def test_a_walk_that_was_cut_short_teaches_nothing() -> None:
    policy, _ = adaptive()
    before = policy.estimate.tokens()
    policy.observe(Outcome(gear("chain-6"), 100, (), 1, cut=True, verify_us=1900.0))
    assert policy.estimate.tokens() == before


def test_lengths_decide_what_fits_and_a_text_never_shrinks() -> None:
    gears = [gear(f"{n}-{s}", s, d) for s in (128, 256) for n, d in (("plain", None), ("tree", "draft"))]
    tree = (Topology.chain(3),)
    times = [StepTime(gear=one.name, length=10, us=1000.0 if one.draft is None else 1100.0) for one in gears]
    known = Gears(gears, [1, 4, 1, 4], [None, tree, None, tree], times=times)
    policy, chosen = Adaptive(known, known.greedy, TOKENS), []
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

    def waits(late_us: float) -> int:
        policy, _ = adaptive(catches_up=True)
        late = 0
        for _ in range(1200):
            chosen = policy.choose(100, late)
            assert chosen is not None
            us = US[chosen.name] + (late_us * late if chosen.draft else 0.0)
            policy.observe(Outcome(chosen, 100, (), 1, verify_us=us, late=late))
            late = 0 if chosen.draft else late + 1
        return policy.wait

    assert DWELL < waits(0.0) < waits(4.0) <= LONGEST_WAIT


def test_a_prompt_that_is_dear_to_catch_up_with_is_not_drafted_from() -> None:
    """Much is hoped of the text, but the first draft would take more than the bank lends."""

    def begins(late_us: float) -> bool:
        late = StepTime(gear="chain-3", length=100, us=US["chain-3"] + 100 * late_us, late=100)
        gears = gears_of(TREES, catches_up=True)
        times = [StepTime(gear=name, length=100, us=us) for name, us in US.items()]
        gears.times = time_table([gear.name for gear in gears.gears], gears.rows, [*times, late])
        chosen = Adaptive(gears, gears.greedy, TOKENS).choose(100, late=100)
        return chosen is not None and chosen.draft is not None

    assert begins(0.0) and begins(5.0) and begins(50.0) and not begins(5000.0)


def test_the_credit_grows_with_the_tokens_that_a_text_can_have_and_with_what_is_hoped_for() -> None:
    for hope in (HOPED, 2.0):
        assert credit(1, hope) == credit(16, hope) == LEAST_CREDIT
        assert credit(100, hope) == credit(10_000, hope) == MOST_CREDIT
        assert LEAST_CREDIT < credit(32, hope) < credit(64, hope) < MOST_CREDIT
    assert credit(100, 0.7) == credit(100, 1.0) == LEAST_SHARE * MOST_CREDIT
    assert credit(100, 1.0) < credit(100, 1.05) < credit(100, HOPED)


def test_a_prompt_is_lent_where_it_is_soon_won_back() -> None:
    assert credit(100, 2.0, late=10.0) == MOST_CREDIT + 10.0
    assert credit(100, 2.0, late=10.1) == credit(100, 2.0)
    assert credit(100, 0.7, late=0.1) == credit(100, 0.7)


def test_a_text_is_lent_by_the_room_behind_its_prompt() -> None:
    gears = gears_of(TREES, US)
    policies = [Adaptive(gears, gears.greedy, TOKENS) for _ in range(2)]
    longest = max(gear.slots for gear in gears.gears)
    for policy, length in zip(policies, (100, longest - 40), strict=True):
        policy.choose(length)
    wide, narrow = (policy.bank.credit for policy in policies)
    assert narrow < wide == MOST_CREDIT


@pytest.mark.parametrize("tokens", [16, 64, 200])
def test_a_short_text_is_lent_less(tokens: int) -> None:
    """Nothing is accepted after a bait: what the text loses in all stays below its credit and the interest."""
    gears = gears_of(TREES, US)
    policy, outcomes = Adaptive(gears, gears.greedy, tokens), list[Outcome]()
    while sum(one.gained for one in outcomes) < tokens:
        outcomes.append(played(policy, gears, (0,) * 6 if len(outcomes) < 2 else (), US))
    spent, gained = sum(US[one.gear.name] for one in outcomes), sum(one.gained for one in outcomes)
    assert spent / US["plain"] <= (1 + EXTRA) * gained + credit(tokens, HOPED)


def test_a_machine_that_is_slower_than_its_table_is_known_to_the_next_text() -> None:
    """Its first draft would otherwise be held against drafting, for of plain decoding a text has seen nothing yet."""
    slow, gears = {name: 1.45 * us for name, us in US.items()}, gears_of(TREES, US)
    paces, found = Paces(len(gears.gears)), []
    for _ in range(3):
        policy = Adaptive(gears, gears.greedy, TOKENS, paces)
        found.append([played(policy, gears, (0,), slow).gear.name for _ in range(60)].count("plain"))
    assert found[0] > 0 and found[1] == found[2] == 0


def texts_of(gears: Gears, paces: Paces, level: float, us: dict[str, float], count: int) -> list[Outcome]:
    """Steps of texts one after the other, each of 60 tokens, whose best candidates are right at ``level``."""
    random, found = np.random.default_rng(3), list[Outcome]()
    for _ in range(count):
        policy, tokens = Adaptive(gears, gears.greedy, 60, paces), 0
        while tokens < 60:
            found.append(played(policy, gears, draw(random, ([level],) * 6), us))
            tokens += found[-1].gained
    return found


def speed_of(outcomes: list[Outcome], us: dict[str, float]) -> float:
    return us["plain"] * sum(one.gained for one in outcomes) / sum(us[one.gear.name] for one in outcomes)


def test_plain_decoding_that_has_become_faster_is_noticed() -> None:
    """All drafts take what the table says and seem to pay; plain decoding, which would show it, is never needed."""
    gears = gears_of(chains(1), US)
    now = US | {"plain": 0.75 * US["plain"]}
    paces = Paces(len(gears.gears))
    assert speed_of(texts_of(gears, paces, 0.5, now, 12), now) > 0.97
    # What a drafted text alone would have reached.
    assert 1.5 * now["plain"] / now["chain-1"] < 0.95


def test_checks_are_rare_and_none_are_made_where_much_is_won() -> None:
    def plain_steps(us: dict[str, float]) -> tuple[int, int]:
        """Of a text of which every draft is accepted: in its beginning, and from then on."""
        gears = gears_of(chains(1), us)
        policy = Adaptive(gears, gears.greedy, TOKENS, Paces(len(gears.gears)))
        names = [played(policy, gears, (0,), us).gear.name for _ in range(6 * AGED)]
        return names[:AGED].count("plain"), names[AGED:].count("plain")

    assert plain_steps({"plain": 1000.0, "chain-1": 1600.0})[1] == 5 * BELIEVED
    assert plain_steps(US) == (BELIEVED, 0), "at first it is not known that much is won"


def test_a_text_of_little_hope_begins_plainly() -> None:
    """No gear is tried before its price is earned where even the plan's counts say that it is slower."""
    slow = {name: us * (1.0 if name == "plain" else 4.0) for name, us in US.items()}
    policy, gears = adaptive(slow, greedy=False)
    assert [played(policy, gears, (), slow).gear.name for _ in range(20)] == ["plain"] * 20


@pytest.mark.parametrize("kind", [Adaptive, Planned])
def test_a_length_at_which_drafts_were_not_worth_it_is_believed(kind: type[Adaptive] | type[Planned]) -> None:
    counted = Prior(
        paths=((0,), (0, 0), (0, 0, 0)),
        confidence=(1.0,),
        classes=tuple(TextClass(weight=0.5, hazards=((q, q, q),)) for q in (0.1, 0.9)),
        lengths=(LengthWeights(tokens=0, weights=(0.1, 0.9)), LengthWeights(tokens=1024, weights=(0.9, 0.1))),
    )
    planning = Planning(bounds=(), greedy=counted, sampled=None, times=())
    gears = gears_of(chains(3), US, planning=planning)

    def first(length: int) -> str:
        policy = Adaptive(gears, gears.greedy, TOKENS) if kind is Adaptive else Planned(gears, gears.greedy)
        chosen = policy.choose(length)
        assert chosen is not None
        expected = policy.expected(gears.gears[1], length)
        share = 0.9 if length < 1024 else 0.1
        assert expected.tokens == pytest.approx(1 + share * 2.439 + (1 - share) * 0.111, rel=0.03)
        return chosen.name

    assert [first(length) for length in (100, 1023, 1024, 4000)] == ["chain-3", "chain-3", "plain", "plain"]


def test_a_text_keeps_the_beliefs_that_it_began_with() -> None:
    weights = [LengthWeights(tokens=0, weights=(0.1, 0.9)), LengthWeights(tokens=200, weights=(0.9, 0.1))]
    classes = tuple(TextClass(weight=0.5, hazards=((q,),)) for q in (0.1, 0.9))
    counted = Prior(paths=((0,),), confidence=(1.0,), classes=classes, lengths=tuple(weights))
    gears = gears_of(chains(1), US, planning=Planning(bounds=(), greedy=counted, sampled=None, times=()))
    policy = Adaptive(gears, gears.greedy, TOKENS)
    for step in range(4):
        played(policy, gears, (0,), US, length=198 + 2 * step)
    assert policy.estimate.weights[1] > 0.95


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
