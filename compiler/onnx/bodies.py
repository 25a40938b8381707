"""Loops in a graph: the outer values that their bodies read, and copies that read others."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir


def around(node: ir.Node) -> list[ir.Value]:
    """The values of the node's graph that the bodies of its loops read."""
    return [
        value
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH
        for inner in attribute.as_graph().all_nodes()
        for value in inner.inputs
        if value is not None and value.graph is node.graph
    ]


def attributes(node: ir.Node, read: Callable[[ir.Value], ir.Value | None]) -> list[ir.Attr]:
    """The node's attributes; a body is copied, and reads ``read(value)`` instead of each value around it."""
    return [
        ir.AttrGraph(attribute.name, _body(attribute.as_graph(), node, read))
        if attribute.type == ir.AttributeType.GRAPH
        else attribute
        for attribute in node.attributes.values()
    ]


def _body(graph: ir.Graph, node: ir.Node, read: Callable[[ir.Value], ir.Value | None]) -> ir.Graph:
    body = graph.clone(allow_outer_scope_values=True)
    for inner in body.all_nodes():
        for place, value in enumerate(inner.inputs):
            if value is not None and value.graph is node.graph:
                inner.replace_input_with(place, read(value))
    return body
