"""A draft step of several texts, made of the program for one: an operator of one text becomes one of all texts.

A value either has an axis of texts in front, or the rows of all texts follow each other. One is a view of the other.
Products with a weight, norms and lookups take rows; elementwise operators, and those along an axis, take the axis in
front. Caches are one pool, written at places that are moved on text by text. An operator that is not known here runs
for each text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from draftwood.compiler.ge.torchair_bridge import decomposed
from draftwood.compiler.steps.step import Step
from draftwood.contract import pooled_signature
from draftwood.manifest import text_name

# B texts, R rows of a text

_ATEN, _NPU, _OURS = torch.ops.aten, torch.ops.npu, torch.ops.draftwood
# The operands whose rows, along the first axis, are computed independently; all others are weights.
_ROWS = {
    _OURS.linear: ("x",),
    _OURS.quantised_linear: ("x",),
    _OURS.rounded_linear: ("x", "x_scale"),
    _OURS.best: ("x",),
    _NPU.npu_rms_norm: ("input",),
    _NPU.npu_add_rms_norm: ("x1", "x2"),
    _NPU.npu_add_rms_norm_dynamic_quant: ("x1", "x2"),
    _NPU.npu_swiglu: ("input",),
    _NPU.npu_dequant_swiglu_quant: ("x",),
    _NPU.npu_weight_quant_batchmatmul: ("x",),
    _ATEN.embedding: ("indices",),
    # Products for each head, and an attention whose first axis is that of the texts already.
    _ATEN.bmm: ("self", "mat2"),
    _OURS.batched_linear: ("x", "weight"),
    _NPU.npu_fused_infer_attention_score: ("query", "key", "value", "atten_mask"),
}
# Row by row along the second axis, after one of length one.
_TURNS = {_OURS.rotary_pair, _NPU.npu_rotary_mul}
# Along an axis that is named, or into a shape.
_AXES = {
    *(_ATEN._softmax, _ATEN._log_softmax, _ATEN.any, _ATEN.cat, _ATEN.expand, _ATEN.full_like, _ATEN.gather),
    *(_ATEN.logsumexp, _ATEN.new_zeros, _ATEN.sort, _ATEN.split, _ATEN.split_with_sizes, _ATEN.squeeze, _ATEN.stack),
    *(_ATEN.sum, _ATEN.topk, _ATEN.transpose, _ATEN.unsqueeze, _ATEN.view, _ATEN._unsafe_view, _ATEN.zeros_like),
}
_WITHOUT_AXIS = {_ATEN.full_like, _ATEN.zeros_like}
_AXIS, _SHAPE = ("dim", "dim0", "dim1"), "size"
# Elementwise, though PyTorch does not say so.
_ELEMENTWISE = {_ATEN._to_copy, _ATEN.clone, _ATEN.floor_divide}


def texts_step(one: Step, program: ExportedProgram, texts: int) -> Step:
    """The step of so many texts, from that of one and its trace."""
    return Step(TextsStep(one, program, texts), pooled_signature(one.signature, texts))


class TextsStep(nn.Module):
    """Takes and gives what `draftwood.contract.pooled_signature` says."""

    def __init__(self, one: Step, program: ExportedProgram, texts: int) -> None:
        super().__init__()
        self.draft, self.one, self.texts = one.module, one.signature, texts
        self._program = decomposed(program)
        specs = {s.arg.name: s for s in program.graph_signature.input_specs if s.kind != InputKind.USER_INPUT}
        placeholders = self._program.graph.find_nodes(op="placeholder")
        # Where the program's weights and constants are in this module, in call order.
        self._held = []
        for target in (str(specs[node.name].target) for node in placeholders if node.name in specs):
            if one.weight_name(target) is not None:
                self._held.append(f"draft.{target}")
            else:
                self._held.append(f"table_{len(self._held)}")
                self.register_buffer(self._held[-1], program.constants[target], persistent=False)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        signature = pooled_signature(self.one, self.texts)
        named = dict(zip((spec.name for spec in signature.inputs), tensors, strict=True))
        inputs = [EveryText(self.texts, rows=self._rows(named, spec.name)) for spec in self.one.inputs]
        parameters = [attrgetter(name)(self) for name in self._held]
        run = TextsRun(self._program, self.texts)
        return tuple(run.of_all(value).rows for value in run.run(*parameters, *inputs))

    def _rows(self, named: Mapping[str, Tensor], name: str) -> Tensor:
        if name in named:
            return named[name]
        return torch.cat([named[text_name(text, name)] for text in range(self.texts)])


class EveryText:
    """A value of all texts: ``rows`` [B*R, ...] and ``each`` [B, R, ...]; one of the two is given."""

    def __init__(self, texts: int, *, rows: Tensor | None = None, each: Tensor | None = None) -> None:
        self._texts = texts
        if rows is not None:
            self.rows = rows
        if each is not None:
            self.each = each

    @cached_property
    def rows(self) -> Tensor:
        return self.each.flatten(0, 1)

    @cached_property
    def each(self) -> Tensor:
        return self.rows.unflatten(0, (self._texts, -1))


class TextsRun(fx.Interpreter):
    """Runs the program of one text on values of all."""

    def __init__(self, program: fx.GraphModule, texts: int) -> None:
        super().__init__(program)
        self.texts = texts
        # Places of all texts, by the id of each text's places and the rows of a text, since several tables are read at
        # the same places. The text's places are kept as well, so that no later value gets their id.
        self._places: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op != "call_function" or n.target is getitem or not any(_texts_in(args, kwargs)):
            return super().run_node(n)
        arguments = n.target._schema.arguments  # type: ignore[union-attr]
        operands = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        return self._result(n.target, {a.name: operands.get(a.name, a.default_value) for a in arguments})

    def of_all(self, value: EveryText | Tensor) -> EveryText:
        """A value of all texts; one of the program's constants is the same for each."""
        if isinstance(value, EveryText):
            return value
        return EveryText(self.texts, each=value.expand(self.texts, *value.shape))

    def _result(self, target: Any, operands: dict[str, Any]) -> Any:
        packet = target.overloadpacket
        if packet is _NPU.npu_scatter_nd_update:
            return self._scattered(target, **operands)
        if packet is _OURS.join_rows:
            return self._along(_ATEN.cat.default, {"tensors": list(operands.values()), "dim": 0})
        if packet is _ATEN.index_select and operands["dim"] == 0 and isinstance(operands["index"], EveryText):
            return self._selected(target, operands["self"], operands["index"])
        if packet is _ATEN.index_select and not isinstance(operands["index"], EveryText):
            return self._along(target, operands, ("index",))
        if packet in _ROWS:
            return self._by_rows(target, operands, _ROWS[packet])
        if packet in _TURNS:
            return self._turned(target, operands)
        if torch.Tag.pointwise in target.tags or packet in _ELEMENTWISE:
            return self._each_of(_call(target, self._aligned(operands)))
        if packet in _AXES and (
            packet in _WITHOUT_AXIS or any(operands.get(name) is not None for name in (*_AXIS, _SHAPE))
        ):
            return self._along(target, operands)
        return self._apart(target, operands)

    def _by_rows(self, target: Any, operands: dict[str, Any], rows: tuple[str, ...]) -> Any:
        flat = {name: self.of_all(operands[name]).rows for name in rows if operands[name] is not None}
        result = _call(target, operands | flat)
        return pytree.tree_map_only(Tensor, lambda value: EveryText(self.texts, rows=value), result)

    def _scattered(self, target: Any, input: EveryText, indices: Any, updates: Any) -> EveryText:
        """Every text's rows into its part of the pool."""
        moved = self._moved(indices, input.rows.shape[0] // self.texts)
        return EveryText(self.texts, rows=target(input.rows, moved, self.of_all(updates).rows))

    def _selected(self, target: Any, table: Any, index: EveryText) -> EveryText:
        """Rows of a table that is the same for all texts, or of each text's own."""
        if not isinstance(table, EveryText):
            return EveryText(self.texts, rows=target(table, 0, index.rows))
        return EveryText(self.texts, rows=target(table.rows, 0, self._moved(index, table.each.shape[1])))

    def _moved(self, places: Any, rows: int) -> Tensor:
        """Places of all texts among so many rows of each."""
        key = id(places), rows
        if key not in self._places:
            each = self.of_all(places).each
            first = torch.arange(0, self.texts * rows, rows, device=each.device)
            self._places[key] = places, (each + first.view(-1, *[1] * (each.dim() - 1))).flatten(0, 1)
        return self._places[key][1]

    def _turned(self, target: Any, operands: dict[str, Any]) -> Any:
        def flat(value: Any) -> Tensor:
            return self.of_all(value).each.flatten(0, 2).unsqueeze(0)

        turned = _call(target, pytree.tree_map_only((Tensor, EveryText), flat, operands))
        return pytree.tree_map_only(
            Tensor, lambda value: EveryText(self.texts, each=value.squeeze(0).unflatten(0, (self.texts, 1, -1))), turned
        )

    def _aligned(self, operands: dict[str, Any], rank: int = 0) -> dict[str, Any]:
        """Operands that broadcast as for one text: missing axes are inserted after that of the texts."""
        most = max(rank, *(_rank(value) for value in pytree.tree_leaves(operands)))

        def aligned(value: EveryText) -> Tensor:
            return value.each[(slice(None), *[None] * (most - _rank(value)))]

        return pytree.tree_map_only(EveryText, aligned, operands)

    def _along(self, target: Any, operands: dict[str, Any], shared: tuple[str, ...] = ()) -> Any:
        """An operator along an axis, whose number grows by one; ``shared`` operands have no axis of texts."""
        if target.overloadpacket is _ATEN.expand:
            operands = operands | self._each_of(self._aligned({"self": operands["self"]}, len(operands["size"])))
        moved = dict[str, Any]()
        for name, value in operands.items():
            if name in _AXIS:
                moved[name] = pytree.tree_map_only(int, lambda axis: axis + (axis >= 0), value)
            elif name == _SHAPE:
                moved[name] = [self.texts, *value]
            elif name not in shared:
                moved[name] = pytree.tree_map_only((Tensor, EveryText), lambda each: self.of_all(each).each, value)
        return self._each_of(_call(target, operands | moved))

    def _apart(self, target: Any, operands: dict[str, Any]) -> Any:
        """Text by text."""
        results = [
            _call(target, pytree.tree_map_only(EveryText, lambda value: value.each.select(0, text), operands))  # noqa: B023
            for text in range(self.texts)
        ]
        return pytree.tree_map(lambda *parts: EveryText(self.texts, each=torch.stack(parts)), *results)

    def _each_of(self, result: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda value: EveryText(self.texts, each=value), result)


def _call(target: Any, operands: Mapping[str, Any]) -> Any:
    arguments = target._schema.arguments
    args = [operands[argument.name] for argument in arguments if not argument.kwarg_only]
    return target(*args, **{a.name: operands[a.name] for a in arguments if a.kwarg_only})


def _texts_in(*operands: Any) -> Iterator[bool]:
    return (isinstance(value, EveryText) for value in pytree.tree_leaves(operands))


def _rank(value: Any) -> int:
    """The axes of one text's part."""
    if isinstance(value, EveryText):
        return value.each.dim() - 1
    return value.dim() if isinstance(value, Tensor) else 0
