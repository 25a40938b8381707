"""What a graph tells GE beside what to compute: weights to bring nearer, and kernels to be made one.

Hints are operators of the traced program that torchair converts like all others, so that the graph compiled on a device
has those of the graph that was proved. No value depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from draftwood.manifest import Hints

# Of a graph that says nothing beside what it computes.
NONE = Hints()
# The attribute that names the kernel which GE is to make of all nodes that have the same there.
SUPER_KERNEL = "_super_kernel_scope"
# Products whose second operand is a weight.
_PRODUCTS = ("linear", "quantised_linear")
_ROUNDED = "rounded_linear"
# The first weight that a layer of the teacher reads, and the first behind them all.
_FIRST = re.compile(r"(?:verify\.)?decoder\.layers\.(\d+)\.attn_norm\.weight")
_BEHIND = re.compile(r"(?:verify\.)?decoder\.norm\.weight")


def give_hints(graph: fx.Graph, program: ExportedProgram, hints: Hints) -> None:
    """Adds what is asked for to the graph of a program in the NPU's operators; the program names the weights."""
    specs = program.graph_signature.input_specs
    weights = {spec.arg.name: str(spec.target) for spec in specs if spec.kind != InputKind.USER_INPUT}
    if hints.prefetch:
        _prefetch(graph, weights, hints.prefetch)
    if hints.super_kernels:
        _mark_layers(graph, weights)


def _prefetch(graph: fx.Graph, weights: dict[str, str], most: int) -> None:
    """From the end of each product on, up to ``most`` bytes of the weight of the next."""
    found = [(node, weight) for node in graph.nodes if (weight := _weight(node)) is not None and weight.name in weights]
    for (before, _), (_, weight) in pairwise(found):
        held = weight.meta["val"]
        with graph.inserting_after(before):
            size = min(most, held.numel() * held.element_size())
            graph.call_function(torch.ops.npu.npu_prefetch.default, (weight, before, size))


def _weight(node: fx.Node) -> fx.Node | None:
    ops = torch.ops.draftwood
    for names, place in ((_PRODUCTS, 1), ((_ROUNDED,), 2)):
        if node.op == "call_function" and any(node.target == getattr(ops, name).default for name in names):
            weight = node.args[place]
            return weight if isinstance(weight, fx.Node) else None
    return None


def _mark_layers(graph: fx.Graph, weights: dict[str, str]) -> None:
    """A scope of its own around every layer of the teacher, from its first norm to the next layer's."""
    inside = False
    for node, layer in list(_borders(graph, weights)):
        with graph.inserting_before(node):
            if inside:
                graph.call_function(torch.ops.air.scope_exit.default, ())
            if layer:
                keys, values = [SUPER_KERNEL, "_super_kernel_options"], [f"layer-{layer}", ""]
                graph.call_function(torch.ops.air.scope_enter.default, (keys, values))
            inside = bool(layer)


def _borders(graph: fx.Graph, weights: dict[str, str]) -> Iterator[tuple[fx.Node, str]]:
    """(first node, number) of every layer in the order of the graph; "" for what is behind them."""
    for node in graph.nodes:
        for given in node.all_input_nodes:
            name = weights.get(given.name, "")
            if found := _FIRST.fullmatch(name):
                yield node, found[1]
            elif _BEHIND.fullmatch(name):
                yield node, ""
