import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees import Topology, parse_specs
from draftwood.trees.calibration import Calibration
from draftwood.trees.plan import make_plan
from draftwood.trees.plan_file import Limits, format_plan, parse_plan
from draftwood.trees.spec import read_specs

from .samples import COUNTS, FIXED, HELDOUT, calibrated, gain, table

COSTS = table(
    {(rows, slots): 10 + rows * slots / 1024 for rows in (1, 4, 8, 16) for slots in (256, 512)},
    {(depth, 4): 0.1 * depth for depth in (1, 2, 4)},
)


def texts(seed=0, number=80, each=40):
    """Contexts of many texts, easy and hard ones."""
    random, calibration = np.random.default_rng(seed), Calibration()
    for text in range(number):
        for _ in range(each):
            ease = random.random()
            path = []
            while len(path) < 4 and (random.random() < 0.3 + 0.6 * ease):
                path.append(int(min(random.geometric(0.4 + 0.5 * ease) - 1, 3)))
            context = int(random.integers(0, 440))
            calibration.add(path, group=f"text {text}", context=context)
    return calibration


TEXTS = texts()


@settings(FIXED, max_examples=40)
@given(COUNTS.filter(any), st.integers(1, 8))
def test_trees_from_counted_contexts_equal_brute_force_and_baselines_never_win(counts, nodes):
    plan = make_plan(calibrated(counts), Limits(nodes=nodes))
    best = plan.trees[1]
    assert best.promise.counted.tokens == pytest.approx(float(gain(counts, best.topology.paths)), abs=1e-12)
    assert best.promise.counted.tokens == pytest.approx(plan.curve[nodes], abs=1e-12)
    assert plan.curve[0] == 1 and len(plan.curve) == nodes + 1 and plan.curve_heldout == ()
    assert all(one.promise.counted.tokens <= plan.curve[nodes] + 1e-12 for one in plan.baselines)


def test_without_a_latency_table_sizes_are_halved():
    plan = make_plan(TEXTS, Limits(nodes=31, gears=4))
    assert [tree.name for tree in plan.trees] == ["plain", "planned-32", "planned-16", "planned-8"]
    assert plan.gears == () and plan.planning.times == () and plan.cost is None
    assert [tree.name for tree in make_plan(TEXTS, Limits(nodes=31, gears=1)).trees] == ["plain"]


def test_every_tree_reaches_what_was_counted_of_it():
    plan = make_plan(TEXTS, Limits(nodes=31))
    for tree in plan.trees:
        reached = plan.planning.greedy.reached.get(tree.name, ())
        assert 1 + sum(reached) == pytest.approx(tree.promise.counted.tokens, abs=1e-5), tree.name


def test_heldout_figures_are_of_heldout_contexts_alone():
    calibration = calibrated({(0,): 8, (): 2})
    calibration.merge(calibrated({(0,): 1, (): 3}, HELDOUT))
    plan = make_plan(calibration, Limits(nodes=1))
    assert plan.trees[1].promise.counted.tokens == 1.8 and plan.trees[1].promise.heldout.tokens == 1.25
    assert plan.curve_heldout == (1.0, 1.25) and plan.contexts == {"counted": 10, "heldout": 4}
    assert plan.trees[1].counted_shares == (0.8,) and plan.trees[1].heldout_shares == (0.25,)


def test_gears_are_planned_for_the_least_time_per_token():
    plan = make_plan(TEXTS, Limits(nodes=15, gears=3), COSTS)
    cost = plan.cost
    assert cost.exact and cost.bound == cost.us_per_token < cost.plain_us_per_token
    plain, drafting = sorted_gears(plan)
    assert len(drafting) <= 2 and plan.gears == plain + drafting and plan.trees[0].topology == Topology.plain()
    assert [gear.slots for gear in plain] == sorted({gear.slots for gear in drafting} | {512})
    assert cost.us_per_token == pytest.approx(sum(one.share * one.us_per_token for one in cost.served))
    assert sum(one.share for one in cost.served) == pytest.approx(1)
    assert [one.slots for one in cost.served] == [256, 512]
    slots = {gear.name: gear.slots for gear in plan.gears}
    assert all(slots[gear] >= one.slots for one in cost.served for gear in one.gears)
    assert cost.heldout < cost.plain_heldout
    rivals = [one.us_per_token for one in plan.baselines if one.us_per_token is not None]
    free = make_plan(TEXTS, Limits(nodes=15, gears=9), COSTS).cost.us_per_token
    assert free <= min(rivals) + 1e-3 and free <= cost.us_per_token
    # Fewer gears are never faster.
    one_more = [make_plan(TEXTS, Limits(nodes=15, gears=n), COSTS).cost.us_per_token for n in (1, 2, 3)]
    assert one_more == sorted(one_more, reverse=True)


def test_step_times_are_of_the_texts_that_steps_were_timed_after():
    """A measured step reads its text alone, half as long as the KV length; a static graph reads all slots."""
    entries = [msgspec.structs.replace(entry, filled=entry.slots // 2) for entry in COSTS.entries]
    for kv_read, lengths in (("filled", {128, 256}), ("static", {256, 512})):
        costs = msgspec.structs.replace(COSTS, kv_read=kv_read, entries=tuple(entries))
        times = make_plan(TEXTS, Limits(nodes=15, gears=3), costs).planning.times
        assert {time.length for time in times if time.gear == "plain-kv512"} == lengths


def sorted_gears(plan):
    """Plain decoding, and what drafts."""
    plain = tuple(gear for gear in plan.gears if gear.tree == "plain")
    return plain, tuple(gear for gear in plan.gears if gear not in plain)


def test_where_speculation_costs_more_than_it_gains_only_plain_decoding_is_left():
    dear = table({(1, 512): 1.0, (4, 512): 30.0})
    plan = make_plan(TEXTS, Limits(nodes=3), dear)
    assert [gear.name for gear in plan.gears] == ["plain-kv512"]
    assert plan.cost.us_per_token == plan.cost.plain_us_per_token == 1e6


@pytest.mark.parametrize(
    ("calibration", "limits", "message"),
    [
        (Calibration(), Limits(nodes=3), "no contexts have been counted"),
        (calibrated({(0,): 4}, HELDOUT), Limits(nodes=3), "all 4 contexts are held out"),
        (calibrated({(): 4}), Limits(nodes=3), "in no counted context was the truth a candidate"),
        (calibrated({(0,): 4}), Limits(nodes=0), "1 or more nodes, got 0"),
        (calibrated({(0,): 4}), Limits(nodes=3, depth=-1), "1 or more depth, got -1"),
        (calibrated({(0,): 4}), Limits(nodes=3, gears=0), "1 or more gears"),
    ],
)
def test_refused_plans(calibration, limits, message):
    for costs in (None, COSTS):
        with pytest.raises(TreeError, match=f"^plan: .*{message}"):
            make_plan(calibration, limits, costs)


def test_the_file_is_json_and_gives_the_trees_back(tmp_path):
    plan = make_plan(TEXTS, Limits(nodes=15), COSTS)
    text = format_plan(plan)
    assert parse_plan(text, "plan") == plan and format_plan(parse_plan(text, "plan")) == text
    (tmp_path / "my.plan").write_text(text)
    specs = read_specs(f"plan:{tmp_path / 'my.plan'}")
    assert (specs.gears, specs.plan) == (plan.gears, plan.planning)
    without = make_plan(TEXTS, Limits(nodes=15))
    (tmp_path / "my.plan").write_text(format_plan(without))
    found = parse_specs(f"chain:2,plan:{tmp_path / 'my.plan'}")
    assert found[:2] == [("plain", Topology.plain()), ("chain-2", Topology.chain(2))]
    assert {tree for _, tree in found} == {tree.topology for tree in without.trees} | {Topology.chain(2)}
    largest, reached = without.trees[1], without.planning.greedy.reached
    (tmp_path / "mine.json").write_text(json.dumps(largest.paths))
    merged = read_specs(f"tree:{tmp_path / 'mine.json'},plan:{tmp_path / 'my.plan'}")
    assert [name for name, _ in merged.trees][:2] == ["plain", "mine"]
    assert merged.plan.greedy.reached == {{largest.name: "mine"}.get(name, name): of for name, of in reached.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "not draftwood.plan: Expected `object`, got `array`"),
        ('{"format": "draftwood.tree", "version": 5}', "expected an object with format 'draftwood.plan'"),
        (
            '{"format": "draftwood.plan", "version": 4}',
            "expected version 5 of draftwood.plan, got 4; make the file again",
        ),
        ('{"version": 5, "format": "draftwood.plan", "version": 4}', "the key 'version' occurs twice in one object"),
        ('{"format": "draftwood.plan", "version": 5}', "not draftwood.plan: .* missing required field"),
    ],
)
def test_refused_files(text, message):
    with pytest.raises(TreeError, match=f"^p: {message}"):
        parse_plan(text, "p")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("trees",), [], "expected one or more"),
        (("trees",), None, r"Expected `array`, got `null` - at `\$.trees`"),
        (("trees",), [3], r"Expected `object`, got `int` - at `\$.trees\[0\]`"),
        (("trees", 1, "paths"), [[0, 0]], "its parent"),
        (("trees", 1, "name"), 1, r"at `\$.trees\[1\].name`"),
        (("trees", 1, "name"), "plain", "a name of its own"),
        (("gears", 1, "tree"), "other", "expected a tree of this plan"),
        (("gears", 1, "slots"), 0, "`int` >= 1"),
        (("gears", 0, "slots"), 128, "plain decoding at each"),
        (("gears", 1, "name"), "other", "step times of the gears"),
        (("planning", "greedy"), None, r"at `\$.planning.greedy`"),
        (("planning", "times", 0, "us"), 0, "a time above 0, at most 1000 s"),
        (("planning", "greedy", "reached"), {"planned-4": [0.5]}, "1 shares of tree planned-4; expected 2, one a lev"),
        (("planning", "greedy", "reached"), {"other": [0.5]}, "shares of tree other; expected a tree of this plan"),
    ],
)
def test_refused_values_of_a_file(path, value, message):
    root = json.loads(format_plan(make_plan(TEXTS, Limits(nodes=3, gears=2), COSTS)))
    *way, last = path
    at = root
    for key in way:
        at = at[key]
    at[last] = value
    with pytest.raises(TreeError, match=rf"^p: .*{message}"):
        parse_plan(json.dumps(root), "p")


def test_trees_too_large_to_build_are_not_planned_and_refused_by_the_spec(tmp_path, monkeypatch):
    calibration = calibrated({(first, second): 1 for first in range(20) for second in range(20)})
    with pytest.raises(TreeError, match=r"^plan: expected at most 255 nodes"):
        make_plan(calibration, Limits(nodes=256, gears=2))
    (tmp_path / "p").write_text(format_plan(make_plan(calibration, Limits(nodes=255, gears=2))))
    assert max(tree.rows for _, tree in parse_specs(f"plan:{tmp_path / 'p'}")) == 256
    monkeypatch.setattr("draftwood.trees.spec.MAX_ROWS", 255)
    with pytest.raises(TreeError, match="at most 255 rows"):
        parse_specs(f"plan:{tmp_path / 'p'}")


def test_plans_are_the_same_whatever_the_order_of_the_lines():
    again = Calibration()
    for part in (texts(1, 20), TEXTS):
        again.merge(part)
    other = Calibration()
    for part in (TEXTS, texts(1, 20)):
        other.merge(part)
    limits = Limits(nodes=15)
    assert format_plan(make_plan(again, limits, COSTS)) == format_plan(make_plan(other, limits, COSTS))


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_text_of_which_all_is_held_out_gives_no_prior(kind: str) -> None:
    """It would say that no draft is ever accepted, where nothing was counted."""
    counted, heldout = calibrated({(0, 0): 4}), calibrated({(0, 0): 3}, HELDOUT)
    greedy, sampled = (heldout, counted) if kind == "greedy" else (counted, heldout)
    with pytest.raises(TreeError, match=f"all 3 contexts of {kind} text are held out; calibrate on more text"):
        make_plan(greedy, Limits(3), sampled=sampled)


@pytest.mark.parametrize("empty", ["greedy", "sampled"])
def test_text_of_which_nothing_was_counted_gives_no_prior(empty: str) -> None:
    """The plan is that of the other text alone."""
    counted = calibrated({(0, 0): 4, (1,): 2})
    parts = (Calibration(), counted) if empty == "greedy" else (counted, Calibration())
    assert make_plan(parts[0], Limits(3), sampled=parts[1]) == make_plan(counted, Limits(3))


@pytest.mark.parametrize("facts", [{}, {"context": 5}])
def test_no_context_fits_where_the_table_ends_before_the_tree(facts: dict[str, int]) -> None:
    counted = calibrated({(0, 0): 4}, **facts)
    with pytest.raises(TreeError, match="no context fits the latency table: it goes up to KV length 16"):
        make_plan(counted, Limits(15), table({(1, 16): 1.0, (16, 16): 1.5}))
