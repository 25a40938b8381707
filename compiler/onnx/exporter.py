"""PyTorch's ONNX exporter, without what takes most of its time.

``torch.onnx.export`` lists all operators' forms anew for every graph, and parses the source of each; here they are
listed once, unparsed. It also traces each program again, to replace operators that have no form; a program that has
none is taken as it is.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import onnx
import onnx_ir as ir
import torch
from onnxscript.values import TracedOnnxFunction
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _core, _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

from draftwood.compiler.steps.tracing import uncompiled
from draftwood.kernels import onnx_forms
from draftwood.kernels.contract import op

OPSET = 18  # the newest that Ascend's ATC documents


def _floor_divide(self, other):  # type: ignore[no-untyped-def]
    # Of whole numbers that are never negative; the exporter's form looks at signs, with an Equal that an HTP lacks.
    return op.Div(self, op.CastLike(other, self))


def _index_select(self, dim: int, index):  # type: ignore[no-untyped-def]
    # An HTP gives no int64 from a Gather as an output of the graph, but from a GatherElements it does.
    return op.GatherElements(self, index, axis=dim) if len(self.shape) == 1 else op.Gather(self, index, axis=dim)


def _flatten(self, start_dim: int = 0, end_dim: int = -1):  # type: ignore[no-untyped-def]
    # The exporter makes a Flatten if it can, and a Flatten has two dimensions.
    rank, known = len(self.shape), [size if isinstance(size, int) else 0 for size in self.shape]
    start, end = start_dim % rank, end_dim % rank + 1
    rest = [prod(known[start:end]) or -1, *(size or -1 for size in known[end:])]
    if rest.count(-1) < 2:  # 0 is the input's own size, -1 the one that is left
        return op.Reshape(self, [*known[:start], *rest])
    sizes = op.Shape(self, start=0, end=start), op.Constant(value_ints=[-1]), op.Shape(self, start=end)
    return op.Reshape(self, op.Concat(*sizes, axis=0))


def _to_dtype(self, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: str = ""):  # type: ignore[no-untyped-def]
    return op.Cast(self, to=dtype)


def _and(self, other):  # type: ignore[no-untyped-def]
    return op.And(self, other)


def _or(self, other):  # type: ignore[no-untyped-def]
    return op.Or(self, other)


# Replacements for forms of the exporter that some provider of the static graphs refuses, and forms that it lacks.
_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.floor_divide.default: _floor_divide,
    torch.ops.aten.index_select.default: _index_select,
    torch.ops.aten.flatten.using_ints: _flatten,
    torch.ops.aten.to.dtype: _to_dtype,
    torch.ops.aten.__and__.Tensor: _and,  # of truth values alone
    torch.ops.aten.__or__.Tensor: _or,
}


# The exporter leaves these out itself.
_LEFT_OUT = {operator.getitem, torch.ops.aten._assert_tensor_metadata.default}


def export(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], cpu: bool) -> ir.Model:
    """The program's graph at opset 18 as the exporter makes it, untidied; ``cpu`` allows operators that onnxruntime
    alone has."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that there is no torchvision
    try:
        registry = _registry(cpu)
        as_it_is = patch.object(_fx_passes, "decompose_with_registry", lambda program, registry: program)
        quickly = patch.object(type_promotion.InsertTypePromotion, "_run", _promote)
        decomposes = nullcontext() if not _has_forms(program, registry) else as_it_is
        with warnings.catch_warnings(), _read_once(), uncompiled(), quickly, decomposes:
            warnings.simplefilter("ignore")
            return _core.export(
                program,
                registry=registry,
                input_names=inputs,
                output_names=outputs,
                optimize=False,
                opset_version=OPSET,
                verbose=False,
            ).model
    finally:
        logger.setLevel(level)


def _promote(insertion: type_promotion.InsertTypePromotion) -> torch.fx.GraphModule:
    """Adds casts of operands if an operator promotes their types, as PyTorch's pass does. That pass runs every node
    anew, this one only those that it changes."""
    values = [node.meta.get("val") for node in insertion.module.graph.find_nodes(op="placeholder")]
    mode = insertion.fake_mode
    assert mode is not None
    with mode, torch._dispatch.python.enable_python_dispatcher(), torch.fx.traceback.preserve_node_meta():
        _Promoting(insertion.module, insertion.interpreter.type_promotion_table).run(*values)
    return insertion.module


class _Promoting(type_promotion._TypePromotionInterpreter):
    def run_node(self, n: torch.fx.Node) -> Any:
        before = n.target, n.args, n.kwargs
        rule = type_promotion.get_type_promotion_rule(n, self.type_promotion_table)
        if rule is not None:
            with self._set_current_node(n):
                self._maybe_promote_node(n, rule)
        known = n.op == "call_function" and "val" in n.meta and (n.target, n.args, n.kwargs) == before
        return n.meta["val"] if known else torch.fx.Interpreter.run_node(self, n)


@contextmanager
def _read_once() -> Iterator[None]:
    """In the body the schema of an operator is read once, not for every node."""
    read = ir.schemas.OpSignature.from_op_schema

    def known(schema: onnx.defs.OpSchema) -> ir.schemas.OpSignature:
        key = (schema.domain, schema.name, schema.since_version)
        if key not in _SIGNATURES:
            _SIGNATURES[key] = read(schema)
        return _SIGNATURES[key]

    with patch.object(ir.schemas.OpSignature, "from_op_schema", known):
        yield


_SIGNATURES: dict[tuple[str, str, int], ir.schemas.OpSignature] = {}


def _has_forms(program: ExportedProgram, registry: ONNXRegistry) -> bool:
    """Whether a program is of operators that have forms, and writes into none of its values."""
    known = {*_decomp.get_onnx_implemented_overloads(registry), *_LEFT_OUT}
    nodes = [node for part in _graphs(program) for node in part.graph.nodes if node.op == "call_function"]
    return all(node.target in known and not _writes(node.target) for node in nodes)


def _graphs(program: ExportedProgram) -> list[torch.fx.GraphModule]:
    """The program's graph, and those of the bodies of its loops."""
    return [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


@cache
def _registry(cpu: bool) -> ONNXRegistry:
    """The exporter's forms, and ours before them."""
    registry, theirs = ONNXRegistry(), _theirs()
    registry._opset_version = theirs.opset_version
    registry.functions = {target: list(forms) for target, forms in theirs.functions.items()}
    for target, form in (_FORMS | onnx_forms(cpu)).items():
        registry.register_op(target, form)
    return registry


@cache
def _theirs() -> ONNXRegistry:
    # The list of forms holds the domain of each, for which its source is parsed; the registry does not read it.
    with patch.object(TracedOnnxFunction, "function_ir", SimpleNamespace(domain="")):
        return ONNXRegistry.from_torchlib(opset_version=OPSET)
