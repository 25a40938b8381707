"""Lowers a traced step to ONNX at opset 18: weights outside, nothing inside that varies between builds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import onnx
import onnx_ir as ir
from torch.export import ExportedProgram

from draftwood.compiler.onnx.exporter import export
from draftwood.compiler.onnx.stamping import stamp
from draftwood.compiler.onnx.texts import for_texts
from draftwood.compiler.onnx.tidying import finish, tidy
from draftwood.compiler.onnx.weights import WeightSpan
from draftwood.compiler.steps.short import ShortStep
from draftwood.compiler.steps.step import Step
from draftwood.manifest import StepSignature

_PACKAGE = Path(__file__).parents[2]


def lower_to_onnx(
    step: Step,
    program: ExportedProgram,
    weights: Mapping[str, WeightSpan],
    weights_file: str,
    path: Path,
    several: Iterable[StepSignature] = (),
    short: ShortStep | None = None,
) -> None:
    """Writes ``path`` and, next to it, the graphs for ``several`` texts by their names. ``weights`` are not stored: the
    graphs refer to ``weights_file`` in the same folder. ``program`` is the trace of ``step``, or of ``short``."""
    model = _translate(step, program) if short is None else stamp(_translate(short.step, program), short, step)
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
    for signature in several:
        _save(for_texts(model, signature), signature, path.with_name(f"{signature.name}.onnx"), keep_shapes=False)
    _save(model, step.signature, path, keep_shapes=not step.dynamic)


def _save(model: ir.Model, signature: StepSignature, path: Path, keep_shapes: bool) -> None:
    """Writes a graph with the shapes of its signature."""
    finish(model)
    _own_int8(model.graph)
    for values, specs in ((model.graph.inputs, signature.inputs), (model.graph.outputs, signature.outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.shape = ir.Shape(list(spec.shape))
    _anonymise(model, keep_shapes)
    model.graph.name = signature.name
    ir.save(model, path)
    onnx.checker.check_model(str(path))


def _own_int8(graph: ir.Graph) -> None:
    """Gives every product an int8 weight of its own; the copies share one place in the weights' file.

    On processors without VNNI onnxruntime turns such a weight into uint8 for each product that reads it. It refuses a
    graph in which two products read one weight, as the levels of a draft read one output matrix.
    """
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.INT8:
            for number, (node, place) in enumerate(list(value.uses())[1:], 2):
                copy = ir.Value(name=f"{value.name}.{number}", shape=value.shape, type=value.type)
                copy.const_value = value.const_value
                graph.register_initializer(copy)
                node.replace_input_with(place, copy)


def _translate(step: Step, program: ExportedProgram) -> ir.Model:
    inputs, outputs = ([t.name for t in tensors] for tensors in (step.signature.inputs, step.signature.outputs))
    model = export(program, inputs, outputs, cpu=bool(step.dynamic))  # one with run-time sizes is the CPU's alone
    tidy(model)
    return model


def _anonymise(model: ir.Model, keep_shapes: bool) -> None:
    """Drops stack traces, and the sizes of inner values that are run-time symbols. Our own line of a trace stays in the
    node's name, so that a message about the node says where it comes from."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = None
    ends = {*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()}
    names = {value.name for value in ends}
    for node in model.graph.all_nodes():
        node.name = f"{node.name}{_source(node)}"
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if value in ends:
                continue
            if value.name in names:  # the exporter names inputs after inner values
                value.name = f"{value.name}.inner"
            if not keep_shapes:
                value.shape = None
    for value in ends:
        value.metadata_props.clear()


def _source(node: ir.Node) -> str:
    """``@FILE:LINE`` of the package's own last line in a node's trace, with ``/``; nothing if there is none."""
    return _last_line(node.metadata_props.get("pkg.torch.onnx.stack_trace") or "")


@lru_cache(maxsize=4096)  # the nodes of all blocks have the same few traces
def _last_line(trace: str) -> str:
    frames = [(Path(file), line) for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]
    places = [
        f"@{file.relative_to(_PACKAGE).as_posix()}:{line}" for file, line in frames if file.is_relative_to(_PACKAGE)
    ]
    return places[-1] if places else ""
