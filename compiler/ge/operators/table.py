"""The table of GE operators, and how a node's operands and attributes reach an operator's function.

A function is its operator's definition (``REG_OP``) and has its name. The positional parameters are the operands by
their names; the keyword-only ones are the attributes with the definition's defaults. Anything else does not exist for
us and is refused, never ignored. The annotation of an operand says how it is read:

    Tensor, Tensor | None       a value; optional
    list[Tensor]                a dynamic operand: name0, name1, ...
    int, list[int], Host        read on the host, as numbers or as a tensor: the result's shape may depend on it

That of an attribute is ``Literal`` if the function covers these values alone; others are refused.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import Node
from draftwood.errors import LoweringError

Host = Tensor
"""A tensor whose values are read on the host: never a meta tensor."""

FLOATS = frozenset((torch.float32, torch.float16, torch.bfloat16))
INTEGERS = frozenset((torch.int8, torch.uint8, torch.int32, torch.int64))
BOOLS = frozenset((torch.bool,))
NUMBERS = FLOATS | INTEGERS
ALL = NUMBERS | BOOLS

_HOST = ("int", "list[int]", "list[int] | None", "Host", "Host | None")


class Refusal(Exception):
    """Why an operator cannot be executed as the node states it; the caller adds the node's name."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A function and what its signature says.

    ``writes``: the result is the memory of the first operand, changed. ``views``: it is that memory, reshaped.
    """

    function: Callable[..., Any]
    operands: dict[str, str]
    # Each with the values that are covered; None for all.
    attributes: dict[str, list[Any] | None]
    # The definition's defaults of attributes that may be left out.
    defaults: dict[str, Any]
    writes: bool
    views: bool


OPERATORS: dict[str, Operator] = {}


def register(name: str, function: Callable[..., Any], *, writes: bool = False, views: bool = False) -> None:
    """Enters a function into the table under an operator type."""
    parameters = inspect.signature(function).parameters.values()
    operands = {p.name: str(p.annotation) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    attributes = {p.name: _covered(str(p.annotation)) for p in parameters if p.kind is p.KEYWORD_ONLY}
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    assert name not in OPERATORS, name
    OPERATORS[name] = Operator(function, operands, attributes, defaults, writes, views)


def _covered(annotation: str) -> list[Any] | None:
    return ast.literal_eval(annotation.removeprefix("Literal")) if annotation.startswith("Literal[") else None


def attribute(node: Node, name: str) -> Any:
    """An attribute of a node; torchair leaves out those that have the definition's default.

    Raises:
        LoweringError: it has none, and the definition gives it no default.
    """
    known = OPERATORS[node.type].defaults if node.type in OPERATORS else {}
    if name not in node.attributes and name not in known:
        raise _error(node, f"attribute {name} is missing")
    return node.attributes.get(name, known.get(name))


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a function under its own name."""
    register(function.__name__, function)
    return function


@dataclass(frozen=True, slots=True)
class BoundNode:
    """A node bound to its operator; ``slots`` names the parameter that each operand goes to."""

    node: Node
    operator: Operator
    slots: tuple[str, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, node: Node) -> BoundNode:
        """LoweringError: an operator, operand or attribute that the table does not know."""
        operator = OPERATORS.get(node.type)
        if operator is None:
            raise LoweringError(f"node {node.name}: operator {node.type} is not known to the interpreter")
        # Names that begin with an underscore are notes of GE or torchair, not attributes of the operator.
        attributes = {name: value for name, value in node.attributes.items() if not name.startswith("_")}
        for name in attributes.keys() - operator.attributes.keys():
            raise _error(node, f"attribute {name} = {attributes[name]!r} is not known to the interpreter")
        if len(node.operands) != len(node.input_types):
            raise _error(node, f"{len(node.operands)} operands, but {len(node.input_types)} are described")
        slots = tuple(_slot(node, operator, i) for i in range(len(node.operands)))
        given = {slot for slot, edge in zip(slots, node.operands, strict=True) if edge is not None}
        for name, kind in operator.operands.items():
            if name not in given and kind != "list[Tensor]" and not kind.endswith("None"):
                raise _error(node, f"operand {name} is missing")
        return cls(node, operator, slots, attributes)

    def __call__(self, operands: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The node's outputs; meta tensors if one of the values computed with is one."""
        try:
            result = self.operator.function(**self._arguments(operands), **self.attributes)
        except (Refusal, RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise _error(self.node, reason) from error
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(outputs) != len(self.node.output_types):
            raise _error(self.node, f"{len(outputs)} outputs, but {len(self.node.output_types)} are described")
        return outputs

    def _arguments(self, operands: Sequence[Tensor | None]) -> dict[str, Any]:
        for name, value in self.attributes.items():
            if (covered := self.operator.attributes[name]) is not None:
                only(name, value, *covered)
        kinds = self.operator.operands
        slotted = [(slot, x) for slot, x in zip(self.slots, operands, strict=True) if x is not None]
        meta = any(x.is_meta for slot, x in slotted if kinds[slot] not in _HOST)
        arguments: dict[str, Any] = {slot: [] for slot, kind in kinds.items() if kind == "list[Tensor]"}
        for slot, x in slotted:
            kind = kinds[slot]
            if kind in _HOST:
                arguments[slot] = _read(slot, kind, x)
            elif kind == "list[Tensor]":
                arguments[slot].append(x.to("meta") if meta else x)
            else:
                arguments[slot] = x.to("meta") if meta else x
        return arguments


def _slot(node: Node, known: Operator, i: int) -> str:
    name = node.input_types[i].name
    dynamic = name.rstrip("0123456789")
    keyword = f"{name}_"  # an operand that is named like a keyword of Python
    slot = next((slot for slot in (name, keyword) if slot in known.operands), "")
    if not slot and known.operands.get(dynamic) == "list[Tensor]":
        slot = dynamic
    if not slot and node.operands[i] is not None:
        raise _error(node, f"operand {name} is not known to the interpreter")
    return slot


def _read(slot: str, kind: str, x: Tensor) -> Any:
    if x.is_meta:
        raise Refusal(f"operand {slot} is read on the host, but its value is known at run time only")
    if kind.startswith("Host"):
        return x
    if x.dtype not in INTEGERS:
        raise Refusal(f"operand {slot} is {_short(x.dtype)}, expected integers")
    if kind == "int" and x.numel() != 1:
        raise Refusal(f"operand {slot} has {x.numel()} values, expected 1")
    return int(x.item()) if kind == "int" else [int(v) for v in x.reshape(-1).tolist()]


def _error(node: Node, reason: str) -> LoweringError:
    return LoweringError(f"node {node.name} ({node.type}): {reason}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def only(name: str, value: object, *known: object) -> None:
    """Refuses an attribute whose value is not one of those that the function covers."""
    if value not in known:
        raise Refusal(f"attribute {name} = {value!r}; the interpreter covers {' or '.join(map(repr, known))}")


def one_type(types: frozenset[torch.dtype], *values: Tensor) -> torch.dtype:
    """The one element type of all values, which must be among ``types``."""
    used = {x.dtype for x in values}
    if len(used) > 1 or not used <= types:
        names = ", ".join(_short(x.dtype) for x in values)
        raise Refusal(f"operands are {names}; expected one type of {', '.join(sorted(map(_short, types)))}")
    return values[0].dtype
