"""Operators that reduce or accumulate along axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.graph import GE_TYPES
from draftwood.compiler.ge.operators.table import BOOLS, FLOATS, NUMBERS, Refusal, one_type, operator, register


def _reduce(
    function: Callable[[Tensor, list[int], bool], Tensor], types: frozenset[torch.dtype]
) -> Callable[..., Tensor]:
    def run(x: Tensor, axes: list[int], *, keep_dims: bool = False) -> Tensor:
        one_type(types, x)
        if not axes:
            raise Refusal("operand axes is empty; the definition does not say what that means")
        return function(x, axes, keep_dims)

    return run


for _name, _function, _types in (
    ("ReduceMax", torch.amax, NUMBERS),
    ("ReduceSum", lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype), NUMBERS),
    ("ReduceAny", torch.any, BOOLS),
    ("ReduceAll", torch.all, BOOLS),
    # fp32 inside: the sum of many exponentials would stall in a shorter type.
    ("ReduceLogSumExp", lambda x, axes, keep: torch.logsumexp(x.float(), axes, keep).to(x.dtype), FLOATS),
):
    register(_name, _reduce(_function, _types))


@operator
def ArgMaxV2(x: Tensor, dimension: int, *, dtype: Literal[3, 9] = 9) -> Tensor:
    """The first of equal values."""
    one_type(NUMBERS, x)
    return torch.argmax(x, dimension).to(GE_TYPES[dtype])


@operator
def LogSoftmaxV2(logits: Tensor, *, axes: list[int] = [-1]) -> Tensor:  # noqa: B006 (a default)
    one_type(FLOATS, logits)
    if len(axes) != 1:
        raise Refusal(f"attribute axes = {axes}; the interpreter covers one axis")
    return torch.log_softmax(logits, axes[0])


@operator
def SoftmaxV2(x: Tensor, *, axes: list[int] = [-1], half_to_float: bool = False) -> Tensor:  # noqa: B006 (a default)
    one_type(FLOATS, x)
    if len(axes) != 1:
        raise Refusal(f"attribute axes = {axes}; the interpreter covers one axis")
    return torch.softmax(x, axes[0], dtype=torch.float32 if half_to_float else None)
