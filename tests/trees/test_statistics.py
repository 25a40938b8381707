import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.tools.show.pictures import draw_picture
from draftwood.trees import RankPaths, Topology

from .samples import COUNTS, FIXED, gain, prefixes, trees_within


def counted(counts):
    result = RankPaths()
    for path, count in counts.items():
        result.add(path, count)
    return result


@FIXED
@given(COUNTS, st.integers(0, 5), st.sampled_from([None, 1, 2]), st.sampled_from([None, 1, 2]))
def test_best_tree_equals_brute_force(counts, nodes, max_depth, max_children):
    allowed = [path[:max_depth] for path in counts]
    cut = (tuple(itertools.takewhile(lambda r: max_children is None or r < max_children, p)) for p in allowed)
    allowed_nodes = prefixes(cut)
    best = max(gain(counts, tree) for tree in trees_within(allowed_nodes, min(nodes, len(allowed_nodes))))
    tree = counted(counts).best_tree(nodes, max_depth, max_children)
    assert gain(counts, tree.paths) == best
    assert counted(counts).expected_accept_length(tree) == pytest.approx(float(best), abs=1e-12)
    assert tree.nodes <= nodes and tree.depth <= (max_depth or 3) and tree.width <= (max_children or 3)


@FIXED
@given(COUNTS)
def test_best_trees_are_nested(counts):
    statistics = counted(counts)
    trees = [set(statistics.best_tree(nodes).paths) for nodes in range(14)]
    assert all(small <= large for small, large in itertools.pairwise(trees))
    assert [len(tree) for tree in trees] == [min(nodes, len(trees[-1])) for nodes in range(14)]


def test_visits_are_of_prefixes_and_follow_later_additions():
    statistics = counted({(0, 1): 17, (0,): 2, (): 1})
    assert [statistics.visits(path) for path in ((), (0,), (0, 1), (1,))] == [20, 19, 17, 0]
    assert statistics.expected_accept_length(Topology.chain(2)) == 1 + 19 / 20
    statistics.add((0, 0))
    assert statistics.visits((0,)) == 20 and statistics.visits((0, 0)) == 1


def test_ties_go_to_the_shallower_then_the_smaller_path():
    statistics = counted({(0, 0): 5, (1, 0): 5})
    order = ((0,), (1,), (0, 0), (1, 0))
    assert [statistics.best_tree(nodes).paths for nodes in range(5)] == [order[:nodes] for nodes in range(5)]
    assert statistics.best_tree(99).paths == order


def test_no_contexts_and_bad_values_are_refused():
    for call in (
        lambda: RankPaths().best_tree(3),
        lambda: RankPaths().expected_accept_length(Topology.plain()),
        lambda: RankPaths().add((0,), 0),
        lambda: RankPaths().add((-1,)),
        lambda: counted({(0,): 1}).best_tree(-1),
        lambda: counted({(0,): 1}).best_tree(1, max_depth=-1),
    ):
        with pytest.raises(TreeError):
            call()


def test_picture_is_a_png(tmp_path):
    path = tmp_path / "tree.png"
    draw_picture(Topology.backbone(2, 3), path, {1: "the"}, {1: "61%"}, "backbone")
    assert path.read_bytes().startswith(b"\x89PNG")
    draw_picture(Topology.plain(), path)
