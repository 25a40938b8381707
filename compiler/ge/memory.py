"""Which values of a graph share memory, and the proof that the order of its writes decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from draftwood.compiler.ge.graph import Edge, Graph, Node
from draftwood.compiler.ge.operators import OPERATORS
from draftwood.errors import LoweringError


def memory(graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """(``owned``, ``detached``) of a plan, and the proof that the order of writes decides nothing.

    A reader of a written value must run before the write by its place in the graph, or read the write's result. Only
    the name of a cache itself may also be read by operators after the write. It is the same memory on every device; a
    reshaped value made before the write need not be.
    """
    before = _ancestors(graph)
    number = {name: i for i, name in enumerate(graph.nodes)}

    def runs_before(first: str, second: str) -> bool:
        return bool(before[second] >> number[first] & 1)

    roots = _roots(graph)
    writes: dict[Edge, list[str]] = {}
    for node in graph.nodes.values():
        if _is(node, "writes"):
            root = _root(roots, node.operands[0])
            if graph.nodes[root.node].type in ("Data", "Const", "FileConstant"):
                kind = graph.nodes[root.node].type
                raise LoweringError(f"graph {graph.name}: {node.type} {node.name} writes into {kind} {root.node}")
            writes.setdefault(root, []).append(node.name)
    owned, detached = set(), set()
    for node, i, edge in _reads(graph):
        root = _root(roots, edge)
        cache = graph.nodes[root.node].type == "RefData"
        for write in writes.get(root, ()):
            if node.name == write and i == 0:
                owned |= set() if cache else {write}
            elif edge.node == write or runs_before(write, edge.node):
                pass  # it reads what was written
            elif runs_before(node.name, write):
                detached |= set() if _is(node, "writes") or _is(node, "views") else {node.name}
            elif not (cache and edge == root and runs_before(write, node.name)):
                raise LoweringError(
                    f"graph {graph.name}: whether {node.type} {node.name} reads {root.node} before or after"
                    f" {graph.nodes[write].type} {write} writes it is not defined"
                )
    return frozenset(owned), frozenset(detached)


def _ancestors(graph: Graph) -> dict[str, int]:
    """Node -> bits of all nodes that its inputs, of value or of order, wait for."""
    before: dict[str, int] = {}
    bit: dict[str, int] = {}
    for i, node in enumerate(graph.nodes.values()):
        bits = 0
        for edge in node.inputs:
            if edge is not None:
                bits |= before[edge.node] | bit[edge.node]
        before[node.name], bit[node.name] = bits, 1 << i
    return before


def _roots(graph: Graph) -> dict[Edge, Edge]:
    """Results that are another value's memory, written or reshaped -> the value that the memory was made for."""
    roots: dict[Edge, Edge] = {}
    for node in graph.nodes.values():
        if _is(node, "writes") or _is(node, "views"):
            roots[Edge(node.name, 0)] = _root(roots, node.operands[0])
    return roots


def _root(roots: Mapping[Edge, Edge], edge: Edge | None) -> Edge:
    assert edge is not None, "the first operand of a write or a view is not optional"
    return roots.get(edge, edge)


def _is(node: Node, kind: str) -> bool:
    return node.type in OPERATORS and bool(getattr(OPERATORS[node.type], kind))


def _reads(graph: Graph) -> Iterator[tuple[Node, int, Edge]]:
    for node in graph.nodes.values():
        for i, edge in enumerate(node.operands):
            if edge is not None:
                yield node, i, edge
