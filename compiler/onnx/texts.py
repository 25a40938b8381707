"""A graph for several texts, made of the graph for one: products with weights are done once, with the rows of all.

A product with a weight takes the rows of all texts, one text after the other. So does every following node that treats
all rows alike. All other nodes are repeated for each text. Weights are therefore read once for all texts, in a step of
the teacher and in a draft of any kind. A step's inputs that name rows count the rows of all texts. Every attention
picks its own rows, and the results of all attentions are put in order at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from draftwood.compiler.onnx import bodies
from draftwood.manifest import StepSignature, text_name

# Their second input is a weight that all rows are multiplied with, if they have one.
_PRODUCTS = {"MatMul", "MatMulInteger", "MatMulIntegerToFloat", "Gemm", "MatMulNBits"}
# The exporter's mark on nodes made from one operator. Experts treat every row alike as a whole, though their nodes do
# not; so do products together with the rounding before them.
_MADE_OF = "pkg.torch.onnx.class_hierarchy"
_EXPERTS, _QUANTISED = "'draftwood.experts.default']", "'draftwood.quantised_linear.default']"
_ELEMENTWISE = {"Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Pow", "Round", "Sigmoid", "Sqrt"}
_ELEMENTWISE |= {"Sub", "Tanh", "QuantizeLinear", "QuickGelu"}
# Along the last axis, with a gain for each of its places.
_NORMS = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
# Inputs of a step that name rows of all texts, and those that name results of all attentions.
_ROWS, _RESULTS = ("rows", "queries"), "results"
# Operators along an axis: a reduction's axis is its second input, the others' is an attribute.
_REDUCTIONS = {"ReduceMax", "ReduceMean", "ReduceSum", "ReduceLogSumExp"}
_ALONG = {"ArgMax", "Concat", "Softmax", "Split", "TopK"}


def for_texts(model: ir.Model, signature: StepSignature) -> ir.Model:
    """The model for as many texts as `contract.texts_signature` has; ``model`` is not changed. Fixed sizes of inner
    values must be known by number, and run-time sizes by name."""
    repeated = _Repeated(model.graph, signature.batch)
    for node in model.graph:
        repeated.add(node)
    graph = ir.Graph(
        [repeated.named[spec.name] for spec in signature.inputs],
        repeated.outputs(model.graph.outputs, signature),
        nodes=repeated.nodes,
        initializers=list(repeated.weights.values()),
        opset_imports=model.graph.opset_imports,
        name=signature.name,
    )
    return ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name)


class _Repeated:
    """Values of the graph for one text as they are in the new one: apart, a value a text, or together, or both."""

    def __init__(self, graph: ir.Graph, texts: int) -> None:
        self.nodes: list[ir.Node] = []
        self._texts = texts
        self.weights = {value: _like(value, value.name) for value in graph.initializers.values()}
        self._apart = {value: self._parts(value) for value in graph.inputs}
        self._together: dict[ir.Value, ir.Value] = {}
        # The axis of the rows of each value that holds all texts.
        self._axis: dict[ir.Value, int] = {}
        # Rows of every text, by the size's name.
        self._counts: dict[str, ir.Value] = {}
        self.named = {_name(value): value for parts in self._apart.values() for value in parts}
        self._picking = {value for value in graph.inputs if value.name in _ROWS}
        self._ordering = {value for value in graph.inputs if value.name == _RESULTS}

    def add(self, node: ir.Node) -> None:
        """A node, once for all texts or once for each."""
        made_of = node.metadata_props.get(_MADE_OF, "")
        if made_of.endswith(_EXPERTS):
            self._add_once(node, 0)
            return
        if node.op_type in ("Gather", "GatherND") and node.inputs[1] in self._picking | self._ordering:
            self._add_picked(node)
            return
        inputs = [value for value in node.inputs if value is not None and value not in self.weights]
        multiplies = node.op_type in _PRODUCTS and node.inputs[1] in self.weights
        rounds = made_of.endswith(_QUANTISED) and all(len(_sizes(value)) == 2 for value in inputs)
        if inputs and (multiplies or rounds or any(value in self._together for value in inputs)):
            axis = _rows_axis(node, inputs, [self._axis.get(value, 0) for value in inputs])
            if axis is not None:
                self._add_once(node, axis)
                return
        for value in node.outputs:
            self._apart[value] = self._parts(value)
        for text in range(self._texts):
            self._node(node, [self._apart[value][text] for value in node.outputs], text)

    def _add_picked(self, node: ir.Node) -> None:
        """A node that picks rows by number: one node for a list of numbers, otherwise one for each text's attention."""
        data, index = node.inputs
        assert data is not None and index is not None
        if index in self._ordering or len(_sizes(index)) == 1:
            inputs = self._of_all(data, axis=int(index in self._ordering)), self._of_all(index)
            outputs = [_like(value, value.name) for value in node.outputs]
            self._made_of(node, inputs, outputs, None)
            self._together |= dict(zip(node.outputs, outputs, strict=True))
            self._axis |= dict.fromkeys(node.outputs, 0)
            return
        for value in node.outputs:
            self._apart[value] = self._parts(value)
        for text in range(self._texts):
            inputs = self._of_all(data), self._apart[index][text]
            self._made_of(node, inputs, [self._apart[value][text] for value in node.outputs], text)

    def outputs(self, values: Sequence[ir.Value], signature: StepSignature) -> list[ir.Value]:
        """The outputs in the signature's order, each of all texts or of one, as the signature names it."""
        of_all = {spec.name for spec in signature.outputs}
        by_name = {}
        for value in values:
            if value.name in of_all:
                by_name[_name(value)] = self._of_all(value)
                by_name[_name(value)].name = value.name
            else:
                by_name |= {_name(part): part for part in self._of_each(value)}
        return [by_name[spec.name] for spec in signature.outputs]

    def _add_once(self, node: ir.Node, axis: int) -> None:
        outputs = [_like(value, value.name) for value in node.outputs]
        self._node(node, outputs, None)
        self._together |= dict(zip(node.outputs, outputs, strict=True))
        self._axis |= dict.fromkeys(node.outputs, axis)

    def _read(self, value: ir.Value | None, text: int | None) -> ir.Value | None:
        """A node's input for one text, or for all of them."""
        if value is None or value in self.weights:
            return None if value is None else self.weights[value]
        return self._of_all(value) if text is None else self._of_each(value)[text]

    def _of_each(self, value: ir.Value) -> list[ir.Value]:
        if value not in self._apart:
            axis, parts = self._axis.get(value, 0), self._parts(value)
            rows = _sizes(value)[axis]
            counts = [self._counts[rows]] if isinstance(rows, str) else []
            more = {} if counts else {"num_outputs": self._texts}
            self.nodes.append(ir.node("Split", [self._together[value], *counts], {"axis": axis} | more, outputs=parts))
            self._apart[value] = parts
        return self._apart[value]

    def _of_all(self, value: ir.Value, axis: int = 0) -> ir.Value:
        if value not in self._together:
            parts, rows = self._apart[value], _sizes(value)[0] if axis == 0 else None
            if isinstance(rows, str) and rows not in self._counts:
                counts = [self._made(ir.node("Shape", [part], {"start": 0, "end": 1})) for part in parts]
                self._counts[rows] = self._made(ir.node("Concat", counts, {"axis": 0}))
            self._together[value] = self._made(ir.node("Concat", parts, {"axis": axis}))
            self._together[value].type = value.type
        return self._together[value]

    def _parts(self, value: ir.Value) -> list[ir.Value]:
        """A value for each text."""
        return [_like(value, text_name(text, _name(value))) for text in range(self._texts)]

    def _made(self, node: ir.Node) -> ir.Value:
        self.nodes.append(node)
        node.outputs[0].name = f"all.{len(self.nodes)}"
        return node.outputs[0]

    def _node(self, node: ir.Node, outputs: Sequence[ir.Value], text: int | None) -> None:
        """A node for one text, or for all of them."""
        attributes = bodies.attributes(node, lambda value: self._read(value, text))
        self._made_of(node, [self._read(value, text) for value in node.inputs], outputs, text, attributes)

    def _made_of(
        self,
        node: ir.Node,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        text: int | None,
        attributes: Sequence[ir.Attr] | None = None,
    ) -> None:
        """A node like this one, of other values."""
        attributes = list(node.attributes.values()) if attributes is None else attributes
        name = text_name("" if text is None else text, node.name or f"node.{len(self.nodes)}")
        self.nodes.append(ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name))


def _rows_axis(node: ir.Node, row_inputs: Sequence[ir.Value], axes: Sequence[int]) -> int | None:
    """Along which axis its outputs have the rows of its inputs, which are the same; None if the node does not do
    the same to every row."""
    weights = [value for value in node.inputs if value is not None and value not in row_inputs]
    if node.op_type == "Reshape":  # a 0 keeps an axis, also one whose size is not known
        return axes[0] if _numbers(weights)[: axes[0] + 1] == [0] * (axes[0] + 1) else None
    sizes = [_sizes(value) for value in row_inputs]
    if not all(sizes):
        return None
    if node.op_type == "RotaryEmbedding":  # of [1, rows, width], and tables of as many rows
        return 1 if [len(size) for size in sizes] == [3, 2, 2] and list(axes) == [1, 0, 0] else None
    rows = {size[axis] for size, axis in zip(sizes, axes, strict=True)}
    if len(rows) != 1 or None in rows:
        return None
    rank, axis = len(sizes[0]), axes[0]
    if any(len(size) != rank for size in sizes) or set(axes) != {axis}:
        return None
    if node.op_type == "Unsqueeze":
        return axis + 1 if _numbers(weights) == [0] else None
    return axis if _same_for_rows(node, row_inputs, weights, rank, axis) else None


def _same_for_rows(
    node: ir.Node, row_inputs: Sequence[ir.Value], weights: Sequence[ir.Value], rank: int, axis: int
) -> bool:
    """Whether the node treats all rows alike, with its inputs' rows along one axis."""
    if node.op_type in _PRODUCTS:
        # A product with packed weights takes rows along any axis but the last.
        along_rows = axis < rank - 1 if node.op_type == "MatMulNBits" else rank == 2 and axis == 0
        return along_rows and list(row_inputs) == [node.inputs[0]]
    if node.op_type in _ELEMENTWISE or (node.op_type in _NORMS and axis < rank - 1):
        return all(value.shape is not None and len(value.shape) < rank - axis for value in weights)
    if node.op_type in _REDUCTIONS:
        axes = _numbers(weights)
        return bool(axes) and all(reduced % rank > axis for reduced in axes)
    along = _along(node) % rank
    if node.op_type == "Concat":  # a weight among what is joined would have its own rows
        return not weights and along != axis
    return node.op_type in _ALONG and along > axis


def _numbers(weights: Sequence[ir.Value]) -> list[int]:
    """The axes that the one weight of a node lists."""
    return [int(axis) for axis in weights[0].const_value.numpy().flat] if weights and weights[0].const_value else []


def _along(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return -1 if axis is None else axis.as_int()


def _sizes(value: ir.Value) -> tuple[int | str | None, ...]:
    """A size for each axis, None if it has no name; nothing if the shape is not known."""
    if value.shape is None:
        return ()
    return tuple(size if isinstance(size, int) else size.value for size in value.shape)


def _name(value: ir.Value) -> str:
    assert value.name, "the exporter names every value"
    return value.name


def _like(value: ir.Value, name: str | None) -> ir.Value:
    weight = value.const_value
    return ir.Value(name=name, type=value.type, const_value=weight, shape=value.shape if weight else None)
