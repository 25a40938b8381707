import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.trees import Topology
from draftwood.trees.baselines import baselines, medusa_greedy, positional_acceptance, sequoia
from draftwood.trees.search import search

from .samples import COUNTS, FIXED, contexts, gain, trees_within

CHANCES = st.lists(st.integers(1, 40), min_size=2, max_size=2).map(lambda ps: sorted(ps, reverse=True))
BINARY = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]


def product(table_DK, path):
    return float(np.prod([table_DK[level][rank] for level, rank in enumerate(path)]))


@FIXED
@given(st.lists(CHANCES, min_size=3, max_size=3), st.integers(1, 6))
def test_medusa_greedy_is_the_best_tree_of_the_product_model(table, nodes):
    table_DK = np.array(table) / 100
    tree = medusa_greedy(table_DK, nodes)
    best = max(sum(product(table_DK, node) for node in rival) for rival in trees_within(BINARY, nodes))
    assert tree.nodes == nodes
    assert sum(product(table_DK, node) for node in tree.paths) == pytest.approx(best, abs=1e-12)


def test_medusa_takes_siblings_in_order():
    # Rank 1 is better than rank 0, yet its neighbour 0 is in the tree first.
    assert medusa_greedy(np.array([[0.1, 0.6]]), 1).paths == ((0,),)


@FIXED
@given(st.lists(st.integers(1, 40), min_size=2, max_size=2), st.integers(1, 6), st.integers(1, 3))
def test_sequoia_equals_brute_force(chances, nodes, depth):
    """Also where the second candidate is the better one: children are then still taken from the first on."""
    acceptance_K = np.array(chances) / 100
    table_DK = [acceptance_K] * 3
    allowed = [node for node in BINARY if len(node) <= depth]
    rivals = (tree for n in range(nodes + 1) for tree in trees_within(allowed, n))
    in_order = (tree for tree in rivals if all(n[-1] == 0 or (*n[:-1], 0) in tree for n in tree))
    best = max(sum(product(table_DK, node) for node in tree) for tree in in_order)
    tree = sequoia(acceptance_K, nodes, depth)
    assert sum(product(table_DK, node) for node in tree.paths) == pytest.approx(best, abs=1e-12)
    assert tree.nodes <= nodes and tree.depth <= depth


def test_positional_acceptance_is_over_all_levels():
    counts = {(0, 1): 3, (0,): 1, (1, 0): 2, (): 4}
    # 16 nodes were met with a level below: 10 roots and 6 on level 1, and none below it as no path is longer.
    assert positional_acceptance(contexts(counts), 2, 2) == pytest.approx(np.array([4 + 2, 2 + 3]) / 16)


@FIXED
@given(COUNTS, st.integers(1, 8), st.sampled_from([None, 1, 2]), st.sampled_from([None, 1, 2]))
def test_no_baseline_is_above_the_plan(counts, nodes, max_depth, max_children):
    curve = search(contexts(counts), nodes, max_depth, max_children).curve()
    for name, tree in baselines(contexts(counts), nodes, max_depth, max_children).items():
        assert tree.nodes <= nodes, name
        assert tree.depth <= (max_depth or 3) and tree.width <= (max_children or 3), name
        assert gain(counts, tree.paths) <= curve[-1] + 1e-12, name


def test_each_method_has_its_shape():
    found = baselines(contexts({(0, 0, 0): 9, (1,): 4, (0, 1): 3, (2,): 1}), 6)
    assert found["chain"] == Topology.chain(3)
    assert found["backbone"] == Topology.backbone(3, 2)
    assert found["uniform"] in (Topology.full((2, 2)), Topology.full((1, 1, 1)), Topology.full((3,)))
    assert set(found) == {"medusa-greedy", "sequoia", "backbone", "chain", "uniform"}


def test_without_candidates_there_are_none():
    assert baselines(contexts({(): 3}), 4) == {}
