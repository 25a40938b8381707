"""Operators element by element: arithmetic, comparison, logic, conversion."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import GE_TYPES
from draftwood.compiler.ge.operators.table import (
    ALL,
    BOOLS,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Refusal,
    one_type,
    only,
    operator,
    register,
)


def _binary(function: Callable[[Tensor, Tensor], Tensor], types: frozenset[torch.dtype]) -> Callable[..., Tensor]:
    def run(x1: Tensor, x2: Tensor) -> Tensor:
        one_type(types, x1, x2)
        return function(x1, x2)

    return run


def _unary(function: Callable[[Tensor], Tensor], types: frozenset[torch.dtype]) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        one_type(types, x)
        return function(x)

    return run


for _name, _function, _types in (
    ("Add", torch.add, NUMBERS),
    ("Sub", torch.sub, NUMBERS),
    # No integers: the definition leaves open how their quotient is rounded.
    ("Div", torch.true_divide, FLOATS),
    ("RealDiv", torch.true_divide, FLOATS),
    ("FloorDiv", torch.floor_divide, NUMBERS),
    ("Minimum", torch.minimum, NUMBERS),
    ("Maximum", torch.maximum, NUMBERS),
    ("Equal", torch.eq, ALL),
    ("NotEqual", torch.ne, ALL),
    ("Less", torch.lt, NUMBERS),
    ("LessEqual", torch.le, NUMBERS),
    ("Greater", torch.gt, NUMBERS),
    ("GreaterEqual", torch.ge, NUMBERS),
    ("LogicalAnd", torch.logical_and, BOOLS),
    ("LogicalOr", torch.logical_or, BOOLS),
    ("BitwiseAnd", torch.bitwise_and, INTEGERS),
):
    register(_name, _binary(_function, _types))

for _name, _single, _types in (
    ("Neg", torch.neg, NUMBERS),
    ("Abs", torch.abs, NUMBERS),
    ("Log1p", torch.log1p, FLOATS),
    ("Tanh", torch.tanh, FLOATS),
    ("Sigmoid", torch.sigmoid, FLOATS),
    ("LogicalNot", torch.logical_not, BOOLS),
):
    register(_name, _unary(_single, _types))


@operator
def Mul(x1: Tensor, x2: Tensor) -> Tensor:
    # The definition of Mul and Pow has three types: the result's is the promotion of the operands'.
    return torch.mul(x1, x2)


@operator
def Addcmul(input_data: Tensor, x1: Tensor, x2: Tensor, value: Tensor) -> Tensor:
    one_type(NUMBERS, input_data, x1, x2, value)
    return input_data + value * (x1 * x2)


@operator
def Axpy(x1: Tensor, x2: Tensor, *, alpha: float) -> Tensor:
    """Whole numbers by way of float32, as the store's kernel has it (ai_core/tbe/impl/dynamic/axpy.py)."""
    kind = one_type(FLOATS | {torch.int32}, x1, x2)
    return (x1.float() + alpha * x2.float()).to(kind)


def _line(x: Tensor, scale: float, shift: float) -> Tensor:
    return x if (scale, shift) == (1.0, 0.0) else x.float() * scale + shift


def _log_of(base: float) -> float:
    """Natural logarithm of the base; -1 means e."""
    if base != -1.0 and base <= 0.0:
        raise Refusal(f"attribute base = {base!r}; expected -1 or a positive number")
    return 1.0 if base == -1.0 else math.log(base)


@operator
def Exp(x: Tensor, *, base: float = -1.0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    one_type(FLOATS, x)
    log = _log_of(base)
    y = _line(x, scale, shift)
    return torch.exp(y if log == 1.0 else y.float() * log).to(x.dtype)


@operator
def Log(x: Tensor, *, base: float = -1.0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    one_type(FLOATS, x)
    log = _log_of(base)
    y = torch.log(_line(x, scale, shift))
    return (y if log == 1.0 else y.float() / log).to(x.dtype)


@operator
def Swish(x: Tensor, *, scale: float = 1.0) -> Tensor:
    one_type(FLOATS, x)
    if scale == 1.0:
        return torch.nn.functional.silu(x)
    return (x.float() * torch.sigmoid(x.float() * scale)).to(x.dtype)


@operator
def Cast(x: Tensor, *, dst_type: int) -> Tensor:
    only("dst_type", dst_type, *GE_TYPES)
    return x.to(GE_TYPES[dst_type])


@operator
def SelectV2(condition: Tensor, then: Tensor, else_: Tensor) -> Tensor:
    one_type(BOOLS, condition)
    one_type(ALL, then, else_)
    return torch.where(condition, then, else_)


@operator
def MaskedFill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """``value`` is one number; torchair gives it in its own type."""
    one_type(BOOLS, mask)
    return torch.where(mask, value.reshape(()).to(x.dtype), x)


@operator
def ClipByValueV2(x: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    one_type(NUMBERS, x, clip_value_min, clip_value_max)
    return torch.clamp(x, clip_value_min, clip_value_max)
