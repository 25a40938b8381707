"""A graph for several texts, made of the graph for one: products with weights are done once, for the rows of all.

Every node is repeated for each text, but for a product with a weight and what follows it, as long as that does the same
to every row: these take the rows of all texts, one text's behind the other's. So weights are read once for all texts,
in a step of the teacher as in a draft of any kind. A step's inputs that name rows count those of all texts: every
attention picks its own, and what attentions give is put in order at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from draftwood.manifest import StepSignature, text_name

# Their second input is a weight that all rows are multiplied with, if they have one.
_PRODUCTS = {"MatMul", "MatMulInteger", "MatMulIntegerToFloat", "Gemm", "MatMulNBits"}
# What the exporter says of nodes that it makes of operators which do the same to every row: of experts, though their
# nodes do not, and of products with their rounding before them.
_MADE_OF = "pkg.torch.onnx.class_hierarchy"
_EXPERTS, _QUANTISED = "'draftwood.experts.default']", "'draftwood.quantised_linear.default']"
_ELEMENTWISE = {"Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Pow", "Round", "Sigmoid", "Sqrt"}
_ELEMENTWISE |= {"Sub", "Tanh", "QuantizeLinear", "QuickGelu"}
# Along the last axis, with a gain for each of its places.
_NORMS = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
# Inputs of a step that name rows of all texts, and those that name results of all attentions.
_ROWS, _RESULTS = ("rows", "queries"), "results"
# Those that go along an axis: of reductions it is their second input, of others an attribute.
_REDUCTIONS = {"ReduceMax", "ReduceMean", "ReduceSum", "ReduceLogSumExp"}
_ALONG = {"ArgMax", "Concat", "Softmax", "Split", "TopK"}


def for_texts(model: ir.Model, signature: StepSignature) -> ir.Model:
    """The model for as many texts as `manifest.texts_signature` has; ``model`` stays as it is.

    Sizes of inner values have to be known, as far as they are fixed; run-time sizes by name.
    """
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
        # Along which axis those that are together have their rows.
        self._axis: dict[ir.Value, int] = {}
        # Rows of every text, by the size's name.
        self._counts: dict[str, ir.Value] = {}
        self.named = {_name(one): one for parts in self._apart.values() for one in parts}
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
        given = [value for value in node.inputs if value is not None and value not in self.weights]
        multiplies = node.op_type in _PRODUCTS and node.inputs[1] in self.weights
        rounds = made_of.endswith(_QUANTISED) and all(len(_sizes(value)) == 2 for value in given)
        if given and (multiplies or rounds or any(value in self._together for value in given)):
            axis = _rows_behind(node, given, [self._axis.get(value, 0) for value in given])
            if axis is not None:
                self._add_once(node, axis)
                return
        for value in node.outputs:
            self._apart[value] = self._parts(value)
        for text in range(self._texts):
            self._node(node, [self._apart[value][text] for value in node.outputs], text)

    def _add_picked(self, node: ir.Node) -> None:
        """One that takes rows by their numbers: of a list of numbers once, for each attention its own."""
        data, index = node.inputs
        assert data is not None and index is not None
        if index in self._ordering or len(_sizes(index)) == 1:
            given = self._of_all(data, axis=int(index in self._ordering)), self._of_all(index)
            outputs = [_like(value, value.name) for value in node.outputs]
            self._made_of(node, given, outputs, None)
            self._together |= dict(zip(node.outputs, outputs, strict=True))
            self._axis |= dict.fromkeys(node.outputs, 0)
            return
        for value in node.outputs:
            self._apart[value] = self._parts(value)
        for text in range(self._texts):
            given = self._of_all(data), self._apart[index][text]
            self._made_of(node, given, [self._apart[value][text] for value in node.outputs], text)

    def outputs(self, values: Sequence[ir.Value], signature: StepSignature) -> list[ir.Value]:
        """In the signature's order: those that it has of all texts together, the others of each."""
        asked = {spec.name for spec in signature.outputs}
        found = {}
        for value in values:
            if value.name in asked:
                found[_name(value)] = self._of_all(value)
                found[_name(value)].name = value.name
            else:
                found |= {_name(one): one for one in self._of_each(value)}
        return [found[spec.name] for spec in signature.outputs]

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
                counts = [self._made(ir.node("Shape", [one], {"start": 0, "end": 1})) for one in parts]
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
        attributes = [
            ir.AttrGraph(one.name, self._inside(one.as_graph(), text)) if one.type == ir.AttributeType.GRAPH else one
            for one in node.attributes.values()
        ]
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

    def _inside(self, graph: ir.Graph, text: int | None) -> ir.Graph:
        """The body of a loop, which reads values around it."""
        body = graph.clone(allow_outer_scope_values=True)
        for node in body.all_nodes():
            for place, value in enumerate(node.inputs):
                if value in self.weights or value in self._apart or value in self._together:
                    node.replace_input_with(place, self._read(value, text))
        return body


def _rows_behind(node: ir.Node, given: Sequence[ir.Value], axes: Sequence[int]) -> int | None:
    """Along which axis its outputs have the rows of its inputs, which are the same; None where the node does not do
    the same to every row."""
    sizes = [_sizes(value) for value in given]
    if not all(sizes):
        return None
    if node.op_type == "RotaryEmbedding":  # of [1, rows, width], and tables of as many rows
        return 1 if [len(size) for size in sizes] == [3, 2, 2] and list(axes) == [1, 0, 0] else None
    weights = [value for value in node.inputs if value is not None and value not in given]
    rows = {size[axis] for size, axis in zip(sizes, axes, strict=True)}
    if len(rows) != 1 or None in rows:
        return None
    rank, axis = len(sizes[0]), axes[0]
    if any(len(size) != rank for size in sizes) or set(axes) != {axis}:
        return None
    if node.op_type == "Unsqueeze":
        return axis + 1 if _numbers(weights) == [0] else None
    return axis if _same_for_rows(node, given, weights, rank, axis) else None


def _same_for_rows(node: ir.Node, given: Sequence[ir.Value], weights: Sequence[ir.Value], rank: int, axis: int) -> bool:
    """Whether the node does the same to every row, its inputs' rows being along one axis."""
    if node.op_type in _PRODUCTS:
        # That of packed weights takes rows along any axes but the last.
        along_rows = axis < rank - 1 if node.op_type == "MatMulNBits" else rank == 2 and axis == 0
        return along_rows and list(given) == [node.inputs[0]]
    if node.op_type in _ELEMENTWISE or (node.op_type in _NORMS and axis < rank - 1):
        return all(value.shape is not None and len(value.shape) < rank - axis for value in weights)
    if node.op_type in _REDUCTIONS:
        axes = _numbers(weights)
        return bool(axes) and all(one % rank != axis for one in axes)
    along = _along(node) % rank
    if node.op_type == "Concat":  # a weight among what is joined would have rows of its own
        return not weights and along != axis
    return node.op_type in _ALONG and along > axis


def _numbers(weights: Sequence[ir.Value]) -> list[int]:
    """The axes that the one weight of a node lists."""
    return [int(one) for one in weights[0].const_value.numpy().flat] if weights and weights[0].const_value else []


def _along(node: ir.Node) -> int:
    found = node.attributes.get("axis")
    return -1 if found is None else found.as_int()


def _sizes(value: ir.Value) -> tuple[int | str | None, ...]:
    """A size for each axis, None where it has no name; nothing where the shape is not known."""
    if value.shape is None:
        return ()
    return tuple(size if isinstance(size, int) else size.value for size in value.shape)


def _name(value: ir.Value) -> str:
    assert value.name, "the exporter names every value"
    return value.name


def _like(value: ir.Value, name: str | None) -> ir.Value:
    weight = value.const_value
    return ir.Value(name=name, type=value.type, const_value=weight, shape=value.shape if weight else None)
