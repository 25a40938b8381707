"""PyTorch's ONNX exporter, with its registry of operators' forms made once: ``torch.onnx.export`` parses the sources of
all of them anew for every graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _core
from torch.onnx._internal.exporter._registration import ONNXRegistry

from draftwood.kernels import onnx_forms
from draftwood.kernels.contract import op

OPSET = 18  # the newest that Ascend's ATC documents


def _floor_divide(self, other):  # type: ignore[no-untyped-def]
    # Of whole numbers that are never negative; the exporter's form looks at signs, with an Equal that an HTP lacks.
    return op.Div(self, op.CastLike(other, self))


def _index_select(self, dim: int, index):  # type: ignore[no-untyped-def]
    # An HTP gives no int64 from a Gather as an output of the graph, but from a GatherElements it does.
    return op.GatherElements(self, index, axis=dim) if len(self.shape) == 1 else op.Gather(self, index, axis=dim)


# Replacements for forms of the exporter that some provider of the static graphs refuses.
_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.floor_divide.default: _floor_divide,
    torch.ops.aten.index_select.default: _index_select,
}


def export(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], cpu: bool) -> ir.Model:
    """The program's graph at opset 18 as the exporter makes it, untidied; ``cpu`` allows operators that onnxruntime
    alone has."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about torchvision on every call
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _core.export(
                program,
                registry=_registry(cpu),
                input_names=inputs,
                output_names=outputs,
                optimize=False,
                opset_version=OPSET,
                verbose=False,
            ).model
    finally:
        logger.setLevel(level)


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
    return ONNXRegistry.from_torchlib(opset_version=OPSET)
