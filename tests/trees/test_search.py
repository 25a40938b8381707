import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees.calibration import Calibration
from draftwood.trees.search import level_marginals, search

from .samples import COUNTS, FIXED, contexts, gain, prefixes, trees_within


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


def test_ties_go_to_the_shallower_then_the_smaller_path():
    found = search(contexts({(0, 0): 5, (1, 0): 5}), 9)
    assert found.paths(9) == [(0,), (1,), (0, 0), (1, 0)]


@FIXED
@given(COUNTS)
def test_shares_never_grow_along_a_path(counts):
    found = search(contexts(counts), 40)
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
