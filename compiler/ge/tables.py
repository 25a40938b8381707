"""Values that a program computes of its own tables alone, computed before it is lowered.

In a file such tables are constants, which GE folds. On a device they are parameters, which it does not fold. So both
get the values.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils._python_dispatch import _disable_current_modes

# Bytes of the largest value that replaces its computation.
MOST_FOLDED = 1 << 20


def fold_tables(program: ExportedProgram) -> None:
    """Replaces all values that follow from the program's constants alone by constants; weights do not count as such."""
    graph, specs = program.graph, program.graph_signature.input_specs
    tables = {s.arg.name: program.constants[str(s.target)] for s in specs if s.target in program.constants}
    known: dict[fx.Node, Any] = {node: tables[node.name] for node in graph.nodes if node.name in tables}
    derived = set(known)  # numbers of the code itself are constants everywhere
    for node in graph.nodes:
        if node.op == "call_function" and _pure(node) and known.keys() >= {*node.all_input_nodes}:
            with _disable_current_modes():  # shapes are traced under tensors without values
                value = node.target(*fx.node.map_arg(node.args, known.get), **fx.node.map_arg(node.kwargs, known.get))
            if not isinstance(value, Tensor) or value.nbytes <= MOST_FOLDED:
                known[node] = value
                derived |= {node} if derived & {*node.all_input_nodes} else set()
    for node, value in known.items():
        computed = node.op == "call_function" and node in derived and isinstance(value, Tensor)
        if computed and not known.keys() >= {*node.users}:
            _hold(program, node, value.contiguous())
    graph.eliminate_dead_code()


def _pure(node: fx.Node) -> bool:
    """Whether equal operands give an equal value, and none of them is changed."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _hold(program: ExportedProgram, node: fx.Node, value: Tensor) -> None:
    """A constant of the program in the node's place."""
    specs, name = program.graph_signature.input_specs, f"table_{node.name}"
    place = next(i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT)
    with program.graph.inserting_before(
        next(each for each in program.graph.nodes if each.name == specs[place].arg.name)
    ):
        table = program.graph.placeholder(f"c_{name}")  # as torch.export names it when it decomposes
    table.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(table)
    specs.insert(place, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(table.name), name, None))
    program.constants[name] = value
