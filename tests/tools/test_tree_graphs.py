"""networkx as a second opinion on a tree's buffers."""

from dataclasses import replace

import numpy as np
import pytest

from draftwood.tools.comparison.tree_graphs import tree_faults
from draftwood.trees import Topology, TreeBuffers, tensorize

TREES = [Topology.plain(), Topology.chain(4), Topology.full((3, 2, 1)), Topology.backbone(3, 4)]


@pytest.mark.parametrize("tree", TREES)
def test_what_is_tensorized_is_what_the_graph_says(tree: Topology) -> None:
    assert tree_faults(tensorize(tree)) == []


def changed(name: str, row: int, value: object) -> TreeBuffers:
    buffers = tensorize(Topology.full((2, 2)))
    array = np.array(getattr(buffers, name))
    array[row] = value
    return replace(buffers, **{name: array})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (changed("depths", 3, 1), "row 3 has depth 1; 2 edges"),
        (changed("mask", 4, True), "row 4 sees rows"),
        (changed("paths", 5, 0), "the path to row 5"),
        (changed("parents", 1, 1), "no tree"),
    ],
)
def test_what_is_not_is_named(wrong: TreeBuffers, said: str) -> None:
    assert any(said in fault for fault in tree_faults(wrong))
