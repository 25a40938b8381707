"""Trees given as edges: the adjacency JSON of NeuronX Distributed Inference.

`token_tree_config` has the form ``{"0": ["1", "2"], "1": ["3"]}``. The root is "0", and a missing key is a leaf. A
node's rank is its place among its siblings.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from draftwood.errors import TreeError
from draftwood.trees._json import load_json
from draftwood.trees.topology import Topology

Edges = Mapping[str, tuple[str, int]]  # node -> (its parent, its rank there)


def parse_nxdi(text: str, where: str) -> Topology:
    """The tree in adjacency JSON; node ids are decimal numbers in any order, as strings or as integers.

    Raises:
        TreeError: a node has two parents, lies on a cycle or cannot be reached from "0", or this is no
            adjacency.
    """
    value = load_json(text, where)
    if not isinstance(value, dict):
        raise TreeError(f"{where}: expected an adjacency object, got {type(value).__name__}")
    edges: dict[str, tuple[str, int]] = {}
    nodes = {"0": None}
    for key, children in value.items():
        parent = _node_id(key, where)
        if not isinstance(children, list):
            raise TreeError(f"{where}: node {parent!r}: expected a list of children, got {children!r}")
        nodes |= {parent: None}
        for rank, item in enumerate(children):
            child = _node_id(item, where)
            _add_edge(edges, child, parent, rank, where)
            nodes |= {child: None}
    _check_cycles(edges, where)
    if "0" in edges:
        raise TreeError(f"{where}: the root '0' is listed as a child of {edges['0'][0]!r}; make '0' the root")
    return _grow(edges, nodes, "0", where)


def _node_id(value: object, where: str) -> str:
    text = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not re.fullmatch("0|[1-9][0-9]*", text):
        raise TreeError(f'{where}: expected a node id such as "12", got {value!r}')
    return text


def _add_edge(edges: dict[str, tuple[str, int]], child: str, parent: str, rank: int, where: str) -> None:
    if child in edges:
        other = edges[child][0]
        raise TreeError(f"{where}: node {child!r} has two parents, {other!r} and {parent!r}; remove one edge")
    edges[child] = (parent, rank)


def _check_cycles(edges: Edges, where: str) -> None:
    done: set[str] = set()
    for start in edges:
        trail: list[str] = []
        node = start
        while node in edges and node not in done:
            done.add(node)
            trail.append(node)
            node = edges[node][0]
        if node in trail:
            cycle = trail[trail.index(node) :]
            raise TreeError(f"{where}: node {node!r} lies on a cycle of {cycle[:8]}; remove one of its edges")


def _grow(edges: Edges, nodes: Iterable[str], root: str, where: str) -> Topology:
    """The tree of `nodes` under `root`; `edges` must be free of cycles and hold no parent of `root`.

    Rows go by depth and then by parent and rank, so rank paths, quadratic in a chain, need not be written out.
    """
    children: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for child, (parent, rank) in edges.items():
        children[parent].append((rank, child))
    order, parents, ranks = [root], [0], [0]
    for row, node in enumerate(order):  # it grows during the walk
        for rank, child in sorted(children[node]):
            order.append(child)
            parents.append(row)
            ranks.append(rank)
    reached = set(order)
    for node in nodes:
        if node not in reached:
            raise TreeError(f"{where}: node {node!r} cannot be reached from the root {root!r}; connect it")
    try:
        return Topology(tuple(parents), tuple(ranks))
    except TreeError as error:
        raise TreeError(f"{where}: {error}") from error
