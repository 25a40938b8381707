"""Changes inside an ONNX graph that leave a valid file: another constant, attribute, operator, edge or output."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper

from draftwood.tests.fuzz.mutate import ODD_NUMBERS, replace

_SWAPS = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Neg", "Exp", "Sqrt", "Sigmoid", "Identity", "Softmax", "Cast")


def changed(path: Path, rng: random.Random) -> str:
    """Rewrites the graph with one change; says which."""
    model = onnx.load(str(path), load_external_data=False)
    change = rng.choice((_constant, _constant, _attribute, _operator, _edge, _drop, _external, _end))
    what = change(model, rng)
    replace(path, model.SerializeToString())
    return what


def _constant(model: ModelProto, rng: random.Random) -> str:
    small = [t for t in model.graph.initializer if not t.external_data]
    if not small:
        return _attribute(model, rng)
    tensor = rng.choice(small)
    array = numpy_helper.to_array(tensor).copy()
    if array.size == 0:
        return "an empty constant"
    at = rng.randrange(array.size)
    value = rng.choice((0, 1, -1, 5, 1000, 2**31 - 1, float("nan"), float("inf")))
    with np.errstate(all="ignore"):
        array.flat[at] = np.array(value).astype(array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"constant {tensor.name}[{at}] = {value}"


def _attribute(model: ModelProto, rng: random.Random) -> str:
    holders = [(node, a) for node in model.graph.node for a in node.attribute if a.type in (1, 2, 7)]
    if not holders:
        return _operator(model, rng)
    node, attribute = rng.choice(holders)
    odd = rng.choice([n for n in ODD_NUMBERS if -(2**63) <= n < 2**63])
    if attribute.type == 1:
        attribute.f = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    elif attribute.type == 2:
        attribute.i = odd
    elif attribute.ints:
        attribute.ints[rng.randrange(len(attribute.ints))] = odd
    return f"attribute {attribute.name} of {node.op_type}"


def _operator(model: ModelProto, rng: random.Random) -> str:
    node = rng.choice(model.graph.node)
    before, node.op_type = node.op_type, rng.choice(_SWAPS)
    return f"{before} became {node.op_type}"


def _edge(model: ModelProto, rng: random.Random) -> str:
    node = rng.choice([node for node in model.graph.node if node.input])
    names = [name for other in model.graph.node for name in (*other.input, *other.output) if name]
    node.input[rng.randrange(len(node.input))] = rng.choice(names)
    return f"an input of {node.op_type}"


def _drop(model: ModelProto, rng: random.Random) -> str:
    node = rng.choice(model.graph.node)
    kind = node.op_type
    model.graph.node.remove(node)
    return f"{kind} is gone"


def _external(model: ModelProto, rng: random.Random) -> str:
    stored = [t for t in model.graph.initializer if t.external_data]
    if not stored:
        return _constant(model, rng)
    entry = rng.choice(rng.choice(stored).external_data)
    places = ("/dev/zero", "/dev/stdin", "../manifest.json", "/etc/passwd", "nowhere", "", "step.onnx")
    entry.value = rng.choice(places) if entry.key == "location" else str(rng.choice(ODD_NUMBERS))
    return f"external {entry.key} = {entry.value}"


def _end(model: ModelProto, rng: random.Random) -> str:
    ends: list[onnx.ValueInfoProto] = [*model.graph.input, *model.graph.output]
    end, spare = rng.choice(ends), onnx.TensorShapeProto.Dimension()
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(end, "name", f"{end.name}x"),
        lambda: setattr(end.type.tensor_type, "elem_type", rng.choice((1, 6, 7, 9, 10, 11, 16, 99))),
        lambda: setattr(rng.choice(end.type.tensor_type.shape.dim or [spare]), "dim_value", 3),
    )
    rng.choice(changes)()
    return f"declaration of {end.name}"
