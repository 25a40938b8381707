"""The buffers of a tree against graph algorithms that somebody else wrote: networkx knows nothing of rows and masks."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
import numpy as np

from draftwood.trees import TreeBuffers


def tree_faults(buffers: TreeBuffers) -> list[str]:
    """Differences between depths, mask and paths, and the graph of the parents; empty if they agree."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(buffers.parents)))
    graph.add_edges_from((int(parent), row) for row, parent in enumerate(buffers.parents) if row)
    if not nx.is_arborescence(graph):
        return ["the parents make no tree"]
    return list(_faults(buffers, graph))


def _faults(buffers: TreeBuffers, graph: nx.DiGraph) -> Iterator[str]:
    ways = nx.single_source_shortest_path(graph, 0)
    for row, way in sorted(ways.items()):
        if buffers.depths[row] != len(way) - 1:
            yield f"row {row} has depth {buffers.depths[row]}; {len(way) - 1} edges lead to it"
        seen, expected = set(np.flatnonzero(buffers.mask[row]).tolist()), nx.ancestors(graph, row) | {row}
        if seen != expected:
            yield f"row {row} sees rows {sorted(seen)}; its ancestors and itself are {sorted(expected)}"
        path, filled = buffers.paths[row].tolist(), way + [row] * (buffers.paths.shape[1] - len(way))
        if path != filled:
            yield f"the path to row {row} is {path}; the graph's is {filled}"
