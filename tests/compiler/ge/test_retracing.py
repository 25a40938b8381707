"""A trace in other forms: the nodes that torch.export's own way gives, under their names."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from draftwood.compiler.ge.forms import npu_forms
from draftwood.compiler.ge.retracing import retraced
from draftwood.compiler.steps.accept import accept_step
from draftwood.compiler.steps.step import StepSizes
from draftwood.compiler.steps.tracing import trace, uncompiled
from draftwood.errors import LoweringError


class Layer(nn.Module):
    """A product that has a form, and an input that is named as the trace names a node of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor, add: Tensor) -> tuple[Tensor, ...]:
        rows = nn.functional.linear(x, self.weight).add(self.table)
        return rows[0], rows.masked_fill(add.to(torch.bool), 0.0).softmax(-1)


def layer() -> ExportedProgram:
    return torch.export.export(Layer().requires_grad_(False), (torch.ones(2, 4), torch.ones(2, 3)), strict=False)


def acceptance() -> ExportedProgram:
    return trace(accept_step("greedy", 4, StepSizes(branch_rows=4, path_rows=3), 50, 0, 2))


def nodes(module: fx.GraphModule) -> list[tuple[Any, ...]]:
    return [
        (
            node.name,
            node.op,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            str(node.meta.get("val")),
            node.meta.get("stack_trace") if node.op == "call_function" else None,
        )
        for node in module.graph.nodes
    ]


@pytest.mark.parametrize("made", [layer, acceptance])
def test_nodes_are_those_of_a_decomposed_program(made: Callable[[], ExportedProgram]) -> None:
    table = {
        operator: form
        for operator, form in torch.export.default_decompositions().items()
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    }
    got = nodes(retraced(made(), npu_forms()))
    assert got == nodes(made().run_decompositions(table | npu_forms()).graph_module)
    assert "draftwood.linear.default" in {target for _, _, target, *_ in got}


def test_a_program_that_writes_is_refused() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clone().add_(1)

    program = torch.export.export(Writes(), (torch.ones(2),), strict=False)
    with pytest.raises(LoweringError, match=r"operator aten\.add_\.Tensor: it writes into a value"):
        retraced(program, npu_forms())


def test_a_graph_is_code_when_it_is_called() -> None:
    """And then of its last form."""
    with uncompiled():
        module = fx.symbolic_trace(lambda x: x + 1)
        assert not hasattr(module, "_code")
        (add,) = module.graph.find_nodes(op="call_function", target=operator.add)
        add.args = (add.args[0], 2)
        module.recompile()
        assert not hasattr(module, "_code")
    assert module(3) == 5 and "2" in module.code
