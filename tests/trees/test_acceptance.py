"""Acceptance against a naive definition, on every small tree and every outcome."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees import Topology, tensorize, walk

from .samples import topologies

FIXED = settings(derandomize=True, deadline=None, max_examples=80, database=None)
VOCABULARY = 3


def all_shapes(nodes):
    """Every ordered tree of `nodes` draft nodes: non-decreasing parents that precede their children."""
    for parents in itertools.product(*(range(row) for row in range(1, nodes + 1))):
        if all(left <= right for left, right in itertools.pairwise(parents)):
            ranks = [parents[:row].count(parent) for row, parent in enumerate(parents)]
            yield Topology((0, *parents), (0, *ranks))


def outcomes(tree, tokens):
    """Every course the walk can take, as (the draws it asked for, its result)."""
    pending, buffers = [{}], tensorize(tree)
    while pending:
        known = pending.pop()
        try:
            yield known, walk(buffers, np.array(tokens), lambda row, depth, known=known: known[row])
        except KeyError as unknown:
            pending += [known | {unknown.args[0]: token} for token in range(VOCABULARY)]


def naive_rows(tree, tokens, draws):
    """The deepest row all of whose ancestors and itself were drawn at their parents, per row of draws; of siblings
    with equal tokens the first alone counts."""
    best, depths = np.zeros(len(draws), int), np.array(tree.depths)
    for leaf in range(1, tree.rows):
        row, drawn = leaf, np.ones(len(draws), bool)
        while row:
            elder = (other for other in tree.children(tree.parents[row]) if other < row)
            drawn &= draws[:, tree.parents[row]] == tokens[row]
            drawn &= all(tokens[other] != tokens[row] for other in elder)
            row = tree.parents[row]
        best = np.where(drawn & (depths[leaf] > depths[best]), leaf, best)
    return best


def check_every_outcome(tree, buffers, tokens, draws):
    best = naive_rows(tree, tokens, draws)
    covered = np.zeros(len(draws), int)
    for known, accepted in outcomes(tree, tokens):
        met = np.all([draws[:, row] == token for row, token in known.items()], axis=0)
        covered += met
        assert (best[met] == accepted.rows[-1]).all()
        assert accepted.rows == tuple(dict.fromkeys(buffers.paths[accepted.rows[-1]].tolist()))
        assert (draws[met, accepted.rows[-1]] == accepted.bonus).all()
        assert accepted.path == ((), *tree.paths)[accepted.rows[-1]]
    assert (covered == 1).all()


def drafts(nodes):
    """Every row of tokens. Of five nodes those whose tokens first appear in order: the draws, which are all there, go
    through their other names."""
    for drafted in itertools.product(range(VOCABULARY), repeat=nodes):
        named = list(dict.fromkeys(drafted))
        if nodes < 5 or named == list(range(len(named))):
            yield drafted


@pytest.mark.parametrize("nodes", range(6))
def test_all_small_trees_all_tokens_all_draws(nodes):
    draws = np.array(list(itertools.product(range(VOCABULARY), repeat=nodes + 1)))
    for tree in all_shapes(nodes):
        buffers = tensorize(tree)
        for drafted in drafts(nodes):
            check_every_outcome(tree, buffers, (0, *drafted), draws)


def test_there_are_as_many_shapes_as_catalan_says():
    assert [len(list(all_shapes(nodes))) for nodes in range(6)] == [1, 1, 2, 5, 14, 42]


@FIXED
@given(st.data())
def test_adding_a_node_never_shortens_acceptance(data):
    small = data.draw(topologies())
    parent = data.draw(st.sampled_from(((), *small.paths)))
    node = (*parent, data.draw(st.integers(0, 4).filter(lambda rank: (*parent, rank) not in small.paths)))
    large = Topology.from_paths([*small.paths, node])
    # A permutation of the ranks below each node gives siblings distinct tokens, the same in both trees.
    shuffle = {path: data.draw(st.permutations(range(5))) for path in ((), *large.paths)}
    drawn = {path: data.draw(st.integers(0, 4)) for path in ((), *large.paths)}
    gained = []
    for tree in (small, large):
        names = ((), *tree.paths)
        tokens = [0, *(shuffle[path[:-1]][path[-1]] for path in tree.paths)]
        gained.append(walk(tensorize(tree), np.array(tokens), lambda row, depth, names=names: drawn[names[row]]))
    assert len(gained[1].rows) - len(gained[0].rows) in (0, 1)
    assert gained[1].path[: len(gained[0].path)] == gained[0].path


def test_draw_is_called_once_per_accepted_row_only():
    asked = []
    tree = Topology.full((2, 2))
    accepted = walk(
        tensorize(tree),
        np.array([9, 1, 2, 3, 4, 5, 6]),
        lambda row, depth: asked.append(row) or {0: 2, 2: 6, 6: 7}[row],
    )
    assert asked == list(accepted.rows) == [0, 2, 6]
    assert (accepted.path, accepted.bonus) == ((1, 1), 7)


def test_a_row_at_which_nothing_can_be_drawn_is_the_bonus():
    tree, tokens = tensorize(Topology.chain(3)), np.array([9, 1, 2, 3])
    for depth in (1, 2, 3):
        accepted = walk(tree, tokens, lambda row, at, depth=depth: None if at == depth else int(tokens[row + 1]))
        assert (accepted.rows, accepted.bonus) == (tuple(range(depth)), depth)


def test_wrong_number_of_tokens_is_refused():
    with pytest.raises(TreeError, match="expected 3 tokens"):
        walk(tensorize(Topology.chain(2)), np.array([1, 2]), lambda row, depth: 0)
