"""One ``.om`` file on a device: loaded with weights that lie there already, run on buffers that stay where they are."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from ctypes import byref, c_char_p, c_size_t, c_ubyte, c_uint32, c_void_p, sizeof
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.contract import lives
from draftwood.errors import BundleError
from draftwood.files import open_regular
from draftwood.manifest import GraphSignature, TensorSignature
from draftwood.runtime.engines.acl.memory import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    WEIGHT_START,
    AclDevice,
    DeviceArray,
    MemoryBlock,
    cut,
    up,
)
from draftwood.runtime.engines.acl.values import KINDS, STORED, host_type, item_bytes, store, to_host
from draftwood.runtime.engines.sessions import fixed

# aclmdlConfigAttr, and the way of loading: from a file, with work memory of the caller's.
_LOAD_TYPE, _PATH, _WORK_ADDRESS, _WORK_BYTES = 1, 2, 7, 8
_FROM_FILE_WITH_MEMORY = 2
_UNIT = 32  # the size that a weight file is registered with is a multiple of this


class Weights:
    """Every weight file of a folder, once on the device, whatever the number of models that read it.

    ATC names a file by what is in it, so that equal names are equal weights.
    """

    def __init__(self, device: AclDevice, folder: Path) -> None:
        files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
        if not files:
            raise BundleError(f"{folder}: no weights; expected the files that atc.sh makes; run it again")
        sizes = [path.stat().st_size for path in files]
        starts, total = cut(sizes, WEIGHT_START)
        self._block = MemoryBlock(device, total + WEIGHT_START, "weights")
        first = up(self._block.address, WEIGHT_START)
        self.files: dict[str, tuple[int, int]] = {}
        for path, start, size in zip(files, starts, sizes, strict=True):
            self._copy(device, path, first + start, size)
            self.files[path.name] = first + start, up(size, _UNIT)

    @staticmethod
    def _copy(device: AclDevice, path: Path, address: int, size: int) -> None:
        try:
            with open_regular(path) as file:
                mapped = np.memmap(file, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: cannot be read ({error}); run atc.sh again") from error
        device.copy(address, mapped.ctypes.data, size, HOST_TO_DEVICE)


class Staging:
    """A graph's small tensors of one direction: one block of the device, one of the host, one copy between them."""

    def __init__(self, device: AclDevice, specs: Iterable[TensorSignature]) -> None:
        specs = tuple(specs)
        sizes = [tensor_bytes(spec) for spec in specs]
        starts, self.bytes = cut(sizes)
        self._device, self._block = device, MemoryBlock(device, self.bytes, "staging")
        self._host = device.pinned(self.bytes) if self.bytes else 0
        self.addresses = {s.name: self._block.address + start for s, start in zip(specs, starts, strict=True)}
        places = zip(specs, starts, sizes, strict=True)
        self.arrays = {spec.name: _view(self._host + start, size, spec) for spec, start, size in places}

    def upload(self) -> None:
        if self.bytes:
            self._device.copy_in_stream(self._block.address, self._host, self.bytes, HOST_TO_DEVICE)

    def download(self) -> None:
        if self.bytes:
            self._device.copy_in_stream(self._host, self._block.address, self.bytes, DEVICE_TO_HOST)


def _stagings(device: AclDevice, specs: Iterable[TensorSignature], either: Container[str]) -> list[Staging]:
    """The host's own tensors, and ``either`` of those that may stay on the device: a tensor moves as a whole or not at
    all."""
    every = tuple(specs)
    apart = [[spec] for spec in every if spec.name in either]
    return [Staging(device, group) for group in ([spec for spec in every if spec.name not in either], *apart)]


class Bound:
    """A dataset: the tensors of one side of a model, by index, each with the address it was last given."""

    def __init__(self, device: AclDevice, specs: Iterable[TensorSignature]) -> None:
        self._library, self._specs = device.library, tuple(specs)
        self.handle = self._library.made("aclmdlCreateDataset")
        self._buffers: list[int] = []
        self._addresses: list[int] = []

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Tells the model where its tensors lie; an address that is the same costs nothing."""
        library = self._library
        for i, spec in enumerate(self._specs):
            address = addresses[spec.name]
            if i == len(self._buffers):
                self._buffers.append(library.made("aclCreateDataBuffer", address, tensor_bytes(spec)))
                self._addresses.append(address)
                library.call("aclmdlAddDatasetBuffer", self.handle, self._buffers[i])
            elif address != self._addresses[i]:
                library.call("aclUpdateDataBuffer", self._buffers[i], address, tensor_bytes(spec))
                self._addresses[i] = address

    def close(self) -> None:
        self._library.value("aclmdlDestroyDataset", self.handle)
        for buffer in self._buffers:
            self._library.value("aclDestroyDataBuffer", buffer)


class Model:
    """A loaded ``.om``.

    Raises:
        RequestError: the device has no room for it, or CANN cannot read it.
        BundleError: its inputs or outputs are not those of the signature.
    """

    def __init__(
        self, device: AclDevice, path: Path, graph: GraphSignature, weights: Weights, work: MemoryBlock
    ) -> None:
        self._device, self._path, self._graph = device, path, graph
        self._id = _load(device, path, weights, work)
        self._bound: list[Bound] = []
        device.held.append(self)
        inputs, outputs = self._described()
        far, either = {*graph.caches, *lives(graph, "sequence")}, lives(graph, "device", "either")
        self._given = _stagings(device, (spec for spec in graph.inputs if spec.name not in far), either)
        self._taken = _stagings(device, (spec for spec in outputs if spec.name not in far), either)
        self._bound = [Bound(device, inputs), Bound(device, outputs)]
        self._far = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        self._seen: dict[str, tuple[weakref.ref[DeviceArray], int]] = {}
        self._results = {
            spec.name: (spec.dtype, np.zeros(fixed(spec), host_type(spec.dtype)))
            for spec in outputs
            if spec.name not in far
        }

    def run(self, inputs: Mapping[str, NDArray], buffers: Mapping[str, DeviceArray]) -> dict[str, NDArray]:
        """See `executor.Executor.run`: two copies and one launch, after each other in the stream."""
        device, library = self._device, self._device.library
        device.enter()
        near, results = (self._near(stagings, buffers) for stagings in (self._given, self._taken))
        arrays = {name: array for staging in near for name, array in staging.arrays.items()}
        for name, array in inputs.items():
            store(arrays[name], array)
        places = {name: at for staging in (*near, *results) for name, at in staging.addresses.items()}
        places |= self._places(buffers)
        for bound in self._bound:
            bound.bind(places)
        for staging in near:
            staging.upload()
        where = f"graph {self._graph.name}"
        library.call("aclmdlExecuteAsync", self._id, *(b.handle for b in self._bound), device.stream, where=where)
        for staging in results:
            staging.download()
        device.synchronize(where)
        got = {name: array for staging in results for name, array in staging.arrays.items() if name not in buffers}
        return {name: to_host(array, *self._results[name]) for name, array in got.items()}

    @staticmethod
    def _near(stagings: Sequence[Staging], buffers: Mapping[str, DeviceArray]) -> list[Staging]:
        """The stagings with a tensor in no buffer of the caller's."""
        return [staging for staging in stagings if staging.arrays.keys() - buffers.keys()]

    def close(self) -> None:
        """Unloads it; its weights and work memory may go afterwards."""
        self._device.library.value("aclmdlUnload", self._id)
        for bound in self._bound:
            bound.close()

    def _places(self, buffers: Mapping[str, DeviceArray]) -> dict[str, int]:
        """Addresses of the caller's buffers; a cache that is the same as in the last run is not looked at again."""
        tensors = {}
        for name, array in buffers.items():
            if name not in self._far:
                continue  # an engine offers what some graphs read; this one does not
            seen = self._seen.get(name)
            if seen is None or seen[0]() is not array:
                seen = self._seen[name] = weakref.ref(array), self._address(name, array)
            tensors[name] = seen[1]
        return tensors

    def _address(self, name: str, array: DeviceArray) -> int:
        """Where a buffer lies, which must be as the graph declares it."""
        spec = self._far[name]
        # A cache is looked at as [K, C, D]; with one row a token it lies as [C, K, D].
        by_token = name in self._graph.caches and spec.shape[0] == array.shape[1]
        lies = array.swapaxes(0, 1) if by_token else array
        assert lies.contiguous and lies.nbytes == tensor_bytes(spec), (spec, array.shape, array.strides)
        return array.address

    def _described(self) -> tuple[list[TensorSignature], list[TensorSignature]]:
        """Inputs and outputs in the model's own order, held against the signature."""
        library, graph = self._device.library, self._graph
        desc = library.made("aclmdlCreateDesc")
        try:
            library.call("aclmdlGetDesc", desc, self._id, where=str(self._path))
            count = library.value("aclmdlGetNumInputs", desc)
            names = [library.value("aclmdlGetInputNameByIndex", desc, i).decode(errors="replace") for i in range(count)]
            outputs = [next(spec for spec in graph.outputs if spec.name == name) for name in graph.results]
            inputs = self._in_order(names)
            for side, specs in (("Input", inputs), ("Output", outputs)):
                self._check(side, specs, desc)
        finally:
            library.value("aclmdlDestroyDesc", desc)
        return inputs, outputs

    def _in_order(self, names: list[str]) -> list[TensorSignature]:
        """By name if the model has kept the names (GE may leave out an input that nothing reads), else by place."""
        known = {spec.name: spec for spec in self._graph.inputs}
        if all(name in known for name in names):
            return [known[name] for name in names]
        if len(names) == len(known):
            return list(self._graph.inputs)
        raise BundleError(f"{self._path}: inputs {', '.join(names)}; expected {', '.join(known)}; run atc.sh again")

    def _check(self, side: str, specs: list[TensorSignature], desc: int) -> None:
        value = self._device.library.value
        count = value(f"aclmdlGetNum{side}s", desc)
        if count != len(specs):
            raise BundleError(f"{self._path}: {count} {side.lower()}s, expected {len(specs)}; run atc.sh again")
        for i, spec in enumerate(specs):
            number = value(f"aclmdlGet{side}DataType", desc, i)
            described = KINDS.get(number, f"aclDataType {number}"), value(f"aclmdlGet{side}SizeByIndex", desc, i)
            expected = spec.dtype, tensor_bytes(spec)
            if described != expected:
                raise BundleError(
                    f"{self._path}: {side.lower()} {spec.name} is {described[0]} of {described[1]} bytes, expected"
                    f" {expected[0]} of {expected[1]}; compile it with atc.sh, which keeps types and sizes"
                )


def tensor_bytes(spec: TensorSignature) -> int:
    """Bytes of a tensor of a static graph."""
    return prod(fixed(spec)) * item_bytes(spec.dtype)


def _view(address: int, size: int, spec: TensorSignature) -> NDArray:
    """The host's memory at an address, as the tensor lies there."""
    raw = memoryview((c_ubyte * size).from_address(address))
    return np.frombuffer(raw, STORED[spec.dtype]).reshape(fixed(spec))


def work_bytes(device: AclDevice, path: Path) -> int:
    """The work memory that a model wants; models that take turns share the largest."""
    work, weight = c_size_t(), c_size_t()
    device.library.call("aclmdlQuerySize", str(path).encode(), byref(work), byref(weight), where=str(path))
    return work.value


def _load(device: AclDevice, path: Path, weights: Weights, work: MemoryBlock) -> int:
    library, number = device.library, c_uint32()
    config = library.made("aclmdlCreateConfigHandle")

    def option(attribute: int, value: Any) -> None:
        # A value that is a pointer is passed as the address of the pointer.
        library.call("aclmdlSetConfigOpt", config, attribute, byref(value), sizeof(value), where=str(path))

    try:
        for name, (address, size) in weights.files.items():
            library.call("aclmdlSetExternalWeightAddress", config, name.encode(), address, size, where=name)
        option(_LOAD_TYPE, c_size_t(_FROM_FILE_WITH_MEMORY))
        option(_PATH, c_char_p(str(path).encode()))
        if work.bytes:
            option(_WORK_ADDRESS, c_void_p(work.address))
            option(_WORK_BYTES, c_size_t(work.bytes))
        library.call("aclmdlLoadWithConfig", config, byref(number), where=str(path))
    finally:
        library.value("aclmdlDestroyConfigHandle", config)
    return number.value
