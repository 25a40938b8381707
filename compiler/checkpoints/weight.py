"""A weight of ours: which published tensors make it, and how it is read when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightParts:
    """The published tensors that make one weight: their names and shapes, in order.

    Unless ``combine`` makes the weight of them in another way, they are concatenated along dimension 0 and have the
    given ``shape``.
    """

    tensors: tuple[tuple[str, Shape], ...]
    combine: Callable[[Sequence[Tensor]], Tensor] | None = None
    # The type that the weight is kept in; None for the file's own type.
    dtype: torch.dtype | None = None
    # The shape that the concatenated tensors are viewed in; None for their own.
    shape: Shape | None = None

    @property
    def concatenated(self) -> tuple[str, ...]:
        """Names of the tensors that, concatenated, are the weight; none if it is computed."""
        return () if self.combine else tuple(name for name, _ in self.tensors)

    def read(self, tensor: Callable[[str], Tensor]) -> Tensor:
        """The weight, from a reader of published tensors."""
        tensors = [tensor(name) for name, _ in self.tensors]
        if self.combine:
            return self.combine(tensors)
        value = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return value if self.shape is None else value.view(self.shape)


def shapes_of(parts: Mapping[str, WeightParts]) -> dict[str, Shape]:
    """Published name -> shape of all that the weights are made of."""
    return {name: shape for part in parts.values() for name, shape in part.tensors}


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """A tensor to be written: ``read`` is called once, when its turn comes.

    ``parts`` names the checkpoint tensors that, concatenated along dimension 0, make it; empty if it is computed.
    ``dtype`` is None for a weight, which takes the type of the file; whole numbers and their scales keep theirs.
    """

    name: str
    shape: Shape
    read: Callable[[], Tensor]
    parts: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
