"""Buffers of several ranks: each operation is done to every rank's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class RankBuffers:
    """One buffer of each rank, all of one shape, with the few operations that the caches use."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = list(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each rank's."""
        return tuple(self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        """Of all ranks together."""
        return sum(part.nbytes for part in self.parts)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.parts[0].itemsize

    def reshape(self, shape: tuple[int, ...]) -> RankBuffers:
        return self._each(lambda part: part.reshape(shape))

    def ravel(self) -> RankBuffers:
        return self._each(lambda part: part.ravel())

    def swapaxes(self, one: int, other: int) -> RankBuffers:
        return self._each(lambda part: part.swapaxes(one, other))

    def __getitem__(self, place: Any) -> RankBuffers:
        return self._each(lambda part: part[place])

    def __setitem__(self, place: Any, value: RankBuffers | float) -> None:
        values: Sequence[Any] = value.parts if isinstance(value, RankBuffers) else [value] * len(self.parts)
        for part, new in zip(self.parts, values, strict=True):
            part[place] = new

    def _each(self, change: Callable[[Tensor], Tensor]) -> RankBuffers:
        return RankBuffers([change(part) for part in self.parts])


def of_rank(buffer: Any, rank: int) -> Tensor:
    """A rank's own part of a buffer; a tensor is of the one rank that there is."""
    part: Tensor = buffer.parts[rank] if isinstance(buffer, RankBuffers) else buffer
    return part
