import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees.calibration import Calibration
from draftwood.trees.search import level_marginals, search
from draftwood.trees.shrinkage import STRENGTHS, shrink

from .samples import COUNTED, COUNTS, FIXED, PATHS, TUNING, calibrated, contexts, gain, prefixes, trees_within


def cut(counts, max_depth, max_children):
    """The counts as a drafter of these limits would have seen them."""
    result: dict = {}
    for path, count in counts.items():
        inside = tuple(itertools.takewhile(lambda r: max_children is None or r < max_children, path[:max_depth]))
        result[inside] = result.get(inside, 0) + count
    return result


@FIXED
@given(COUNTS, st.sampled_from([None, 1, 2]), st.sampled_from([None, 1, 2]))
def test_every_size_equals_brute_force(counts, max_depth, max_children):
    found = search(contexts(counts), 8, max_depth, max_children)
    nodes = prefixes(cut(counts, max_depth, max_children))
    for size in range(9):
        best = max(gain(counts, tree) for n in range(size + 1) for tree in trees_within(nodes, n))
        tree = found.tree(size)
        assert gain(counts, tree.paths) == best and tree.nodes == min(size, len(nodes))
        assert found.curve()[min(size, len(nodes))] == pytest.approx(float(best), abs=1e-12)


@FIXED
@given(COUNTS, st.integers(1, 8))
def test_each_cap_on_depth_is_a_search_of_its_own(counts, size):
    found = search(contexts(counts), size)
    for depth in range(1, found.depth + 1):
        alone = search(contexts(counts), size, max_depth=depth)
        assert found.paths(size, depth) == alone.paths(size)
        assert found.curve(depth).tolist() == alone.curve().tolist()


@FIXED
@given(COUNTS, st.integers(1, 8))
def test_agrees_with_rank_paths_ties_included(counts, size):
    calibration = calibrated(counts)
    assert search(calibration.contexts, size).tree(size) == calibration.rank_paths().best_tree(size)


def shares(counts, nodes, strength):
    """P of each node by the definition, path by path."""
    seen, total = prefixes(counts), sum(counts.values())

    def visits(node):
        return sum(count for path, count in counts.items() if path[: len(node)] == node)

    def marginal(node):
        level = [path for path in seen if len(path) == len(node)]
        reached = sum(visits(parent) for parent in {(), *seen} if len(parent) == len(node) - 1)
        return sum(visits(path) for path in level if path[-1] == node[-1]) / reached if reached else 0.0

    found = {(): 1.0}
    for node in sorted(nodes, key=len):
        parent = node[:-1]
        if strength == 0:
            found[node] = visits(node) / total
        elif math.isinf(strength):
            found[node] = found[parent] * marginal(node)
        else:
            found[node] = found[parent] * (visits(node) + strength * marginal(node)) / (visits(parent) + strength)
    return found


@FIXED
@given(
    st.dictionaries(st.lists(st.integers(0, 1), max_size=3).map(tuple), st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from(STRENGTHS),
)
def test_shrunk_trees_equal_brute_force_of_the_definition(counts, strength):
    # All 14 nodes of a binary trie, visited or not: a shrunk path need never have been taken.
    nodes = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    p = shares(counts, nodes, strength)
    found = search(contexts(counts), 14, strength=strength)
    assert found.curve()[-1] == pytest.approx(sum(p.values()), abs=1e-12)
    for size in range(1, len(found.curve())):
        best = max(1 + sum(p[node] for node in tree) for tree in trees_within(nodes, size)) if size < 6 else None
        chosen = 1 + sum(p[node] for node in found.tree(size).paths)
        assert found.curve()[size] == pytest.approx(chosen, abs=1e-12)
        assert best is None or chosen == pytest.approx(best, abs=1e-12)


@FIXED
@given(COUNTS, st.sampled_from(STRENGTHS))
def test_shares_never_grow_along_a_path(counts, strength):
    found = search(contexts(counts), 40, strength=strength)
    assert (found.shares_I <= found.shares_I[found.parents_I] + 1e-15).all()
    for order in found.orders:
        position = {int(node): place for place, node in enumerate(order)}
        assert all(position.get(int(found.parents_I[node]), -1) < place for node, place in position.items())


def test_marginals_are_of_contexts_that_reached_the_level():
    counts = {(0, 1): 3, (0,): 1, (1, 0): 2, (2, 0): 4}
    assert level_marginals(contexts(counts), 2, 2).tolist() == [[0.4, 0.2], [2 / 6, 3 / 6]]
    assert level_marginals(contexts(counts), 3, 3)[2].tolist() == [0, 0, 0]


def test_nothing_counted_and_bad_limits_are_refused():
    for call in (
        lambda: search(Calibration().contexts, 3),
        lambda: search(contexts({(0,): 1}), 0),
        lambda: search(contexts({(0,): 1}), 1, max_depth=0),
        lambda: search(contexts({(0,): 1}), 1, max_children=0),
    ):
        with pytest.raises(TreeError, match=r"^plan: "):
            call()


def test_paths_that_are_all_empty_have_the_plain_tree():
    assert search(contexts({(): 4}), 5).tree(5).nodes == 0


def two_parts(counted, tuning):
    calibration = calibrated(counted, COUNTED)
    calibration.merge(calibrated(tuning, TUNING))
    return calibration.part("counted"), calibration.part("tuning")


def test_bare_counts_are_kept_where_nothing_was_left_to_choose_on():
    shrinkage = shrink(*two_parts({(0, 1): 5, (1,): 2}, {}), nodes=4)
    assert shrinkage.strength == 0 and shrinkage.gains == {}


def independent_levels(texts, each):
    """Contexts whose three ranks know nothing of each other: single paths are noise, marginals are not."""
    random, calibration = np.random.default_rng(5), Calibration()
    p = 0.8 ** np.arange(8)
    for text in texts:
        for _ in range(each):
            calibration.add(random.choice(8, 3, p=p / p.sum()).tolist(), group=text)
    return calibration.part("counted"), calibration.part("tuning")


def test_the_product_model_is_chosen_where_it_is_the_truth():
    shrinkage = shrink(*independent_levels([f"text {i}" for i in range(400)], 3), nodes=60)
    assert shrinkage.strength >= 4 and shrinkage.gains[shrinkage.strength] > shrinkage.gains[0.0]


def test_an_advantage_that_may_be_luck_does_not_move_it_from_bare_counts():
    # All tuning contexts are of one text, so nobody knows how much its advantage would vary with others.
    shrinkage = shrink(*independent_levels([COUNTED, TUNING], 300), nodes=60)
    assert max(shrinkage.gains.values()) > shrinkage.gains[0.0] and shrinkage.strength == 0


@FIXED
@given(COUNTS, st.lists(PATHS, min_size=1, max_size=6))
def test_gains_are_the_mean_over_sizes(counts, tuned):
    tuning = {path: tuned.count(path) for path in tuned}
    nodes = 5
    shrinkage = shrink(*two_parts(counts, tuning), nodes=nodes)
    for strength, gained in shrinkage.gains.items():
        found = search(contexts(counts), nodes, strength=strength)
        mean = sum(gain(tuning, found.tree(size).paths) for size in range(1, nodes + 1)) / nodes
        assert gained == pytest.approx(float(mean), abs=1e-12)
