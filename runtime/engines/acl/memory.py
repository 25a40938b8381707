"""The device's memory: blocks, arrays that lie in them, and the copies that caches need.

An array is looked at, cut and copied, never read here: only a graph, or a copy to the host, sees its numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import byref, c_void_p
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.errors import RequestError
from draftwood.runtime.engines.acl.library import Closing, Library
from draftwood.runtime.engines.acl.values import STORED, item_bytes, to_host

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # aclrtMemcpyKind
_HUGE_FIRST = 0  # aclrtMemMallocPolicy: large pages for what has more than 1 MB
# How a block is cut by hand (aclrtMalloc in 11-01 of the runtime's reference). A piece begins at a multiple of the
# first, its size is rounded up to the second, and the third is left free after it.
_PIECE_START, _PIECE_UNIT, _PIECE_REST = 64, 32, 32
# Where weights begin, as in GE's combined file. On an Atlas A2 a read from another place takes up to 1.4 times as long
# (Ascend C, best practices, "Using 512-Byte Alignment for the GM Address").
WEIGHT_START = 512


class AclDevice:
    """One stream of a device, and all memory that was taken there, in the device's default context.

    That is torch_npu's as well: it sets a device once in a thread, and another context that was left there would fail
    all that torch launches afterwards. May be used from several threads, each call enters the context first. Memory
    without references is given back at the next allocation. A finalizer could not do it: it runs in any thread, and
    there another device's context may be the current one.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self._blocks: set[int] = set()
        self._pinned: list[int] = []
        self._dropped: deque[int] = deque()
        # Models, which use the memory and must be closed before it is freed.
        self.held: list[Closing] = []
        self._context, self.stream = c_void_p(), c_void_p()
        self.closed = False
        library.call("aclrtSetDevice", library.device)
        try:
            library.call("aclrtGetCurrentContext", byref(self._context))
            library.call("aclrtCreateStream", byref(self.stream))
        except RequestError:
            library.value("aclrtResetDevice", library.device)
            raise
        library.opened.append(self)

    def enter(self) -> None:
        """Makes the context this thread's; every call below needs that."""
        self.library.call("aclrtSetCurrentContext", self._context)

    def allocate(self, count: int, where: str) -> int:
        """The address of ``count`` bytes of zeros, 64-byte aligned; RequestError if there is no room."""
        self.enter()
        with suppress(IndexError):  # until none is left
            while address := self._dropped.popleft():
                self._blocks.discard(address)
                self.library.call("aclrtFree", address)
        pointer = c_void_p()
        self.library.call("aclrtMalloc", byref(pointer), count, _HUGE_FIRST, where=f"{where}, {count} bytes")
        address = int(pointer.value or 0)
        self._blocks.add(address)
        self.library.call("aclrtMemset", address, count, 0, count)
        return address

    def drop(self, address: int) -> None:
        """Nobody refers to the block any more; safe in any thread, also after ``close``."""
        self._dropped.append(address)

    def pinned(self, count: int) -> int:
        """The address of ``count`` bytes of the host's memory that the device copies from without a detour."""
        self.enter()
        pointer = c_void_p()
        self.library.call("aclrtMallocHost", byref(pointer), count, where=f"staging, {count} bytes")
        self._pinned.append(int(pointer.value or 0))
        return self._pinned[-1]

    def copy(self, target: int, source: int, count: int, kind: int) -> None:
        """Copies at once; the stream must have nothing to do with either side."""
        self.library.call("aclrtMemcpy", target, count, source, count, kind)

    def copy_in_stream(self, target: int, source: int, count: int, kind: int) -> None:
        """Copies when the stream gets there; the host's side must be pinned, and stay."""
        self.library.call("aclrtMemcpyAsync", target, count, source, count, kind, self.stream)

    def synchronize(self, where: str) -> None:
        """Waits for all that is in the stream; RequestError with ``where`` if any of it failed."""
        self.library.call("aclrtSynchronizeStream", self.stream, where=where)

    def close(self) -> None:
        """Unloads the models, then gives memory, stream and device back; errors are ignored."""
        if self.closed:
            return
        self.closed, value = True, self.library.value
        value("aclrtSetCurrentContext", self._context)
        value("aclrtSynchronizeStream", self.stream)  # of a step that failed half-way something may be left in it
        while self.held:
            self.held.pop().close()
        for address in self._blocks:
            value("aclrtFree", address)
        for address in self._pinned:
            value("aclrtFreeHost", address)
        value("aclrtDestroyStream", self.stream)
        value("aclrtResetDevice", self.library.device)
        if self in self.library.opened:
            self.library.opened.remove(self)


class MemoryBlock:
    """A block of a device, given back with the last reference; ``count`` 0 takes none."""

    def __init__(self, device: AclDevice, count: int, where: str) -> None:
        self.device, self.bytes = device, count
        self.address = device.allocate(count, where) if count else 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.device.drop(self.address)


def cut(sizes: Sequence[int], unit: int | None = None) -> tuple[list[int], int]:
    """The places where pieces of these sizes begin in one block, and the block's length, by the device's rules. Pieces
    begin at multiples of ``unit``, or of the device's own unit."""
    starts, at, unit = [], 0, unit or _PIECE_START
    for size in sizes:
        starts.append(at)
        at += up(up(size, _PIECE_UNIT) + _PIECE_REST, unit)
    return starts, at


def up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class DeviceArray:
    """Elements of a block by shape and strides, in elements. It has only the operations that a cache needs."""

    def __init__(
        self, block: MemoryBlock, kind: str, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
    ) -> None:
        self.block, self.kind, self.shape, self._offset = block, kind, tuple(shape), offset
        self.itemsize = item_bytes(kind)
        self.strides = _dense(self.shape) if strides is None else tuple(strides)

    @classmethod
    def zeros(cls, device: AclDevice, kind: str, shape: Sequence[int]) -> DeviceArray:
        """A new array of zeros of an element type."""
        return cls(MemoryBlock(device, prod(shape) * item_bytes(kind), f"a buffer {list(shape)}"), kind, shape)

    @property
    def address(self) -> int:
        return self.block.address + self._offset * self.itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def contiguous(self) -> bool:
        return all(
            size == 1 or stride == dense
            for size, stride, dense in zip(self.shape, self.strides, _dense(self.shape), strict=True)
        )

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """The elements in another shape; the array must be contiguous."""
        assert self.contiguous and prod(shape) == prod(self.shape), (self.shape, self.strides, shape)
        return DeviceArray(self.block, self.kind, shape, None, self._offset)

    def ravel(self) -> DeviceArray:
        return self.reshape((prod(self.shape),))

    def swapaxes(self, first: int, second: int) -> DeviceArray:
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self._ordered(order)

    def __getitem__(self, key: int | slice | tuple[slice, ...]) -> DeviceArray:
        """One row, or slices with step 1."""
        if isinstance(key, int):
            assert 0 <= key < self.shape[0], key
            offset = self._offset + key * self.strides[0]
            return DeviceArray(self.block, self.kind, self.shape[1:], self.strides[1:], offset)
        shape, offset = list(self.shape), self._offset
        for axis, part in enumerate(key if isinstance(key, tuple) else (key,)):
            start, stop, step = part.indices(shape[axis])
            assert start <= stop and step == 1, key
            shape[axis], offset = stop - start, offset + start * self.strides[axis]
        return DeviceArray(self.block, self.kind, shape, self.strides, offset)

    def __setitem__(self, key: slice | tuple[slice, ...], values: DeviceArray) -> None:
        """Copies on the device, in as few pieces as the two layouts allow."""
        target, device = self[key], self.block.device
        assert target.shape == values.shape and target.kind == values.kind, (target.shape, values.shape)
        order = sorted(range(len(target.shape)), key=lambda axis: -target.strides[axis])
        device.enter()
        for to, source, count in _runs(target._ordered(order), values._ordered(order)):
            device.copy(to, source, count, DEVICE_TO_DEVICE)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        """The values in the host's memory, fractions as fp32: for comparisons, not for a step."""
        device, there = self.block.device, np.empty(self.shape, STORED[self.kind])
        count = self.shape[-1] * self.itemsize
        device.enter()
        for row, index in enumerate(_indices(self.shape[:-1])):
            source = self.address + _at(index, self.strides) * self.itemsize
            device.copy(there.ctypes.data + row * count, source, count, DEVICE_TO_HOST)
        return to_host(there, self.kind)

    def _ordered(self, order: Sequence[int]) -> DeviceArray:
        shape, strides = ([values[axis] for axis in order] for values in (self.shape, self.strides))
        return DeviceArray(self.block, self.kind, shape, strides, self._offset)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in shape))


def _runs(target: DeviceArray, source: DeviceArray) -> Iterator[tuple[int, int, int]]:
    """(address, address, bytes) of the largest pieces that lie in one in both."""
    shape, axis = target.shape, len(target.shape)
    dense = _dense(shape)
    while axis and all(array.strides[axis - 1] == dense[axis - 1] for array in (target, source)):
        axis -= 1
    count = prod(shape[axis:]) * target.itemsize
    if not count:
        return
    for index in _indices(shape[:axis]):
        to, start = (array.address + _at(index, array.strides) * array.itemsize for array in (target, source))
        yield to, start, count


def _at(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=False))
