"""Lowers a traced step to ONNX at opset 18: weights outside, nothing inside that varies between builds."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from draftwood.compiler.onnx.weights import WeightSpan
from draftwood.compiler.steps.step import Step
from draftwood.kernels import onnx_forms

OPSET = 18  # the newest that Ascend's ATC documents


def lower_to_onnx(
    step: Step, program: ExportedProgram, weights: Mapping[str, WeightSpan], weights_file: str, path: Path
) -> None:
    """Writes ``path``; ``weights`` are not stored but referred to, in ``weights_file`` beside it."""
    signature = step.signature
    model = _translate(step, program)
    for value in list(model.graph.initializers.values()):
        name = step.weight_name(value.name or "")
        if name is not None:
            span = weights[name]
            value.const_value = ir.ExternalTensor(
                weights_file,
                span.offset,
                span.length,
                ir.DataType(value.dtype or ir.DataType.FLOAT),
                shape=ir.Shape(span.shape),
                name=value.name or "",
                base_dir=path.parent,
            )
    _own_int8(model.graph)
    for values, specs in ((model.graph.inputs, signature.inputs), (model.graph.outputs, signature.outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.shape = ir.Shape(list(spec.shape))
    _anonymise(model, keep_shapes=not step.dynamic)
    model.graph.name = signature.name
    ir.save(model, path)
    onnx.checker.check_model(str(path))


def _own_int8(graph: ir.Graph) -> None:
    """Every product has an int8 weight of its own, all at one place of the weights' file.

    On processors without VNNI onnxruntime makes uint8 of such a weight for each product that reads it, and refuses a
    graph in which two read the same one, as the levels of a draft read one output matrix.
    """
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.INT8:
            for number, (node, place) in enumerate(list(value.uses())[1:], 2):
                own = ir.Value(name=f"{value.name}.{number}", shape=value.shape, type=value.type)
                own.const_value = value.const_value
                graph.register_initializer(own)
                node.replace_input_with(place, own)


def _translate(step: Step, program: ExportedProgram) -> ir.Model:
    logger = logging.getLogger("torch.onnx")
    level, cpu = logger.level, bool(step.dynamic)  # a graph with run-time sizes is the CPU's alone
    logger.setLevel(logging.ERROR)  # it warns about torchvision on every call
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=onnx_forms(cpu),
                verbose=False,
                input_names=[t.name for t in step.signature.inputs],
                output_names=[t.name for t in step.signature.outputs],
            )
    finally:
        logger.setLevel(level)
    assert exported is not None
    return exported.model


def _anonymise(model: ir.Model, keep_shapes: bool) -> None:
    """Drops source paths and stack traces, and the sizes of inner values where they are run-time symbols."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = None
    ends = {*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()}
    names = {value.name for value in ends}
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if value in ends:
                continue
            if value.name in names:  # the exporter names inputs after it has named what is inside
                value.name = f"{value.name}.inner"
            if not keep_shapes:
                value.shape = None
    for value in ends:
        value.metadata_props.clear()
