"""Orders of rank 0 to the others, which all carry out in turn, over a process group of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

# How long the others wait for an order: a text may be read and thought about. A rank that ends is noticed at once.
_IDLE = timedelta(days=365)


class ArrayBytes(msgspec.Struct):
    """A numpy array as bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, value: NDArray) -> ArrayBytes:
        return cls(value.dtype.name, value.shape, value.tobytes())

    @property
    def value(self) -> NDArray:
        return np.frombuffer(self.data, self.kind).reshape(self.shape).copy()


class View(msgspec.Struct):
    """A part of the buffer ``key``, as strides see it."""

    key: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Make(msgspec.Struct, tag=True):
    """A buffer of zeros."""

    key: int
    shape: tuple[int, ...]


class Drop(msgspec.Struct, tag=True):
    """Buffers that nobody has any more."""

    keys: list[int]


class Copy(msgspec.Struct, tag=True):
    """Copies one part of a buffer into another."""

    into: View
    source: View


class Gather(msgspec.Struct, tag=True):
    """Collects a part of a buffer from every rank."""

    part: View


class LaunchOrder(msgspec.Struct, tag=True):
    """A graph on small inputs and on parts of buffers."""

    graph: str
    inputs: dict[str, ArrayBytes]
    buffers: dict[str, View]


class Stop(msgspec.Struct, tag=True):
    """Nothing more."""


Order = Make | Drop | Copy | Gather | LaunchOrder | Stop


class Orders:
    """From rank 0 to all others. A rank that is gone, or takes no order within ``patience``, is a RuntimeError of
    torch.distributed."""

    def __init__(self, patience: timedelta) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=_IDLE if distributed.get_rank() else patience)

    def send(self, order: Order) -> None:
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8)
        distributed.broadcast(torch.tensor([len(data)]), 0, self._group)
        distributed.broadcast(data, 0, self._group)

    def receive(self) -> Order:
        size = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(size, 0, self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(data, 0, self._group)
        order: Order = msgspec.msgpack.decode(data.numpy().tobytes(), type=Order)
        return order
