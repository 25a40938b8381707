"""Whether the graph that a device would compile is the one that was proved, checked before GE compiles it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import Graph
from draftwood.compiler.ge.lowering import drop_dead, fold_constants
from draftwood.compiler.ge.proofs import WRITES
from draftwood.errors import LoweringError

_GIVEN = ("Data", "RefData", "FileConstant")
# Attributes that torch_npu writes from 2.9 on, with the defaults of CANN's own registration, which 2.8 leaves to it.
_DEFAULTS = {"FusedInferAttentionScore": {"pse_type": 0, "out_dtype": 0}}


def same_as_proved(definition: Any, constants: Sequence[Tensor], proved: Graph, where: str) -> None:
    """Holds torchair's graph (a ``GraphDef``, which is changed: constants are folded, as GE does) against the file's.

    Args:
        constants: tensors that torchair's graph may take as inputs; in the file's graph they are constants.

    Raises:
        LoweringError: names the first node of the proved graph that the other lacks.
    """
    fold_constants(definition)
    drop_dead(definition)
    graph = Graph.of(definition)
    prints, proved_prints = fingerprints(graph, constants), fingerprints(proved, constants)
    if _ends(graph, prints) == _ends(proved, proved_prints) and len(graph.kernels) == len(proved.kernels):
        return
    there = set(prints.values())
    lost = next(
        (proved.nodes[name] for name, fingerprint in proved_prints.items() if fingerprint not in there), proved.output
    )
    known = set(proved_prints.values())
    other = next((graph.nodes[name] for name, fingerprint in prints.items() if fingerprint not in known), graph.output)
    raise LoweringError(
        f"{where}: this device's torchair makes another graph than the one that was proved: first at {lost.type}"
        f" {lost.name}, in whose place is {other.type}; build the bundle with this machine's torch_npu"
    )


def fingerprints(graph: Graph, constants: Sequence[Tensor] = ()) -> dict[str, str]:
    """Node -> how its value is computed.

    Inputs, weights and ``constants`` go by type and shape, since a device numbers them otherwise.
    """
    names: dict[str, str] = {}
    for node in graph.nodes.values():
        inputs = [f"{names[e.node]}:{e.output}" if e is not None else "-" for e in node.operands]
        while inputs and inputs[-1] == "-":  # a release knows more operands than another
            inputs.pop()
        if node.type in _GIVEN:
            text = str(node.output_types[0][1:3])
        elif node.type == "Const":
            value = node.attributes["value"]
            known = any(value.dtype == constant.dtype and torch.equal(value, constant) for constant in constants)
            text = str(node.output_types[0][1:3]) if known else str(value.tolist())
        else:
            # A group of ranks has another name on every device.
            attributes = {k: v for k, v in sorted(node.attributes.items()) if not k.startswith("_") and k != "group"}
            attributes = _DEFAULTS.get(node.type, {}) | attributes
            text = f"{node.type} {sorted(attributes.items())} {inputs}"
        names[node.name] = hashlib.sha256(text.encode()).hexdigest()
    return names


def _ends(graph: Graph, names: dict[str, str]) -> list[str]:
    """The nodes that reach the outputs and the written caches."""
    ends = [names[edge.node] for edge in graph.output.operands if edge is not None]
    return ends + [names[node.name] for node in graph.nodes.values() if node.type in WRITES]
