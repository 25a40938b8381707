"""The weights of all GE graphs of a bundle: one file, stored once, that every graph's constants point into.

GE's combined form of external weights: raw tensors in one file, each on a 512-byte boundary. The attributes
``location``, ``offset`` and ``length`` of a FileConstant address them (docs/en/design/features/external_weight.md of
GE's open source). An index next to the file says where each tensor lies and which tensors of the checkpoint make it. So
weights can be bound after the build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from draftwood.errors import BundleError
from draftwood.files import open_regular, read_regular
from draftwood.manifest import DAMAGED, File, GraphSet, list_file

ALIGNMENT = 512  # what GE demands of a combined file, for its DMA


Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Dtype = Literal["float16", "bfloat16", "float32", "int64", "int32", "int8", "bool"]


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One weight: its place in ``location`` and, in ``parts``, the checkpoint tensors concatenated along dimension 0.

    ``location`` is a file of the bundle's ``npu`` folder, or the absolute path of a checkpoint's own file if the weight
    is used in place. ``parts`` is empty for computed values, such as rotary tables.
    """

    shape: tuple[Offset, ...]
    location: str
    offset: Offset
    length: Offset
    parts: tuple[str, ...]
    # The element type if it is not the index's: whole numbers.
    dtype: Dtype | None = None


class WeightIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The whole index, ``npu/weights.json``; ``bytes`` is the size of the weights file."""

    dtype: Dtype
    bytes: Offset
    constants: dict[str, Constant]
    # The checkpoint's own files that weights are used in, by their paths.
    linked: dict[str, File] = {}


def plan_weights(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    location: str,
    parts: Mapping[str, tuple[str, ...]],
    linked: Mapping[str, tuple[Path, int]],
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> WeightIndex:
    """Lays the weights out. ``linked`` weights (file, byte offset) stay where they are; ``others`` have their own
    type."""
    at, constants = 0, {}
    for name, shape in shapes.items():
        length = torch.Size(shape).numel() * others.get(name, dtype).itemsize
        file, offset = linked.get(name, (Path(location), at))
        constants[name] = Constant(
            shape=shape,
            location=str(file),
            offset=offset,
            length=length,
            parts=parts.get(name, ()),
            dtype=_name(others[name]) if name in others else None,
        )
        if name not in linked:
            at += -(-length // ALIGNMENT) * ALIGNMENT
    files = {str(file): _linked_file(file) for file in sorted({file for file, _ in linked.values()})}
    return WeightIndex(dtype=_name(dtype), bytes=at, constants=constants, linked=files)


def _name(dtype: torch.dtype) -> Dtype:
    return cast(Dtype, str(dtype).removeprefix("torch."))


def write_index(path: Path, index: WeightIndex) -> None:
    """Equal indices are equal files."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(index, order="sorted"), indent=1) + b"\n")


def read_index(path: Path) -> WeightIndex:
    """BundleError if the index is missing or damaged."""
    try:
        return msgspec.json.decode(read_regular(path), type=WeightIndex)
    except (OSError, *DAMAGED) as error:
        raise BundleError(f"{path}: not a weight index ({error}); build the bundle again") from error


def write_npu_weights(path: Path, index: WeightIndex, read: Callable[[str], Tensor]) -> None:
    """Streams the weights that belong into ``path``, one tensor in memory at a time."""
    with path.open("wb") as file:
        for name, constant in index.constants.items():
            if constant.location != path.name:
                continue
            value = read(name).to(getattr(torch, constant.dtype or index.dtype)).contiguous()
            assert tuple(value.shape) == constant.shape, (name, value.shape, constant.shape)
            file.seek(constant.offset)
            file.write(value.view(-1).view(torch.uint8).numpy().data)
        file.truncate(index.bytes)


def map_npu_weights(folder: Path, index: WeightIndex) -> dict[str, Tensor]:
    """Weights as views of a memory map; ``folder`` is the bundle's ``npu`` folder.

    Raises:
        BundleError: the weights are not there, or their file is too short, or a file of the checkpoint has changed.
    """
    for path, file in index.linked.items():
        _check_linked(Path(path), file)
    maps: dict[str, np.memmap] = {}
    values = {}
    for name, constant in index.constants.items():
        if constant.location not in maps:
            maps[constant.location] = _map(folder / constant.location, folder)
        raw = maps[constant.location][constant.offset : constant.offset + constant.length]
        if len(raw) != constant.length:
            raise BundleError(f"{folder / constant.location}: ends before {name}; bind the weights again")
        dtype = getattr(torch, constant.dtype or index.dtype)
        try:
            values[name] = torch.from_numpy(raw).view(dtype).view(constant.shape)
        except (RuntimeError, ValueError) as error:
            raise BundleError(
                f"{folder / constant.location}: {name} does not fit its bytes ({error}); build it again"
            ) from error
    return values


def _linked_file(path: Path) -> File:
    """The entry of a checkpoint's file. Its digest is taken once in a process, since every rank and engine asks."""
    status = path.stat()
    return _listed(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@cache
def _listed(path: Path, *_stamps: int) -> File:
    return list_file(path)


def _check_linked(path: Path, built: File) -> None:
    """BundleError if weights that stayed in the checkpoint would be read next to others of another one."""
    try:
        same = _linked_file(path) == built
    except OSError as error:
        raise BundleError(
            f"{path}: cannot be read ({error}); put the checkpoint back, or build the bundle again"
        ) from None
    if not same:
        raise BundleError(
            f"{path}: has changed since the bundle was built, which reads weights there (--weights link); put the file"
            " back, or build the bundle again"
        )


def _map(path: Path, folder: Path) -> np.memmap:
    try:
        # Copy on write: torch wants writable memory, and nothing may ever change the file.
        with open_regular(path) as file:
            return np.memmap(file, np.uint8, mode="c")
    except (OSError, ValueError):
        raise BundleError(
            f"{path}: no weights; the bundle was built without them; run draftwood bind {folder.parent} MODEL"
        ) from None


def bundle_npu_weights(folder: Path, graphs: GraphSet) -> dict[str, Tensor]:
    """Views of the weights of a bundle's NPU graphs; BundleError if they are not bound yet."""
    return map_npu_weights((folder / str(graphs.index)).parent, bundle_index(folder, graphs))


def bundle_index(folder: Path, graphs: GraphSet) -> WeightIndex:
    """The index of the weights of a bundle's NPU graphs."""
    assert graphs.index is not None, "an NPU's weights have an index"
    return read_index(folder / graphs.index)
