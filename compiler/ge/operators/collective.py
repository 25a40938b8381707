"""Operators by which ranks meet. One rank alone knows only the shape of a result; `joined` makes it of all ranks'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from draftwood.compiler.ge.operators.table import FLOATS, Refusal, one_type, operator

COLLECTIVES = ("HcomAllReduce", "HcomAllGather")


@operator
def HcomAllReduce(x: Tensor, *, reduction: Literal["sum"], group: str, fusion: int = 1, fusion_id: int = -1) -> Tensor:
    return _shape_of(x, x.shape)


@operator
def HcomAllGather(x: Tensor, *, rank_size: int, group: str, fusion: int = 0, fusion_id: int = -1) -> Tensor:
    return _shape_of(x, (rank_size * x.shape[0], *x.shape[1:]))


def _shape_of(x: Tensor, shape: Sequence[int]) -> Tensor:
    one_type(FLOATS, x)
    if not x.is_meta:
        raise Refusal("a collective of several ranks is met by one alone; run all of them together")
    return x.new_empty(tuple(shape))


def ranks_of(attributes: Mapping[str, Any]) -> int:
    """How many ranks a collective's group has, by its name as torchair writes it: ``tag=...;rank_list=0,1``."""
    listed = str(attributes.get("group", "")).rpartition("rank_list=")[2]
    return len(listed.split(",")) if listed else 0


def joined(kind: str, values: Sequence[Tensor]) -> Tensor:
    """The result of a collective of the ranks' values, in order of rank.

    A sum is taken in fp32 and rounded once; how a device rounds on the way is not documented.
    """
    if kind == "HcomAllGather":
        return torch.cat(tuple(values))
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    return total.to(values[0].dtype)
