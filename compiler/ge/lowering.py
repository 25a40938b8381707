"""Lowers a traced step to a GE graph: weights outside, caches as RefData, equal bytes for equal inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from draftwood.compiler.ge.graph import GE_TYPES, SOURCES, list_ports, node_of, tensor_of
from draftwood.compiler.ge.operators import OPERATORS, BoundNode
from draftwood.compiler.ge.proofs import WRITES
from draftwood.compiler.ge.stamping import Converted, stamp
from draftwood.compiler.ge.tables import MOST_FOLDED
from draftwood.compiler.ge.torchair_bridge import convert, ge_ir
from draftwood.compiler.ge.weights import Constant, WeightIndex
from draftwood.compiler.steps.short import ShortStep
from draftwood.compiler.steps.step import Step
from draftwood.errors import LoweringError
from draftwood.manifest import StepSignature

# torchair's attributes for its own online runtime; they describe inputs that a lowered graph no longer has.
_RUNTIME_ATTRIBUTES = ("_input_placements", "_output_dtypes", "_executor_type")
_PROTO_TYPES = {
    torch.float32: "DT_FLOAT",
    torch.float16: "DT_FLOAT16",
    torch.bfloat16: "DT_BF16",
    torch.int8: "DT_INT8",
    torch.int32: "DT_INT32",
    torch.int64: "DT_INT64",
    torch.uint64: "DT_UINT64",
    torch.bool: "DT_BOOL",
}

_GE_NUMBERS = {dtype: number for number, dtype in GE_TYPES.items()}


def lower_to_ge(step: Step, program: ExportedProgram, weights: WeightIndex, short: ShortStep | None = None) -> bytes:
    """The bytes of the step's ``.air`` file: a ``ge.proto.ModelDef`` with one graph.

    Inputs are named and numbered as the signature lists them. Aliased outputs become writes into RefData inputs and
    leave the outputs. Parameters become FileConstants that point to where ``weights`` says. ``program`` is the
    trace of ``step``, or of ``short``.

    Raises:
        Unlike: a graph of all blocks cannot be made of that of ``short``.
        LoweringError: an operator that torchair has no converter for, or an input that the graph does not use.
    """
    signature = step.signature
    graph, inputs, parameters = _converted(short.step if short else step, program)
    if short is not None:
        graph, inputs, parameters = stamp(graph, short, step, inputs, parameters)
    constants = {placeholder: str(step.weight_name(name)) for placeholder, name in parameters.items()}
    for op in graph.op:
        if op.type == "Data" and op.name in constants:
            name = constants[op.name]
            _as_file_constant(op, weights.constants[name], weights.constants[name].dtype or weights.dtype)
    fold_constants(graph)
    drop_dead(graph)
    _rename(graph, _names(graph, inputs | constants))
    _number_inputs(graph, signature)
    _describe_operands(graph)
    graph.name = signature.name
    for attribute in _RUNTIME_ATTRIBUTES:
        graph.attr.pop(attribute, None)
    model = ge_ir().ModelDef(name=signature.name, version=1, graph=[graph])
    return model.SerializeToString(deterministic=True)


def _converted(step: Step, program: ExportedProgram) -> Converted:
    """torchair's graph, with the constants of the trace in it."""
    signature = step.signature
    numbers = {spec.name: i for i, spec in enumerate(signature.outputs)}
    placeholders = dict(zip((s.name for s in signature.inputs), program.graph_signature.user_inputs, strict=True))
    written = {str(placeholders[cache]): numbers[output] for output, cache in signature.aliases.items()}
    graph = convert(program, written, signature.name)
    inputs, parameters, embedded = _placeholders(step, program)
    for op in graph.op:
        if op.type == "Data" and op.name in embedded:
            _as_const(op, embedded[op.name])
    return Converted(graph, inputs, parameters)


def _placeholders(step: Step, program: ExportedProgram) -> tuple[dict[str, str], dict[str, str], dict[str, Tensor]]:
    """Placeholders of (the signature's inputs, the module's parameters, constants of the trace)."""
    inputs: dict[str, str] = {}
    parameters: dict[str, str] = {}
    embedded: dict[str, Tensor] = {}
    names = iter(spec.name for spec in step.signature.inputs)
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            inputs[spec.arg.name] = next(names)
        elif step.weight_name(str(spec.target)) is not None:
            parameters[spec.arg.name] = str(spec.target)
        else:
            embedded[spec.arg.name] = program.constants[str(spec.target)]
    return inputs, parameters, embedded


def _as_file_constant(op: Any, constant: Constant, dtype: str) -> None:
    name, messages = op.name, ge_ir()
    kind = messages.DataType.Value(_PROTO_TYPES[getattr(torch, dtype)])
    op.Clear()
    op.name, op.type = name, "FileConstant"
    op.attr["shape"].list.val_type = 2  # a list of integers
    op.attr["shape"].list.i.extend(constant.shape)
    op.attr["dtype"].dt = _GE_NUMBERS[getattr(torch, dtype)]  # an attribute has GE's own number
    op.attr["file_path"].s = b""
    op.attr["file_id"].s = b""
    op.attr["location"].s = constant.location.encode()
    op.attr["offset"].i = constant.offset
    op.attr["length"].i = constant.length
    desc = op.output_desc.add()
    desc.name, desc.dtype, desc.layout = "y", kind, "ND"
    desc.shape.dim.extend(constant.shape)
    list_ports(op)


def _as_const(op: Any, value: Tensor) -> None:
    name, kind = op.name, ge_ir().DataType.Value(_PROTO_TYPES[value.dtype])
    op.Clear()
    op.name, op.type = name, "Const"
    tensor = op.attr["value"].t
    tensor.desc.dtype, tensor.desc.layout = kind, "ND"
    tensor.desc.shape.dim.extend(value.shape)
    tensor.data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    desc = op.output_desc.add()
    desc.name, desc.dtype, desc.layout = "y", kind, "ND"
    desc.shape.dim.extend(value.shape)
    list_ports(op)


def _describe_operands(graph: Any) -> None:
    """Operands that are an input or a weight are described by the type that it lies in: the trace had another one. GE
    infers types anew, but a reader of the file alone believes it."""
    types = {op.name: op.output_desc[0].dtype for op in graph.op if op.type in (*SOURCES, "FileConstant", "Const")}
    for op in graph.op:
        sources = [text.rpartition(":") for text in op.input]
        for (name, _, output), desc in zip(
            (source for source in sources if source[2] != "-1"), op.input_desc, strict=False
        ):
            if name in types and output == "0":
                desc.dtype = types[name]


def fold_constants(graph: Any) -> None:
    """Computes values that depend on constants alone, as GE does before it compiles; large results are left to it."""
    known: dict[str, Tensor] = {}
    for op in graph.op:
        if op.type == "Const":
            known[op.name] = tensor_of(op.attr["value"].t)
        elif len(op.output_desc) == 1 and op.input and op.type in OPERATORS:
            operands = [known.get(text.rpartition(":")[0]) if text else None for text in op.input]
            if any(text and value is None for text, value in zip(op.input, operands, strict=True)):
                continue
            (value,) = BoundNode.of(node_of(op))(operands)
            if value.numel() * value.element_size() <= MOST_FOLDED:
                known[op.name] = value
                _as_const(op, value)


def drop_dead(graph: Any) -> None:
    """Removes unused nodes: converters leave constants of operators that they folded."""
    by_name = {op.name: op for op in graph.op}
    alive: set[str] = set()
    queue = [op.name for op in graph.op if op.type in ("NetOutput", *SOURCES, *WRITES)]
    while queue:
        name = queue.pop()
        if name not in alive:
            alive.add(name)
            queue += [text.rpartition(":")[0] for text in by_name[name].input if text]
    for number in reversed(range(len(graph.op))):
        if graph.op[number].name not in alive:
            del graph.op[number]


def _names(graph: Any, known: Mapping[str, str]) -> dict[str, str]:
    """New name of every node: inputs and weights by their own, all else by type and order."""
    counter: Counter[str] = Counter()
    names = {}
    for op in graph.op:
        if op.name in known:
            names[op.name] = known[op.name]
        elif op.type == "NetOutput":
            names[op.name] = "NetOutput"
        else:
            names[op.name] = f"{op.type}_{counter[op.type]}"
            counter[op.type] += 1
    if len(set(names.values())) != len(names):
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        raise LoweringError(f"graph {graph.name}: two nodes would be named {twice}; rename the weight or input")
    return names


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    for op in graph.op:
        op.name = names[op.name]
        for i, text in enumerate(op.input):
            if text:
                name, _, output = text.rpartition(":")
                op.input[i] = f"{names[name]}:{output}"


def _number_inputs(graph: Any, signature: StepSignature) -> None:
    """Input numbers as the signature counts; a cache that is written becomes RefData."""
    written = set(signature.caches)
    data = {op.name: op for op in graph.op if op.type in SOURCES}
    for number, spec in enumerate(signature.inputs):
        op = data.pop(spec.name, None)
        if op is None:
            raise LoweringError(f"step {signature.name}: input {spec.name} is not used by the graph; drop it")
        op.attr["index"].i = number
        # Examples lie on the CPU, which torchair notes; on the device every input lies in its memory.
        op.attr.pop("_host_tensor", None)
        for desc in (*op.input_desc, *op.output_desc):
            desc.device_type = "NPU"
        if spec.name in written:
            op.type = "RefData"
    if data:
        raise LoweringError(f"step {signature.name}: input {next(iter(data))} is not in the signature")
