"""Tensorization against a naive walk and Medusa's published rule; invariants against one fault at a time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.trees import Topology, is_tree, require, tensorize, violations

from .samples import topologies

FIXED = settings(derandomize=True, deadline=None, max_examples=75, database=None)
RAGGED = [
    *((0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1)),
    *((0, 1, 0), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0, 0)),
]


def walk_up(parents, row):
    trail = [row]
    while row:
        row = parents[row]
        trail.insert(0, row)
    return trail


def deeper(buffers, depth):
    """The buffers with tables for so many more levels, as a drafter that chooses its tree has them."""
    return dataclasses.replace(buffers, paths=np.pad(buffers.paths, ((0, 0), (0, depth)), mode="edge"))


@FIXED
@given(topologies())
def test_buffers_equal_a_naive_walk(tree):
    buffers = tensorize(tree)
    for row in range(tree.rows):
        trail = walk_up(tree.parents, row)
        assert buffers.paths[row].tolist() == trail + [row] * (tree.depth + 1 - len(trail))
        assert np.flatnonzero(buffers.mask[row]).tolist() == sorted(trail)
        assert buffers.depths[row] == len(trail) - 1
    assert buffers.parents.tolist() == list(tree.parents) and buffers.ranks.tolist() == list(tree.ranks)
    assert (buffers.rows, buffers.depth) == (tree.rows, tree.depth)


@FIXED
@given(topologies(), st.integers(0, 3))
def test_buffers_are_sound_and_read_only(tree, more_depth):
    buffers = tensorize(tree)
    assert violations(buffers) == violations(deeper(buffers, more_depth)) == []
    for field in dataclasses.fields(buffers):
        array = getattr(buffers, field.name)
        assert not array.flags.writeable and array.flags.c_contiguous
        assert array.min() >= 0


def medusa_buffers(choices, topk=10):
    """The rule of Medusa's generate_medusa_buffers, with its -1: mask, positions, tree and path indices."""
    choices = sorted(choices, key=lambda path: (len(path), path))
    rows = len(choices) + 1
    mask, positions, indices = np.eye(rows), [0], [0]
    mask[:, 0] = 1
    for row, path in enumerate(choices, 1):
        for length in range(1, len(path)):
            mask[row, 1 + choices.index(path[:length])] = 1
        positions.append(len(path))
        indices.append(path[-1] + topk * (len(path) - 1) + 1)
    covered, retrieve = set(), []
    for path in reversed(choices):
        if path not in covered:
            prefixes = [path[:length] for length in range(1, len(path) + 1)]
            covered |= set(prefixes)
            retrieve.append([0] + [1 + choices.index(prefix) for prefix in prefixes])
    width = max(map(len, retrieve))
    return mask, positions, indices, np.array([row + [-1] * (width - len(row)) for row in retrieve])


def test_buffers_equal_medusas_published_rule_without_its_negative_index():
    tree = Topology.from_paths(RAGGED)
    buffers = tensorize(tree)
    mask, positions, indices, retrieve = medusa_buffers(RAGGED)
    assert (buffers.mask == (mask == 1)).all()
    assert buffers.depths.tolist() == positions
    assert (buffers.ranks[1:] + 10 * (buffers.depths[1:] - 1) + 1).tolist() == indices[1:]
    leaves = retrieve.max(axis=1)
    assert sorted(leaves) == [row for row in range(tree.rows) if not tree.children(row)]
    assert (np.where(retrieve == -1, leaves[:, None], retrieve) == buffers.paths[leaves]).all()
    assert (retrieve == -1).any()


SOUND = deeper(tensorize(Topology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0)])), 1)


def broken(field, place, value):
    array = getattr(SOUND, field).copy()
    array[place] = value
    return dataclasses.replace(SOUND, **{field: array})


@pytest.mark.parametrize(
    ("name", "field", "place", "value"),
    [
        ("index-range", "parents", 3, -1),
        ("index-range", "parents", 3, 8),
        ("index-range", "ranks", 1, -1),
        ("index-range", "depths", 5, 4),
        ("index-range", "paths", (6, 1), 8),
        ("parent-order", "parents", 0, 1),
        ("parent-order", "parents", 4, 5),
        ("acyclic", "parents", 4, 4),
        ("acyclic", "parents", 1, 4),
        ("depth-step", "depths", 5, 1),
        ("depth-step", "depths", 0, 1),
        ("depth-step", "depths", 7, 0),
        ("mask-row", "mask", (4, 2), True),
        ("mask-row", "mask", (3, 3), False),
        ("mask-row", "mask", (6, 1), True),
        ("sibling-ranks", "ranks", 5, 0),
        ("path-consistent", "paths", (4, 1), 2),
        ("path-consistent", "paths", (4, 3), 0),
    ],
)
def test_each_invariant_catches_its_fault(name, field, place, value):
    assert name in {violation.name for violation in violations(broken(field, place, value))}


def test_wrong_shape_and_dtype_are_named():
    short = dataclasses.replace(SOUND, mask=SOUND.mask[:-1])
    narrow = dataclasses.replace(SOUND, parents=SOUND.parents.astype(np.int32))
    empty = dataclasses.replace(SOUND, parents=SOUND.parents[:0])
    assert [violation.name for violation in violations(short)] == ["shape"]
    assert [violation.name for violation in violations(narrow)] == ["dtype"]
    assert {violation.name for violation in violations(empty)} == {"shape"}


def test_tables_too_short_for_the_tree_are_caught():
    cut = dataclasses.replace(SOUND, paths=SOUND.paths[:, :2].copy())
    flat = dataclasses.replace(cut, depths=np.minimum(SOUND.depths, 1))
    assert "path-consistent" in {violation.name for violation in violations(flat)}


def altered(data, buffers, fields):
    """One entry of one of the fields is another."""
    field = data.draw(st.sampled_from(fields))
    array = getattr(buffers, field).copy()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    if field == "mask":
        array[place] = not array[place]
    else:
        array[place] += data.draw(st.integers(-9, 9).filter(bool))
    return dataclasses.replace(buffers, **{field: array})


@FIXED
@given(st.data())
def test_any_other_entry_in_an_index_table_is_caught(data):
    tree = data.draw(topologies())
    buffers = deeper(tensorize(tree), 1)
    assert violations(altered(data, buffers, ["parents", "depths", "mask", "paths"]))


@FIXED
@given(st.data())
def test_the_quick_check_of_a_drafted_tree_catches_any_other_entry(data):
    tree = data.draw(topologies())
    buffers = deeper(tensorize(tree), data.draw(st.integers(0, 2)))
    assert is_tree(buffers)
    assert not is_tree(altered(data, buffers, ["parents", "depths", "mask", "paths"]))


def test_require_says_where_what_and_how_many():
    require(SOUND, "bundle x")
    with pytest.raises(TreeError, match=r"^bundle x: depth-step at row 5: expected depth 2, got 1; rebuild"):
        require(broken("depths", 5, 1), "bundle x")
    with pytest.raises(TreeError, match=r"\(and \d+ more\)"):
        require(broken("parents", 4, 5), "bundle x")
