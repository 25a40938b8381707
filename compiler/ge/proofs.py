"""Shows on a lowered GE graph itself that a device would run what was checked, and that no step copies a cache.

An interpreter finds inputs, weights and operands by their names, a device by numbers and by places in a file. So the
proof holds the two together.

A cache costs one read per step and no copy under two conditions. It is one RefData whose only reader is one write, and
all else reads the written value. Anything else makes GE copy the whole cache, or hand it back as an output that the
host has to copy (torchair's graph passes; measured on converted graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from draftwood.compiler.ge.constraints import check_constraints
from draftwood.compiler.ge.graph import SOURCES, VIEWS, Graph, Node
from draftwood.compiler.ge.interpreter import shapes
from draftwood.compiler.ge.weights import WeightIndex
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


def prove(
    graph: Graph, signature: StepSignature, index: WeightIndex, origin: Callable[[str], str] = str
) -> list[InPlace]:
    """All proofs of a graph whose weights lie where ``index`` says; that of each cache is returned.

    ``origin`` says of a node where it comes from.

    Raises:
        LoweringError: names the node that breaks a proof, or a rule of Ascend's operators.
    """
    prove_places(graph, signature, index)
    errors = [finding for finding in check_constraints(graph, shapes(graph)) if finding.level == "error"]
    if errors:
        _, node, rule, message, source = errors[0]
        raise LoweringError(
            f"step {signature.name}: {origin(node)}: {rule}: {message} ({source}); {len(errors)} such in all"
        )
    return prove_in_place(graph, signature)


def prove_places(graph: Graph, signature: StepSignature, index: WeightIndex) -> None:
    """Every weight is read where ``index`` says that it lies, inputs are numbered as the signature lists them, and
    operands and results as they are described; LoweringError otherwise."""
    numbers = {node.name: node.attributes.get("index") for node in graph.nodes.values() if node.type in SOURCES}
    wanted = {spec.name: number for number, spec in enumerate(signature.inputs)}
    for name in sorted(numbers.keys() | wanted.keys()):
        if numbers.get(name) != wanted.get(name):
            raise LoweringError(
                f"graph {graph.name}: input {name} has number {numbers.get(name)}; expected {wanted.get(name)}"
            )
    for node in graph.nodes.values():
        for side, ports in (("input", node.input_types), ("output", node.output_types)):
            names, values = (node.attributes.get(f"_{side}_name_{part}") for part in ("key", "value"))
            if (names, values) != ([port.name for port in ports], [*range(len(ports))]):
                raise LoweringError(
                    f"graph {graph.name}: node {node.name} lists its {side}s otherwise than it describes them"
                )

        if node.type == "FileConstant":
            _prove_weight(graph, node, index)


def _prove_weight(graph: Graph, node: Node, index: WeightIndex) -> None:
    stated = [node.attributes.get(name) for name in ("location", "offset", "length", "file_path", "file_id")]
    known = index.constants.get(node.name)
    if known is None or stated != [known.location, known.offset, known.length, "", ""]:
        place = f"{known.length} bytes of {known.location} from {known.offset}" if known else "no such weight"
        raise LoweringError(f"graph {graph.name}: weight {node.name} is read from {stated}; its index has {place}")


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
