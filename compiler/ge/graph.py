"""A GE graph as plain Python: nodes with resolved inputs, attributes as values, constants as tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftwood.compiler.ge.torchair_bridge import ge_ir
from draftwood.errors import BundleError

# Element types by their protobuf names. The numbers hold for tensor descriptions only.
DTYPES = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_INT8": torch.int8,
    "DT_UINT8": torch.uint8,
    "DT_INT32": torch.int32,
    "DT_INT64": torch.int64,
    "DT_UINT64": torch.uint64,
    "DT_BOOL": torch.bool,
}
# GE's own numbers (``ge::DataType``), which attributes hold, be they of kind ``dt`` or ``i``: GE casts a ``dt``
# without mapping it (graph_metadef/graph/serialization/data_type_serializer.cc of GE's open source).
GE_TYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    9: torch.int64,
    10: torch.uint64,
    12: torch.bool,
    27: torch.bfloat16,
}
SOURCES = ("Data", "RefData")
# Nodes that hold a value or end the graph, and compute nothing.
HELD = (*SOURCES, "Const", "FileConstant", "NetOutput")
# Nodes that give the same memory another shape; no kernel runs for them, nor for those that GE takes out.
VIEWS = ("Reshape", "Squeeze", "Unsqueeze")
FREE = (*VIEWS, "Identity")

# Operators whose results lie where an operand does.
REFERENCES = ("ApplyRotaryPosEmb", "ScatterNdUpdate")


class Edge(NamedTuple):
    """Output ``output`` of the node ``node``."""

    node: str
    output: int


class Declared(NamedTuple):
    """An operator's description of one input or output.

    ``shape`` is None if GE infers it; ``layout`` is how it lies in memory, ND row by row. ``source``, ``operator``
    and ``number`` name the node of the traced program and which of its values it is, if torchair has noted it.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    source: str = ""
    operator: str = ""
    number: int = 0
    layout: str = "ND"


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. ``inputs`` holds None if an optional input is left out."""

    name: str
    type: str
    inputs: tuple[Edge | None, ...]
    attributes: dict[str, Any]
    input_types: tuple[Declared, ...]
    output_types: tuple[Declared, ...]

    @property
    def operands(self) -> tuple[Edge | None, ...]:
        """The inputs that carry a value, as ``input_types`` describes them; the others only order execution."""
        return tuple(edge for edge in self.inputs if edge is None or edge.output >= 0)

    def input(self, name: str) -> Edge | None:
        """The input of that name in the operator's definition; None if it is left out."""
        for edge, declared in zip(self.operands, self.input_types, strict=False):
            if declared.name == name:
                return edge
        return None


@dataclass(frozen=True)
class Graph:
    """All nodes by name, in execution order."""

    name: str
    nodes: dict[str, Node]

    @classmethod
    def of(cls, definition: Any) -> Graph:
        """From a ``GraphDef``."""
        return cls(definition.name, {op.name: node_of(op) for op in definition.op})

    @classmethod
    def load(cls, path: Path) -> Graph:
        """From an ``.air`` file; BundleError if it is none."""
        model = ge_ir().ModelDef()
        try:
            model.ParseFromString(path.read_bytes())
        except Exception as error:  # protobuf's own class, which differs between its implementations
            raise BundleError(f"{path}: not an .air file ({error}); build the bundle again") from error
        if len(model.graph) != 1:
            raise BundleError(f"{path}: holds {len(model.graph)} graphs, expected 1; build the bundle again")
        try:
            return cls.of(model.graph[0])
        except (ValueError, RuntimeError, AssertionError) as error:  # of an edge's number, or of a constant's bytes
            raise BundleError(f"{path}: holds no graph of ours ({error}); build the bundle again") from error

    @property
    def output(self) -> Node:
        """The node whose inputs are the graph's outputs."""
        return next(node for node in self.nodes.values() if node.type == "NetOutput")

    def sources(self) -> list[Node]:
        """Inputs of the graph in call order."""
        listed = [node for node in self.nodes.values() if node.type in SOURCES]
        return sorted(listed, key=lambda node: int(node.attributes["index"]))

    def readers(self, name: str) -> Iterator[tuple[Node, int]]:
        """Every (node, input number) that reads an output of the node ``name``."""
        return iter(self._readers.get(name, ()))

    @cached_property
    def _readers(self) -> dict[str, list[tuple[Node, int]]]:
        readers: dict[str, list[tuple[Node, int]]] = {}
        for node in self.nodes.values():
            for i, edge in enumerate(node.inputs):
                if edge is not None and edge.output >= 0:
                    readers.setdefault(edge.node, []).append((node, i))
        return readers

    def counts(self) -> dict[str, int]:
        """Operator type -> how many, most frequent first."""
        counted = Counter(node.type for node in self.nodes.values())
        return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))

    @property
    def kernels(self) -> list[Node]:
        """Nodes for which a kernel runs on a device."""
        free, still = self.laid_out(), (*HELD, *FREE)
        return [node for node in self.nodes.values() if node.type not in still and node.name not in free]

    def laid_out(self) -> set[str]:
        """Joins of rows for which GE runs nothing, because it places their inputs next to each other in memory.

        The conditions are those of compiler/graph/passes/memory_optimize/concat_notask_pass.cc. The join is a ConcatD
        along the first axis, and its parts are made by operators that own their results. Each part is for one such
        join, and none is an output. That parts are multiples of 32 bytes is a rule of
        `draftwood.compiler.ge.operator_rules`.
        """
        laid: set[Edge] = set()
        listed = set()
        ends = set(self.output.operands)
        for node in self.nodes.values():
            parts = [edge for edge in node.operands if edge is not None]
            if node.type == "ConcatD" and node.attributes["concat_dim"] == 0 and len(set(parts)) == len(parts):
                owned = all(self.nodes[edge.node].type not in (*HELD, *FREE, *REFERENCES) for edge in parts)
                if owned and not laid & set(parts) and not ends & set(parts):
                    laid |= set(parts)
                    listed.add(node.name)
        return listed

    def text(self) -> str:
        """One line a node, for people."""
        return "\n".join([f"graph {self.name}", *map(_line, self.nodes.values())]) + "\n"


def node_of(op: Any) -> Node:
    """From an ``OpDef``."""
    return Node(
        name=op.name,
        type=op.type,
        inputs=tuple(_edge(text) for text in op.input),
        attributes={key: _value(attr) for key, attr in op.attr.items()},
        input_types=tuple(_declared(desc) for desc in op.input_desc),
        output_types=tuple(_declared(desc) for desc in op.output_desc),
    )


def _edge(text: str) -> Edge | None:
    if not text:
        return None
    name, _, output = text.rpartition(":")
    return Edge(name, int(output))


def _declared(desc: Any) -> Declared:
    kind = ge_ir().DataType.Name(desc.dtype)
    shape = tuple(desc.shape.dim) if desc.HasField("shape") else None
    # "mm_3-aten.mm.default.OUTPUT.0": node, operator, output.
    noted = desc.attr["_fx_tensor_name"].s.decode() if "_fx_tensor_name" in desc.attr else ""
    source, _, rest = noted.partition("-")
    operator, _, number = rest.partition(".OUTPUT.")
    return Declared(desc.name, DTYPES.get(kind), shape, source, operator, int(number or 0), desc.layout or "ND")


def _value(attr: Any) -> Any:
    kind = attr.WhichOneof("value")
    if kind == "list":
        return _list(attr.list)
    value = getattr(attr, kind) if kind else None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return tensor_of(value) if kind == "t" else value


def _list(values: Any) -> list[Any]:
    for field in ("s", "i", "f", "b"):
        if len(getattr(values, field)):
            return [v.decode(errors="replace") if isinstance(v, bytes) else v for v in getattr(values, field)]
    return []


def tensor_of(definition: Any) -> Tensor:
    """The tensor a ``TensorDef`` holds."""
    declared = _declared(definition.desc)
    assert declared.dtype is not None, ge_ir().DataType.Name(definition.desc.dtype)
    shape = declared.shape or ()
    if not definition.data:
        return torch.empty(shape, dtype=declared.dtype)
    return torch.frombuffer(bytearray(definition.data), dtype=declared.dtype).reshape(shape)


def list_ports(op: Any) -> None:
    """Notes an operator's inputs and outputs by name and number, as torchair does."""
    for side, ports in (("input", op.input_desc), ("output", op.output_desc)):
        op.attr[f"_{side}_name_key"].list.s[:] = [port.name.encode() for port in ports]
        op.attr[f"_{side}_name_value"].list.i[:] = range(len(ports))


def _line(node: Node) -> str:
    inputs = ", ".join("-" if e is None else e.node if e.output == 0 else f"{e.node}:{e.output}" for e in node.inputs)
    public = {k: v for k, v in node.attributes.items() if not k.startswith("_")}
    attributes = ", ".join(f"{k}={_brief(v)}" for k, v in sorted(public.items()))
    outputs = " ".join(_type(d) for d in node.output_types)
    return f"{node.name} = {node.type}({inputs})" + (f" {{{attributes}}}" if attributes else "") + f" : {outputs}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() <= 8 else f"tensor{list(value.shape)}"
    return str(value)


def _type(declared: Declared) -> str:
    kind = str(declared.dtype).removeprefix("torch.") if declared.dtype else "?"
    return kind + (str(list(declared.shape)) if declared.shape is not None else "")
