"""Shows on a lowered GE graph itself that no step copies a cache.

A cache costs one read per step and no copy under two conditions. It is one RefData whose only reader is one write, and
all else reads the written value. Anything else makes GE copy the whole cache, or hand it back as an output that the
host has to copy (torchair's graph passes; measured on converted graphs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from draftwood.compiler.ge.graph import VIEWS, Graph, Node
from draftwood.errors import LoweringError
from draftwood.manifest import StepSignature

# Operators that write through their first input.
WRITES = ("ScatterNdUpdate",)
# Operators that only read a cache.
_READS = ("FusedInferAttentionScore", "BatchMatMul", "BatchMatMulV2", "MatMul", "MatMulV2")


class InPlace(NamedTuple):
    """One cache, the node that writes it, and the nodes that read the written value."""

    cache: str
    write: str
    readers: tuple[str, ...]


def prove_in_place(graph: Graph, signature: StepSignature) -> list[InPlace]:
    """The proof for every cache of the graph, in the signature's order.

    Raises:
        LoweringError: names the cache and the node that breaks the proof.
    """
    caches = signature.caches
    stored = [node.name for node in graph.sources() if node.type == "RefData"]
    if stored != caches:
        odd = sorted(set(stored) ^ set(caches)) or stored
        raise LoweringError(f"graph {graph.name}: {odd[0]} is not a RefData exactly where the signature has a cache")
    return [_prove(graph, cache) for cache in caches]


def _prove(graph: Graph, cache: str) -> InPlace:
    readers = list(graph.readers(cache))
    if len(readers) != 1 or readers[0][0].type not in WRITES or readers[0][1] != 0:
        names = ", ".join(f"{node.type} {node.name}" for node, _ in readers) or "nothing"
        raise LoweringError(f"graph {graph.name}: cache {cache} must be read by one write alone; it is by {names}")
    write = readers[0][0]
    return InPlace(cache, write.name, tuple(sorted({node.name for node in _readers_of(graph, cache, write)})))


def _readers_of(graph: Graph, cache: str, node: Node) -> Iterator[Node]:
    for reader, _ in graph.readers(node.name):
        if reader.type in VIEWS:
            yield from _readers_of(graph, cache, reader)
        elif reader.type in _READS:
            yield reader
        elif reader.type == "NetOutput":
            raise LoweringError(f"graph {graph.name}: cache {cache} is an output of the graph, a copy of all of it")
        else:
            raise LoweringError(
                f"graph {graph.name}: {reader.type} {reader.name} reads the written cache {cache};"
                f" expected {', '.join(_READS)}, everything else copies it"
            )
