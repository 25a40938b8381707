"""A graph of many blocks from the trace of a few: each kind of block is traced once, and stamped.

The trace is that of a decoder cut short (`draftwood.compiler.steps.short`), whose graph has marks between the blocks.
The nodes from a mark to the next are a block. They are copied for every block of its kind, with that block's weights
and caches. A node that joins outputs of all blocks of the short decoder joins those of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from draftwood.compiler.onnx import bodies
from draftwood.compiler.steps.short import Short, ShortStep, Unlike, numbered
from draftwood.compiler.steps.step import Step
from draftwood.kernels.onnxruntime_ops import MARKS
from draftwood.manifest import TensorSignature

# Constants of a block that are no weights: sizes, axes, numbers.
_SMALL = 16
# The place of a value or node: a block's number, or one of these.
_SHARED, _AFTER = -1, -2


def stamp(model: ir.Model, short: ShortStep, step: Step) -> ir.Model:
    """The graph of ``step`` from that of the same step of its decoder cut short, tidied."""
    return _Stamp(model, short.short, step, short.step).model()


class _Stamp:
    """One graph being made."""

    def __init__(self, model: ir.Model, short: Short, step: Step, traced: Step) -> None:
        self.old, self.short, self.step, self.traced = model, short, step, traced
        self.users = _users(model.graph)
        self.place = _places(model.graph, self.users, len(short.blocks))
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        # New values by old ones: of shared nodes, of nodes after the blocks, and of each block.
        self.outside: dict[ir.Value, ir.Value | None] = {}
        self.inside: list[dict[ir.Value, ir.Value | None]] = [{} for _ in short.source]
        olds = {spec.name: old for spec, old in zip(traced.signature.inputs, model.graph.inputs, strict=True)}
        self.inputs = {spec.name: _input(spec, short, olds) for spec in step.signature.inputs}
        # Old values that have a part for each block: inputs whose signature says so, and values made of them.
        shapes = {spec.name: spec.shape for spec in step.signature.inputs}
        self.joined = {olds[spec.name] for spec in traced.signature.inputs if shapes[spec.name] != spec.shape}

    def model(self) -> ir.Model:
        graph, values = self.old.graph, self.outside
        values.update({value: self.inputs[value.name or ""] for value in graph.inputs if not numbered(value.name)})
        for node in graph:
            if self.place[node] == _SHARED:
                self._put_outside(node, [self._value(value) for value in node.inputs])
        passed: dict[int, ir.Value | None] = {}
        for number, at in enumerate(self.short.source):
            passed = self._block(number, at, passed)
        for node in graph:
            if self.place[node] == _AFTER:
                self._after(node, passed)
        new = ir.Graph(
            list(self.inputs.values()), self._outputs(), nodes=self.nodes, name=graph.name,
            initializers=list(self.initializers.values()),
            opset_imports={domain: version for domain, version in graph.opset_imports.items() if domain != MARKS},
        )  # fmt: skip
        model = ir.Model(new, ir_version=self.old.ir_version, producer_name=self.old.producer_name)
        RemoveUnusedNodesPass()(model)
        return model

    def _block(self, number: int, at: int, passed: Mapping[int, ir.Value | None]) -> dict[int, ir.Value | None]:
        """Block ``number`` as a copy of the short decoder's block ``at``; its results for the next block, by side."""
        values = self.inside[number]
        left: dict[int, ir.Value | None] = {}
        for node in self.old.graph:
            if node.domain == MARKS:
                border, side = (node.attributes[name].as_int() for name in ("number", "side"))
                if border == at:
                    source = node.inputs[0]
                    values[node.outputs[0]] = passed[side] if number else self._value(source, number, at)
                elif border == at + 1:
                    left[side] = self._value(node.inputs[0], number, at)
            elif self.place[node] == at:
                self._copy(node, number, at)
        return left

    def _after(self, node: ir.Node, passed: Mapping[int, ir.Value | None]) -> None:
        """A node after the blocks; one that joins an output of all blocks gets those of all."""
        if node.domain == MARKS:
            self.outside[node.outputs[0]] = passed[node.attributes["side"].as_int()]
            return
        owners = [self._owner(value) for value in node.inputs]
        blocks = [owner for owner in owners if owner >= 0]
        joins = sorted(set(blocks)) == list(range(len(self.short.blocks))) and len(blocks) == len(owners)
        if joins:
            width = len(blocks) // len(self.short.blocks)
            inputs = [
                self._value(node.inputs[at * width + i], number, at)
                for number, at in enumerate(self.short.source)
                for i in range(width)
            ]
        else:
            outside = self._grown if any(value in self.joined for value in node.inputs) else self._value
            inputs = [
                self._value(value, self.short.blocks[owner], owner) if owner >= 0 else outside(value)
                for value, owner in zip(node.inputs, owners, strict=True)
            ]
        self._put_outside(node, inputs, joins)

    def _put_outside(self, node: ir.Node, inputs: Sequence[ir.Value | None], joins: bool = False) -> None:
        """A node of no block; a value with a part for each block has one for each of all blocks."""
        self._put(node, inputs, self.outside, "")
        if joins or any(value in self.joined for value in node.inputs):
            for value in node.outputs:
                new = self.outside[value]
                assert new is not None
                if (sizes := list(new.shape or [])) and sizes[0] == len(self.short.blocks):
                    new.shape = ir.Shape([len(self.short.source), *sizes[1:]])
                    self.joined.add(value)

    def _owner(self, value: ir.Value | None) -> int:
        """The short decoder's block that gives a value, or where else it is from."""
        producer = value.producer() if value is not None else None
        return _SHARED if producer is None else self.place[producer]

    def _copy(self, node: ir.Node, number: int, at: int) -> None:
        """A node of block ``number``."""
        inputs = [self._value(value, number, at) for value in node.inputs]
        if node.op_type == "Gather" and node.inputs[0] in self.joined:
            # The block's part of what has one for each, as ``branch_L2TKD[index]``.
            inputs[1] = self._constant(np.array(number, np.int64), f"block.{number}")
        self._put(node, inputs, self.inside[number], f".{number}", number, at)

    def _grown(self, value: ir.Value | None) -> ir.Value | None:
        """The new value of a constant with a part for each block, all alike: with one for each of all blocks."""
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == "ConstantOfShape":
            shape = producer.inputs[0]
            sizes = shape.const_value.numpy() if shape is not None and shape.const_value is not None else np.array([0])
            if sizes[0] == len(self.short.blocks):
                all_sizes = self._constant(
                    np.array([len(self.short.source), *sizes[1:]], np.int64), f"{producer.name}.all"
                )
                self._put(producer, [all_sizes], self.outside, ".all")
                grown = self.outside[producer.outputs[0]]
                assert grown is not None
                grown.shape = ir.Shape([int(size) for size in (len(self.short.source), *sizes[1:])])
        return self._value(value)

    def _put(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], values: dict[ir.Value, ir.Value | None], suffix: str,
        number: int = -1, at: int = -1,
    ) -> None:  # fmt: skip
        attributes = bodies.attributes(node, lambda value: self._value(value, number, at))
        new = ir.Node(
            node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=f"{node.name}{suffix}",
            metadata_props=dict(node.metadata_props),
        )  # fmt: skip
        for old, value in zip(node.outputs, new.outputs, strict=True):
            value.name, value.type, value.shape = f"{old.name}{suffix}", old.type, old.shape
            values[old] = value
        self.nodes.append(new)

    def _value(self, value: ir.Value | None, number: int = -1, at: int = -1) -> ir.Value | None:
        """The new value of an old one, as block ``number``, a copy of ``at``, sees it."""
        if value is None:
            return None
        if number >= 0 and value in self.inside[number]:
            return self.inside[number][value]
        if value in self.outside:
            return self.outside[value]
        name = value.name or ""
        if (parts := numbered(name)) is not None and value.producer() is None:
            name = f"{parts[1]}{number if number >= 0 else self.short.blocks[int(parts[2])]}{parts[3]}"
        if value.is_graph_input():
            return self.inputs[name]
        assert value.producer() is None, f"{value.name}: a value of a block that is not asked for there"
        if number >= 0 and self.step.weight_name(name) is None and self._alone(value):
            raise Unlike(f"{name}: a constant of block {at}")
        if name not in self.initializers:
            new = ir.Value(name=name, type=value.type, shape=value.shape)
            new.const_value = value.const_value
            self.initializers[name] = new
        return self.initializers[name]

    def _alone(self, value: ir.Value) -> bool:
        """Whether a constant is large and only one block reads it."""
        size = int(np.prod([int(size) for size in value.shape or () if isinstance(size, int)], dtype=np.int64))
        return size > _SMALL and len({self.place[user] for user in self.users[value]}) < 2

    def _constant(self, array: np.ndarray, name: str) -> ir.Value:
        if name not in self.initializers:
            tensor = ir.tensor(array, name=name)
            self.initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
            )
        return self.initializers[name]

    def _outputs(self) -> list[ir.Value]:
        """In the order of the signature."""
        olds = {
            spec.name: value for spec, value in zip(self.traced.signature.outputs, self.old.graph.outputs, strict=True)
        }
        outputs = []
        for spec in self.step.signature.outputs:
            parts = numbered(spec.name)
            number = int(parts[2]) if parts else -1
            at = self.short.source[number] if parts else -1
            old = olds[f"{parts[1]}{at}{parts[3]}" if parts else spec.name]
            if number < 0 and (at := self._owner(old)) >= 0:  # the one state that a drafter reads
                number = self.short.blocks[at]
            new = self._value(old, number, at)
            assert new is not None
            new.name = spec.name
            outputs.append(new)
        return outputs


def _input(spec: TensorSignature, short: Short, olds: Mapping[str, ir.Value]) -> ir.Value:
    """An input of the new graph; its run-time sizes are called as in the old one."""
    parts = numbered(spec.name)
    name = f"{parts[1]}{short.source[int(parts[2])]}{parts[3]}" if parts else spec.name
    old = olds[name]
    sizes = [new if isinstance(new, int) else size for new, size in zip(spec.shape, old.shape or (), strict=True)]
    return ir.Value(name=spec.name, type=old.type, shape=ir.Shape(sizes))


def _places(graph: ir.Graph, users: Mapping[ir.Value, Sequence[ir.Node]], blocks: int) -> dict[ir.Node, int]:
    """Every node's block in the short decoder, or that all blocks share it, or that it comes after them.

    A mark belongs to the block that it opens. A node that only one block reads is that block's.
    """
    places: dict[ir.Node, int] = {}
    for node in graph:
        if node.domain == MARKS:
            number = node.attributes["number"].as_int()
            places[node] = number if number < blocks else _AFTER
            continue
        sources = set(_sources(node, places))
        places[node] = _SHARED if not sources else sources.pop() if len(sources) == 1 else _AFTER
    for node in reversed(graph):
        readers = {places[user] for value in node.outputs for user in users.get(value, ())}
        if places[node] == _SHARED and len(readers) == 1 and not any(value.is_graph_output() for value in node.outputs):
            reader = readers.pop()
            places[node] = reader if reader != _AFTER else _SHARED
    return places


def _sources(node: ir.Node, places: Mapping[ir.Node, int]) -> Iterator[int]:
    """Places that a node's inputs say, but for what is shared."""
    for value in _reads(node):
        producer, parts = value.producer(), numbered(value.name)
        if producer is not None:
            yield from {places[producer]} - {_SHARED}
        elif parts is not None:
            yield int(parts[2])


def _reads(node: ir.Node) -> list[ir.Value]:
    """The values of its graph that a node reads, those in the bodies of its loops too."""
    return [*(value for value in node.inputs if value is not None), *bodies.around(node)]


def _users(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """The graph's nodes that read a value."""
    users: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in _reads(node):
            users.setdefault(value, []).append(node)
    return users
