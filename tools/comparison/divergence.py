"""Where an NPU graph parts from the program it was lowered from: the first node whose value differs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from draftwood.compiler.ge.graph import Node
from draftwood.compiler.ge.torchair_bridge import decomposed, source_line
from draftwood.compiler.steps.rebuild import rebuild
from draftwood.compiler.steps.tracing import trace
from draftwood.manifest import GraphSignature
from draftwood.tools.reference.eager import EagerEngine
from draftwood.tools.reference.ge import GeEngine


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first node that differs, the operator and source line it came from, and by how much."""

    node: str
    operator: str
    source: str
    difference: float

    def __str__(self) -> str:
        return f"first at {self.node}, {self.operator} at {self.source}, by {self.difference:.1e}"


def first_divergence(
    eager: EagerEngine, ge: GeEngine, graph: GraphSignature, inputs: dict[str, Tensor], tolerance: float
) -> Divergence | None:
    """Runs the traced program and the GE graph on equal inputs, and compares value by value in execution order."""
    step = eager.draft_steps.get(graph.name) or rebuild(graph, eager.decoder)
    program = trace(step)
    values: dict[tuple[str, int], Tensor] = {}
    module = decomposed(program)
    # The program's placeholders are its weights and then its inputs; only a run of the module knows the order.
    flat = program._graph_module_flat_inputs(tuple(inputs[s.name].clone() for s in graph.inputs), {})
    _Recorder(module, values).run(*flat)
    nodes = {node.name: node for node in module.graph.nodes}
    found: list[Divergence] = []

    def observe(node: Node, outputs: tuple[Tensor, ...]) -> None:
        for declared, got in zip(node.output_types, outputs, strict=False):
            want = values.get((declared.source, declared.number))
            if found or want is None or want.shape != got.shape or not want.numel():
                continue
            difference = _difference(got, want)
            if difference > tolerance:
                traced = nodes[declared.source]
                found.append(
                    Divergence(
                        node.name, str(traced.target), source_line(traced).rpartition("draftwood/")[2], difference
                    )
                )

    ge.executor.interpreter(graph).run({name: value.clone() for name, value in inputs.items()}, observe)
    return found[0] if found else None


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, values: dict[tuple[str, int], Tensor]) -> None:
        super().__init__(module)
        self._values = values

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        for number, value in enumerate(result if isinstance(result, tuple) else (result,)):
            if isinstance(value, Tensor):
                self._values[n.name, number] = value
        return result


def _difference(got: Tensor, want: Tensor) -> float:
    if not want.is_floating_point():
        return 0.0 if torch.equal(got.to(want.dtype), want) else float("inf")
    apart = (got.float() - want.float()).abs().max()
    return float(torch.nan_to_num(apart / want.float().abs().max().clamp(min=1.0), nan=float("inf")))
