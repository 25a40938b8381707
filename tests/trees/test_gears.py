import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees import Topology
from draftwood.trees.calibration import Calibration
from draftwood.trees.candidates import GearShape, candidates, length_classes, step_us, token_us
from draftwood.trees.choice import choose
from draftwood.trees.plan_file import Limits

from .samples import COUNTED, FIXED, PATHS, gain, prefixes, table, trees_within


def at_length(counts, tokens=None):
    calibration = Calibration()
    for path, count in counts.items():
        for _ in range(count):
            calibration.add(path, group=COUNTED, context=tokens)
    return calibration.contexts


TIMES = st.integers(1, 30)


@settings(FIXED, max_examples=30)
@given(
    st.dictionaries(PATHS, st.integers(1, 9), min_size=1, max_size=3).filter(any),
    st.fixed_dictionaries(dict.fromkeys((1, 2, 4, 7), TIMES)),
    st.fixed_dictionaries(dict.fromkeys(itertools.product((1, 2, 3), (1, 3)), TIMES)),
)
def test_the_best_gear_is_the_best_of_all_trees(counts, steps, drafts):
    """Against every tree of up to 6 nodes in the next larger step, with the cheapest draft that holds it."""
    costs = table({(rows, 256): s for rows, s in steps.items()}, drafts, host=0.5)
    lengths, too_long = length_classes(at_length(counts), costs, 6)
    gears = candidates(lengths, costs, Limits(nodes=6))
    found = token_us(gears, lengths, costs).min() / 1e6
    best = min(
        step_us(costs, GearShape(rows, 256, Topology.from_paths(tree)), 256) / 1e6 / float(gain(counts, tree))
        for n in range(7)
        for tree in trees_within(prefixes(counts), n)
        for rows in [min(rows for rows in steps if rows > n)]  # a graph has its tree's own rows
    )
    assert found == pytest.approx(best, rel=1e-12) and too_long == 0


def test_padding_up_to_the_next_stair_is_free():
    counts = {(0,): 5, (1,): 3, (2,): 2, (): 1}
    costs = table({(1, 256): 10, (4, 256): 11, (16, 256): 40})
    lengths, _ = length_classes(at_length(counts), costs, 15)
    gears = candidates(lengths, costs, Limits(nodes=15))
    best = gears[token_us(gears, lengths, costs)[:, 0].argmin()]
    assert best.rows == 4 and best.tree == Topology.from_paths([(0,), (1,), (2,)])


def test_a_tree_costs_what_its_own_rows_take():
    """On an NPU 17 rows may take less than 9, but no graph is padded for a tree of 9."""
    costs = table({(1, 256): 10, (8, 256): 11, (16, 256): 20, (17, 256): 12})
    lengths, _ = length_classes(at_length({(0,) * 8: 1}), costs, 63)
    gears = candidates(lengths, costs, Limits(nodes=63))
    assert [(gear.rows, gear.tree.rows) for gear in gears[1:] if gear.rows > 1] == [(8, 8), (16, 9)]


def test_a_limit_between_two_row_counts_is_used_up():
    """As of a table that has the rows of a bundle's trees alone; plain decoding was all that was left."""
    costs = table({(rows, slots): 10 for rows in (1, 8) for slots in (69, 128)})
    lengths, _ = length_classes(at_length({(0,) * 8: 1}, 64), costs, 3)
    assert [length.slots for length in lengths] == [69], "64 tokens, 4 rows and the spare slot"
    gears = candidates(lengths, costs, Limits(nodes=3))
    assert gears[0].rows == 1 and {gear.tree for gear in gears[1:] if gear.rows > 1} == {Topology.chain(3)}


def test_lengths_take_the_smallest_cache_that_holds_text_tree_and_spare_slot():
    costs = table({(rows, slots): 1 for rows in (1, 8) for slots in (256, 512)})
    for tokens, slots in ((1, 256), (192, 256), (193, 512), (448, 512), (None, 512)):
        lengths, too_long = length_classes(at_length({(0,): 2}, tokens), costs, 7)
        assert [(length.slots, length.share) for length in lengths] == [(slots, 1.0)] and too_long == 0
    tight = table({(rows, slots): 1 for rows in (1, 8) for slots in (72, 73)})
    assert [length.slots for length in length_classes(at_length({(0,): 2}, 64), tight, 7)[0]] == [73]
    both = Calibration()
    both.add((0,), group=COUNTED, context=10)
    both.add((0,), group=COUNTED, context=5000)
    assert length_classes(both.contexts, costs, 7)[1] == 1
    with pytest.raises(TreeError, match="no context fits the latency table"):
        length_classes(at_length({(0,): 1}, 5000), costs, 7)


def test_a_machine_that_reads_the_filled_part_pays_for_the_text_alone():
    costs = {(1, 256): 1.0, (1, 512): 2.0}
    gear = GearShape(1, 512, Topology.plain())
    assert step_us(table(costs), gear, 256) == 2e6
    assert step_us(table(costs, kv_read="filled"), gear, 256) == 1e6


def test_trees_go_no_deeper_or_wider_than_drafts_were_timed():
    counts = {(0, 0, 0): 5, (2,): 4}
    costs = table({(1, 256): 10, (8, 256): 11}, {(2, 2): 1})
    lengths, _ = length_classes(at_length(counts), costs, 7)
    assert all(gear.tree.depth <= 2 and gear.tree.width <= 2 for gear in candidates(lengths, costs, Limits(nodes=7)))


def test_plain_decoding_is_among_the_candidates_first_of_all():
    costs = table({(rows, slots): 1 for rows in (1, 8) for slots in (256, 512)})
    lengths, _ = length_classes(at_length({(0,): 2}), costs, 7)
    gears = candidates(lengths, costs, Limits(nodes=7))
    assert gears[0] == GearShape(1, 512, Topology.plain())


@st.composite
def choices(draw):
    gears, classes = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cell = st.one_of(st.integers(1, 9).map(float), st.just(np.inf))
    times = [draw(st.lists(st.integers(1, 9).map(float), min_size=classes, max_size=classes))]
    times += [draw(st.lists(cell, min_size=classes, max_size=classes)) for _ in range(gears - 1)]
    shares = np.array(draw(st.lists(st.integers(1, 5), min_size=classes, max_size=classes)), float)
    return np.array(times), shares / shares.sum()


def every_set(times_GC, shares_C, most):
    for n in range(min(most, len(times_GC))):
        for others in itertools.combinations(range(1, len(times_GC)), n):
            yield float(times_GC[[0, *others]].min(0) @ shares_C)


@FIXED
@given(choices(), st.integers(1, 4))
def test_choice_equals_brute_force(case, most):
    times_GC, shares_C = case
    found = choose(times_GC, shares_C, most)
    assert found.exact and found.gears[0] == 0 and len(found.gears) <= most
    assert found.time == pytest.approx(min(every_set(times_GC, shares_C, most)), abs=1e-12)
    assert found.time == pytest.approx(float(times_GC[list(found.gears)].min(0) @ shares_C), abs=1e-12)


def test_choice_equals_brute_force_among_gears_of_near_equal_use():
    random = np.random.default_rng(2)
    for _ in range(400):
        times_GC, shares_C = random.integers(1, 6, (7, 5)).astype(float), np.full(5, 0.2)
        most = int(random.integers(1, 6))
        found = choose(times_GC, shares_C, most)
        best = min(every_set(times_GC, shares_C, most))
        assert found.exact and found.time == pytest.approx(best, abs=1e-12) and len(found.gears) <= most


@FIXED
@given(choices(), st.integers(1, 4), st.integers(0, 6))
def test_a_stopped_search_proves_its_bound(case, most, stop):
    times_GC, shares_C = case
    found = choose(times_GC, shares_C, most, most_sets=stop)
    best = min(every_set(times_GC, shares_C, most))
    assert found.bound <= best + 1e-12 <= found.time + 2e-12


def test_hundreds_of_gears_stop_with_a_bound_near_by():
    random = np.random.default_rng(0)
    times_GC = random.uniform(1, 2, (300, 12))
    found = choose(times_GC, np.full(12, 1 / 12), 5, most_sets=2000)
    assert found.bound <= found.time <= 1.15 * found.bound


def test_impossible_limits_are_refused():
    with pytest.raises(TreeError, match="a limit of 1 or more gears"):
        choose(np.ones((1, 1)), np.ones(1), 0)
