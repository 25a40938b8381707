"""Executes a lowered GE graph on a CPU with torch, operator for operator; the reference that devices are held to.

Every operator is executed or refused, none is skipped. A cache (``RefData``) is written in place, in the caller's
tensor. On a device independent operators run in any order. So a graph is refused if that order decides which values a
reader of a written cache sees.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import GE_TYPES, SOURCES, Declared, Graph, Node
from draftwood.compiler.ge.memory import memory
from draftwood.compiler.ge.operators import BoundNode
from draftwood.compiler.ge.operators.collective import COLLECTIVES
from draftwood.errors import BundleError, LoweringError, RequestError

Call = Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]
Observer = Callable[[Node, tuple[Tensor, ...]], None]

_GIVEN = (*SOURCES, "FileConstant")


class Meeting(NamedTuple):
    """A collective that a rank has come to, and the rank's part of it."""

    node: Node
    value: Tensor


# Yields at every collective, is sent its result, and returns the outputs.
Run = Generator[Meeting, Tensor, list[Tensor]]


class Interpreter:
    """A graph with its weights, ready to run.

    Args:
        graph: a lowered graph.
        constants: the weights by name, at least those that the graph reads.

    Raises:
        LoweringError: an operator or attribute that is not known, or writes whose order is not defined.
        BundleError: a weight is missing or is not what the graph declares.
    """

    def __init__(self, graph: Graph, constants: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self._plan = _Plan.of(graph)
        self._constants = {node.name: _weight(graph, node, constants) for node in _file_constants(graph)}

    def run(self, inputs: Mapping[str, Tensor], observe: Observer | None = None) -> list[Tensor]:
        """The graph's outputs in order; RefData inputs are written in place.

        ``observe`` is called with every node and its outputs, in execution order; it must not change them.

        Raises:
            RequestError: an input is missing, unknown, or not what the graph declares.
            LoweringError: a node cannot be executed as it is stated; names it.
        """
        with torch.no_grad():
            return _alone(self.started(inputs, observe))

    def started(self, inputs: Mapping[str, Tensor], observe: Observer | None = None) -> Run:
        """`run` as one rank of several: stops at every collective, and goes on with the result that it is sent."""
        _check_inputs(self.graph, inputs)
        values = {**self._constants, **inputs}
        memories = {t.untyped_storage().data_ptr() for t in values.values()}
        outputs = yield from self._plan.execute(values, observe)
        # A device copies its outputs; a view of a cache would change with the next step.
        return [t.clone() if t.untyped_storage().data_ptr() in memories else t.contiguous() for t in outputs]


def shapes(graph: Graph) -> dict[str, tuple[tuple[torch.dtype, tuple[int, ...]], ...]]:
    """Element type and shape of every output of every node, without weights or values.

    Raises:
        LoweringError: as ``Interpreter``, or a shape depends on values of the inputs.
    """
    sources = {}
    for node in graph.nodes.values():
        if node.type in _GIVEN:
            dtype, shape = _declared(graph, node)
            sources[node.name] = torch.empty(shape, dtype=dtype, device="meta")
    described = {}

    def note(node: Node, outputs: tuple[Tensor, ...]) -> None:
        described[node.name] = tuple((t.dtype, tuple(t.shape)) for t in outputs)

    _alone(_Plan.of(graph, {}).execute(sources, note))
    return described


def _as_before(
    known: dict[Any, tuple[Tensor, ...]], call: BoundNode, operands: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """A node's outputs, without values; those of an earlier node that computes the same of the same shapes, as the
    nodes of a graph's blocks do."""
    if not any(x is not None and x.is_meta for x in operands):
        return call(operands)
    described = tuple(None if x is None else (x.dtype, x.shape, x.stride(), _content(x)) for x in operands)
    key = call.node.type, call.slots, repr(call.attributes), len(call.node.output_types), described
    if key not in known:
        known[key] = call(operands)
    return known[key]


def _content(value: Tensor) -> tuple[Any, ...]:
    """The numbers of a constant."""
    return () if value.is_meta else tuple(value.reshape(-1).tolist())


def _alone(run: Run) -> list[Tensor]:
    """The outputs of a run without collectives."""
    try:
        node, _ = next(run)
    except StopIteration as end:
        outputs: list[Tensor] = end.value
        return outputs
    raise LoweringError(f"node {node.name} ({node.type}): joins several ranks; run all of them together")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a graph is executed.

    ``calls``: the nodes that compute, bound to their operators. ``last``: a node -> the values that are not read after
    it. ``owned``: writes that go into a value of the graph's own, which is copied first. ``detached``: nodes whose
    result must not share memory with a cache, which is written after them.
    """

    graph: Graph
    calls: Mapping[str, Call]
    last: dict[str, list[str]]
    owned: frozenset[str]
    detached: frozenset[str]

    @classmethod
    def of(cls, graph: Graph, known: dict[Any, tuple[Tensor, ...]] | None = None) -> _Plan:
        """``known``: outputs without values, which nodes that compute the same share."""
        _check_order(graph)
        sources = (*_GIVEN, "Const", "NetOutput")
        bound = {node.name: BoundNode.of(node) for node in graph.nodes.values() if node.type not in sources}
        calls: Mapping[str, Call] = bound
        if known is not None:
            calls = {name: partial(_as_before, known, call) for name, call in bound.items()}
        owned, detached = memory(graph)
        return cls(graph, calls, _last_reads(graph), owned, detached)

    def execute(self, inputs: Mapping[str, Tensor], observe: Observer | None) -> Run:
        values: dict[str, tuple[Tensor, ...]] = {}
        result: list[Tensor] = []
        for node in self.graph.nodes.values():
            if node.type == "NetOutput":
                result = [_output(self.graph, node, i, values) for i in range(len(node.operands))]
                continue
            if node.type in COLLECTIVES and not (value := self._operand(node, values)).is_meta:
                outputs: tuple[Tensor, ...] = ((yield Meeting(node, value)),)
            else:
                outputs = self._compute(node, inputs, values)
            if observe is not None:
                observe(node, outputs)
            values[node.name] = outputs
            for name in self.last[node.name]:
                del values[name]
        return result

    @staticmethod
    def _operand(node: Node, values: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
        (edge,) = node.operands
        assert edge is not None, node
        return values[edge.node][edge.output].contiguous()

    def _compute(
        self, node: Node, inputs: Mapping[str, Tensor], values: Mapping[str, tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        if node.type in _GIVEN:
            return (inputs[node.name],)
        if node.type == "Const":
            return (node.attributes["value"],)
        operands = [None if edge is None else values[edge.node][edge.output] for edge in node.operands]
        if node.name in self.owned:
            assert operands[0] is not None, node
            operands[0] = operands[0].clone()
        outputs = self.calls[node.name](operands)
        return tuple(t.clone() for t in outputs) if node.name in self.detached else outputs


def _check_order(graph: Graph) -> None:
    """Every edge must lead to an output of a node before."""
    ends = [node.name for node in graph.nodes.values() if node.type == "NetOutput"]
    if len(ends) != 1:
        raise LoweringError(f"graph {graph.name}: {len(ends)} NetOutput nodes, expected 1")
    seen: dict[str, int] = {}
    for node in graph.nodes.values():
        for edge in node.inputs:
            if edge is not None and edge.output >= seen.get(edge.node, -1):
                raise LoweringError(
                    f"graph {graph.name}: node {node.name} reads {edge.node}:{edge.output},"
                    " which no node before it gives"
                )
            if edge is None and node.type == "NetOutput":
                raise LoweringError(f"graph {graph.name}: an output of the graph is left out")
        seen[node.name] = len(node.output_types)


def _last_reads(graph: Graph) -> dict[str, list[str]]:
    reader = {name: name for name in graph.nodes}  # a value that nobody reads goes at once
    for node in graph.nodes.values():
        for edge in node.operands:
            if edge is not None:
                reader[edge.node] = node.name
    last: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for name, final in reader.items():
        last[final].append(name)
    return last


def _output(graph: Graph, node: Node, i: int, values: Mapping[str, tuple[Tensor, ...]]) -> Tensor:
    edge = node.operands[i]
    assert edge is not None, "a graph's outputs are not optional"
    value, declared = values[edge.node][edge.output], node.input_types[i]
    if value.dtype != declared.dtype or (declared.shape is not None and tuple(value.shape) != declared.shape):
        raise LoweringError(
            f"graph {graph.name}: output {i}, of {graph.nodes[edge.node].type} {edge.node}, is {_type(value)};"
            f" declared is {_text(declared)}"
        )
    return value


def _file_constants(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes.values() if node.type == "FileConstant"]


def _weight(graph: Graph, node: Node, constants: Mapping[str, Tensor]) -> Tensor:
    dtype, shape = _declared(graph, node)
    value = constants.get(node.name)
    if value is None:
        raise BundleError(f"graph {graph.name}: weight {node.name} is missing; bind the weights again")
    if (value.dtype, tuple(value.shape)) != (dtype, shape):
        raise BundleError(
            f"graph {graph.name}: weight {node.name} is {_type(value)}; expected {_text(node.output_types[0])};"
            " bind the weights again"
        )
    return value


def _check_inputs(graph: Graph, inputs: Mapping[str, Tensor]) -> None:
    sources = {node.name: node for node in graph.sources()}
    odd = sorted(inputs.keys() ^ sources.keys())
    if odd:
        what = "is unknown" if odd[0] in inputs else "is missing"
        raise RequestError(f"graph {graph.name}: input {odd[0]} {what}; expected {', '.join(sources)}")
    for name, node in sources.items():
        dtype, shape = _declared(graph, node)
        value = inputs[name]
        if (value.dtype, tuple(value.shape)) != (dtype, shape) or not value.is_contiguous():
            strides = "" if value.is_contiguous() else ", not contiguous"
            raise RequestError(
                f"graph {graph.name}: input {name} is {_type(value)}{strides};"
                f" expected {_text(node.output_types[0])}, contiguous"
            )


def _declared(graph: Graph, node: Node) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of an input or a weight. Its description, and a weight's attributes, must agree."""
    (declared,) = node.output_types
    if declared.dtype is None or declared.shape is None:
        raise LoweringError(f"graph {graph.name}: {node.type} {node.name} declares no type or no shape")
    if node.type == "FileConstant":
        stated = GE_TYPES.get(node.attributes.get("dtype", -1)), tuple(node.attributes.get("shape", ()))
        if stated != (declared.dtype, declared.shape):
            kind = "?" if stated[0] is None else str(stated[0]).removeprefix("torch.")
            raise LoweringError(
                f"graph {graph.name}: FileConstant {node.name} is {kind}{list(stated[1])} by its attributes dtype"
                f" and shape, {_text(declared)} by its description"
            )
    return declared.dtype, declared.shape


def _type(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.") + str(list(value.shape))


def _text(declared: Declared) -> str:
    kind = str(declared.dtype).removeprefix("torch.")
    return kind + (str(list(declared.shape)) if declared.shape is not None else "")
