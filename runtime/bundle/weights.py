"""Whether a bundle's weights are as declared: files in order and long enough, every number an allowed one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from draftwood.errors import BundleError
from draftwood.files import open_regular, read_regular
from draftwood.manifest import DAMAGED

MOST_HEADER = 100 << 20  # bytes, the limit of the safetensors library itself
_PIECE = 1 << 22  # bytes read at a time: a multiple of every element size
_REBUILD = "build the bundle again"
# Element type -> its width as an unsigned integer, and the bits of its exponent, all set in NaN and infinity alone.
_EXPONENTS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F64": (np.uint64, 0x7FF0 << 48),
    "F32": (np.uint32, 0x7F80 << 16),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
_IDS: dict[str, type[np.signedinteger]] = {"I32": np.int32, "I64": np.int64}
_WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8}
_WIDTHS |= {"U64": 8} | {kind: np.dtype(word).itemsize for kind, (word, _) in _EXPONENTS.items()}


# As an NPU's index spells them.
_KINDS = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "bool": "BOOL",
}

_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of the file: element type as safetensors spells it, shape, and byte range after the header."""

    dtype: str
    shape: tuple[_Offset, ...]
    data_offsets: tuple[_Offset, _Offset]


class _Constant(msgspec.Struct, frozen=True):
    shape: tuple[_Offset, ...]
    location: str
    offset: _Offset
    length: _Offset
    dtype: str | None = None


class _Index(msgspec.Struct, frozen=True):
    dtype: str
    constants: dict[str, _Constant]


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file in the order of their bytes, ``data_offsets`` counted from the file's start.

    Raises:
        BundleError: the header is damaged, or a tensor lies outside the file or over another.
    """
    try:
        with open_regular(path) as file:
            header, start = _header(file, path)
            size = file.seek(0, 2)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}; {_REBUILD}") from error
    at, tensors = start, {}
    for name, tensor in sorted(header.items(), key=lambda item: item[1].data_offsets):
        begin, end = (start + offset for offset in tensor.data_offsets)
        width = _WIDTHS.get(tensor.dtype)
        if width is None:
            raise BundleError(f"{path}: {name} has dtype {tensor.dtype!r}; expected one of {', '.join(_WIDTHS)}")
        if begin != at or end - begin != width * math.prod(tensor.shape):
            raise BundleError(
                f"{path}: {name} {tensor.dtype} {list(tensor.shape)} lies at bytes {begin} to {end}; expected it whole"
                f" and after the one before it, from {at}; {_REBUILD}"
            )
        at, tensors[name] = end, msgspec.structs.replace(tensor, data_offsets=(begin, end))
    if at != size:
        raise BundleError(f"{path}: {size} bytes; expected {at} by its header; copy the bundle again")
    return tensors


def read_index(path: Path, weights: Path) -> dict[Path, dict[str, Tensor]]:
    """The constants of an NPU's graphs by the file that holds them: ``weights``, or a checkpoint's own file.

    Raises:
        BundleError: the index is damaged, or a constant lies elsewhere in the bundle.
    """
    try:
        index = msgspec.json.decode(read_regular(path), type=_Index)
    except (OSError, *DAMAGED) as error:
        raise BundleError(f"{path}: no weight index ({error}); {_REBUILD}") from error
    tensors: dict[Path, dict[str, Tensor]] = {}
    for name, constant in index.constants.items():
        file, kind = path.parent / constant.location, _KINDS.get(constant.dtype or index.dtype, "")
        if file != weights and not Path(constant.location).is_absolute():
            raise BundleError(f"{path}: {name} lies in {constant.location!r}; expected {weights.name!r}; {_REBUILD}")
        if constant.length != _WIDTHS.get(kind, 0) * math.prod(constant.shape):
            raise BundleError(f"{path}: {name}: {constant.length} bytes do not fit {list(constant.shape)}; {_REBUILD}")
        span = (constant.offset, constant.offset + constant.length)
        tensors.setdefault(file, {})[name] = Tensor(kind, constant.shape, span)
    return tensors


def read_ids(path: Path, tensor: Tensor) -> NDArray[np.int64]:
    """A tensor of token ids, flat; BundleError if it is none or the file ends inside it."""
    kind, (begin, end) = _IDS.get(tensor.dtype), tensor.data_offsets
    try:
        with open_regular(path) as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}; copy the bundle again") from error
    if kind is None or len(data) != end - begin:
        raise BundleError(
            f"{path}: {len(data)} bytes of {tensor.dtype}; expected {end - begin} of token ids; {_REBUILD}"
        )
    return np.frombuffer(data, kind).astype(np.int64)


def check_values(path: Path, tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Refuses NaN, infinity and whole numbers that are no token id, by the tensor's name.

    Whole numbers in a row are ids of the teacher's tokens: a smaller draft vocabulary is mapped so. In a matrix they
    are words of packed weights, which may be any.
    """
    try:
        with open_regular(path) as file:
            for name, tensor in tensors.items():
                if (at := _first_bad(file, tensor, vocabulary, f"{path}: ends inside {name}")) is not None:
                    place = [int(i) for i in np.unravel_index(at, tensor.shape)]
                    expected = "finite number" if tensor.dtype in _EXPONENTS else f"token id below {vocabulary}"
                    raise BundleError(
                        f"{path}: {name}{place} is no {expected}; expected one in every place;"
                        " take a checkpoint in order"
                        " and build the bundle again"
                    )
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}; copy the bundle again") from error


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, Tensor], int]:
    """The header as it stands, and the place of the bytes after it."""
    length = int.from_bytes(file.read(8), "little")
    if length > MOST_HEADER:
        raise BundleError(f"{path}: a header of {length} bytes; expected at most {MOST_HEADER}; {_REBUILD}")
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=Tensor) for name, raw in header.items()}, 8 + length
    except DAMAGED as error:
        raise BundleError(f"{path}: no safetensors header ({error}); {_REBUILD}") from error


def _first_bad(file: BinaryIO, tensor: Tensor, vocabulary: int, short: str) -> int | None:
    """The index of the first forbidden element, counted in the flat tensor; None also if any element is allowed."""
    if tensor.dtype not in (*_EXPONENTS, *_IDS) or (tensor.dtype in _IDS and len(tensor.shape) > 1):
        return None
    done, (begin, end) = 0, tensor.data_offsets
    file.seek(begin)
    for at in range(begin, end, _PIECE):
        piece = file.read(min(_PIECE, end - at))
        if len(piece) < min(_PIECE, end - at):
            raise BundleError(f"{short}; copy the bundle again")
        bad = _bad(piece, tensor.dtype, vocabulary)
        if bad.any():
            return done + int(bad.argmax())
        done += len(bad)
    return None


def _bad(piece: bytes, dtype: str, vocabulary: int) -> NDArray[np.bool_]:
    if dtype in _IDS:
        ids = np.frombuffer(piece, _IDS[dtype])
        return (ids < 0) | (ids >= vocabulary)
    word, exponent = _EXPONENTS[dtype]
    return (np.frombuffer(piece, word) & word(exponent)) == word(exponent)
