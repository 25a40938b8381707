import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import draftwood.trees
from draftwood.errors import TreeError
from draftwood.trees import Topology, draw_text


def test_exports_are_what_the_package_holds():
    assert draftwood.trees.__all__ == sorted(set(draftwood.trees.__all__))
    assert all(hasattr(draftwood.trees, name) for name in draftwood.trees.__all__)


def test_package_needs_numpy_alone():
    heavy = "{'networkx', 'matplotlib', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys, draftwood.trees; sys.exit(bool({heavy}))"], check=True)


def test_examples_in_docstrings_run():
    for info in pkgutil.iter_modules(draftwood.trees.__path__):
        module = importlib.import_module(f"draftwood.trees.{info.name}")
        assert doctest.testmod(module).failed == 0


def test_plain_tree_is_the_root_alone():
    plain = Topology.plain()
    assert (plain.rows, plain.nodes, plain.depth, plain.width) == (1, 0, 0, 0)
    assert plain.paths == () and plain.children(0) == ()
    assert plain == Topology.chain(0) == Topology.full(()) == Topology.backbone(0, 3) == Topology.from_paths([])


def test_ragged_tree_in_canonical_order():
    tree = Topology.from_paths([(1, 0), (0,), (3,), (0, 1), (1,), (0, 1, 2)])
    assert tree.paths == ((0,), (1,), (3,), (0, 1), (1, 0), (0, 1, 2))
    assert tree.parents == (0, 0, 0, 0, 1, 2, 4)
    assert (tree.depths, tree.depth, tree.width) == ((0, 1, 1, 1, 2, 2, 3), 3, 4)
    assert tree.children(0) == (1, 2, 3) and tree.children(6) == ()


def test_constructors_agree_with_their_rank_paths():
    assert Topology.chain(3) == Topology.from_paths([(0,), (0, 0), (0, 0, 0)])
    assert Topology.full((2, 1)) == Topology.from_paths([(0,), (1,), (0, 0), (1, 0)])
    assert Topology.backbone(2, 2) == Topology.from_paths([(0,), (1,), (0, 0), (0, 1)])
    assert Topology.full((3, 2, 1)).rows == 1 + 3 + 6 + 6
    assert Topology.backbone(4, 1) == Topology.full((1,) * 4) == Topology.chain(4)


def test_equal_trees_hash_equal_whatever_order_they_came_in():
    one = Topology.from_paths([(0,), (1,), (1, 0)])
    assert len({one, Topology.from_paths([(1,), (1, 0), (0,)]), Topology.chain(2)}) == 2


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((), (), "at least the root"),
        ((0, 0), (0,), "one rank per parent"),
        ((1, 0), (0, 0), "row 0: the root has parent 0"),
        ((0, 0), (1, 0), "row 0: the root has parent 0"),
        ((0, 1), (0, 0), "row 1: its parent must be an earlier row"),
        ((0, -1), (0, 0), "row 1: its parent must be an earlier row"),
        ((0, 0), (0, -1), "row 1: a rank must be 0 or more"),
        ((0, 0, 0), (0, 1, 1), "row 2: sibling ranks must differ"),
        ((0, 0, 0), (0, 1, 0), "row 2: rows go by depth"),
        ((0, 0, 1, 0), (0, 0, 0, 1), "row 3: rows go by depth"),
        ([0], (0,), "expected a tuple"),
        ((0, 0.0), (0, 0), "expected a tuple of Python integers"),
    ],
)
def test_refused_arrays(parents, ranks, message):
    with pytest.raises(TreeError, match=message):
        Topology(parents, ranks)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0, 0)], r"node \(0, 0\): its parent \(0,\) is missing"),
        ([(0,), [0]], r"node \(0,\): listed twice"),
        ([()], "the root is implied"),
        ([0], "expected a list of ranks"),
        (["0"], "expected a list of ranks"),
        ([(True,)], "a rank is an integer"),
        ([(0.0,)], "a rank is an integer"),
        ([(-1,)], "an integer from 0, the best, to 2147483647, got -1"),
    ],
)
def test_refused_paths(paths, message):
    with pytest.raises(TreeError, match=message):
        Topology.from_paths(paths)


def test_refused_sizes():
    for make in (
        lambda: Topology.chain(-1),
        lambda: Topology.full((2, 0)),
        lambda: Topology.backbone(-1, 2),
        lambda: Topology.backbone(2, 0),
    ):
        with pytest.raises(TreeError):
            make()


def test_drawing_names_every_node_once_and_takes_labels():
    tree = Topology.full((2, 2))
    lines = draw_text(tree, [f"note{row}" for row in range(tree.rows)]).splitlines()
    assert len(lines) == tree.rows + 1
    for path in tree.paths:
        assert sum(f"─ {path} " in line for line in lines) == 1
    assert lines[1].endswith("note0") and draw_text(Topology.plain()).endswith("depth 0")
