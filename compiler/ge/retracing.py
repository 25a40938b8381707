"""A traced step traced once more, with other forms of its operators.

``ExportedProgram.run_decompositions`` looks through a program before it traces it, gives every composite operator of
PyTorch another form while it does, and makes a whole program of the result. Steps write into none of their values: of
them one trace gives the same nodes under the same names in a third of the time.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export._trace import _ignore_backend_decomps
from torch.export.exported_program import _override_composite_implicit_decomp
from torch.fx.experimental.proxy_tensor import make_fx

from draftwood.errors import LoweringError

_NUMBERED = re.compile(r"(.*)_(\d+)")

Forms = Mapping[Any, Callable[..., Any]]


def retraced(program: ExportedProgram, forms: Forms) -> fx.GraphModule:
    """The program's graph with its operators in other forms.

    Raises:
        LoweringError: the program writes into a value, or has a graph in its graph.
    """
    module = program.graph_module
    inputs = module.graph.find_nodes(op="placeholder")
    _check(module.graph)
    examples = [node.meta["val"] for node in inputs]
    composite = {target: form for target, form in forms.items() if _is_composite(target)}

    def run(*values: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return fx.Interpreter(module).run(*values)

    with (
        _ignore_backend_decomps(),
        detect_fake_mode(examples) or nullcontext(),
        _override_composite_implicit_decomp(composite),
        torch.no_grad(),
        enable_python_dispatcher(),
    ):
        table = {target: forms[target] for target in forms.keys() - composite.keys()}
        traced = make_fx(run, decomposition_table=table)(*examples)
    traced.graph.eliminate_dead_code()
    _rename(traced.graph, [node.name for node in inputs])
    return traced


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        reads = node.target is operator.getitem or (schema is not None and not schema.is_mutable)
        if node.op not in ("placeholder", "output") and not reads:
            raise LoweringError(f"operator {node.target}: it writes into a value, or has a graph of its own")


def _is_composite(target: Any) -> bool:
    """Whether PyTorch makes the operator of others, before it looks for a form."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def _rename(graph: fx.Graph, inputs: list[str]) -> None:
    """Names the inputs; another node of such a name gets the next number, as torch.export does it."""
    used, numbers = set[str](), defaultdict[str, int](int)
    for place, node in enumerate(list(graph.nodes)):
        name = inputs[place] if place < len(inputs) else node.name
        if name in used:
            numbered = _NUMBERED.match(name)
            base = numbered[1] if numbered else name
            name = f"{base}_{numbers[base] + 1}"
        if numbered := _NUMBERED.match(name):
            numbers[numbered[1]] = max(numbers[numbered[1]], int(numbered[2]))
        used.add(name)
        node.name = name
        if place < len(inputs):
            node.target = name
