"""Matrices as this machine's kernels read them, in a bundle's weights file after the plain ones.

onnxruntime lays a constant matrix out when it opens a graph, and every session keeps a copy of its own in memory. A
layout that lies in the file is mapped instead. So all graphs of a bundle and all processes that serve it share its
pages. It is named by a hash of its content: a machine whose kernels want another layout finds none of that name, and
makes its own in memory.

onnxruntime writes layouts itself, into the file of a model that it saves
(``session.save_external_prepacked_constant_initializers``). Here every matrix is such a model, one product, so one
matrix is in memory at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import onnx
import onnxruntime as ort

from draftwood.compiler.onnx.weights import Appending
from draftwood.manifest import LAYOUTS
from draftwood.threads import pool_options

_PRODUCTS = ("MatMulNBits", "MatMulIntegerToFloat", "MatMulInteger", "MatMul", "Gemm")
_MODEL, _DATA = "product.onnx", "product.bin"
_OPTIONS = {
    "session.optimized_model_external_initializers_file_name": _DATA,
    "session.optimized_model_external_initializers_min_size_in_bytes": "1",
    "session.save_external_prepacked_constant_initializers": "1",
}

# Where a matrix lies in the weights file: its first byte, and how many there are.
Span = tuple[int, int]


def lay_out(weights: Path, graphs: Sequence[Path]) -> None:
    """Adds the layouts of all matrices that the graphs multiply by to ``weights``, and tells the graphs of them."""
    models = {path: onnx.load(str(path), load_external_data=False) for path in graphs}
    layouts: dict[Span, dict[str, str]] = {}
    with Appending(weights) as file, tempfile.TemporaryDirectory(dir=weights.parent, prefix="layout-") as apart:
        for model in models.values():
            for span, product in _products(model).items():
                if span not in layouts:
                    layouts[span] = _laid_out(product, Path(apart), file, f"{LAYOUTS}{len(layouts)}")
    for path, model in models.items():
        for tensor in model.graph.initializer:
            for key, value in layouts.get(_span(tensor), {}).items():
                tensor.external_data.add(key=key, value=value)
        onnx.save(model, str(path))


def _span(tensor: onnx.TensorProto) -> Span:
    """Zeros if the tensor is part of the graph."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    return int(place.get("offset", 0)), int(place.get("length", 0))


def _products(model: onnx.ModelProto) -> dict[Span, onnx.ModelProto]:
    """For each matrix in the weights file that a product of the graph reads, that product alone."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    products: dict[Span, onnx.ModelProto] = {}
    for node in model.graph.node:
        matrix = constants.get(node.input[1]) if node.op_type in _PRODUCTS else None
        if matrix is None or not matrix.external_data or _span(matrix) in products:
            continue
        reads = dict.fromkeys(name for name in node.input if name)
        rows = [name for name in reads if name not in constants]
        inputs = [onnx.helper.make_tensor_value_info(name, types[name], None) for name in rows]
        output = onnx.helper.make_tensor_value_info(
            node.output[0], types.get(node.output[0], onnx.TensorProto.FLOAT), None
        )
        inside = [constants[name] for name in reads if name in constants]
        graph = onnx.helper.make_graph([node], "product", inputs, [output], inside)
        products[_span(matrix)] = onnx.helper.make_model(
            graph, opset_imports=model.opset_import, ir_version=model.ir_version
        )
    return products


def _laid_out(product: onnx.ModelProto, apart: Path, file: Appending, name: str) -> dict[str, str]:
    """The layout of a product's matrix, appended to ``file``: entries for its external data. ``apart`` is a folder next
    to the weights for onnxruntime's files."""
    options = pool_options(threads=1, spins=False)
    options.optimized_model_filepath = str(apart / _MODEL)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(apart.parent))
    for key, value in _OPTIONS.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(product.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(str(apart / _MODEL), load_external_data=False)
    values = [e.value for t in saved.graph.initializer for e in t.external_data if "|" in e.value]
    if values:
        with (apart / _DATA).open("rb") as data:
            values = [_moved(value, data, file, f"{name}.{number}") for number, value in enumerate(values)]
    # onnxruntime makes a Gemm of a MatMul and the addition after it, whose layout is the same by another name.
    values += [value.replace("MatMul+", "Gemm+", 1) for value in values if value.startswith("MatMul+")]
    return {f"prepacked_{number}": value for number, value in enumerate(values)}


def _moved(value: str, data: BinaryIO, file: Appending, name: str) -> str:
    """An entry's value, ``OPERATOR+HASH|OFFSET;LENGTH;CHECKSUM|...``, after its bytes were taken to ``file``."""
    content, *parts = value.split("|")
    for number, part in enumerate(parts):
        offset, length, checksum = part.split(";")
        data.seek(int(offset))
        at = file.add(f"{name}.{number}", data.read(int(length)))
        parts[number] = f"{at};{length};{checksum}"
    return "|".join((content, *parts))
