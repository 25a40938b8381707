"""The header of a GGUF file: its metadata, and where each tensor lies, every count and offset held against the file.

Nothing is allocated by a number that the file names before as many bytes are known to be there. Layout: ggml's
docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from draftwood.errors import CheckpointError
from draftwood.files import open_regular

# By the number of a metadata value's type; 8 is a string, 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
# Kinds of tokens that stand for themselves in a text; the former are not shown.
CONTROL, USER_DEFINED = 3, 4
_VERSIONS = (2, 3)
_ALIGNMENT, _LARGEST_ALIGNMENT = 32, 1 << 16
_MOST_AXES = 4
# ggml holds names in 64 bytes; metadata keys have 2 ** 16 at most.
_LONGEST_NAME, _LONGEST_KEY = 127, (1 << 16) - 1
# Bytes of the shortest entries. Metadata: a key's length, a type and a byte. Tensors: a name's length, the number of
# axes, one axis, a type and an offset.
_LEAST_FIELD, _LEAST_TENSOR = 13, 32
_FETCH = "fetch the file again"


@dataclass(frozen=True, slots=True)
class MetadataArray:
    """An array of the metadata: its elements' type, how many there are, and where the first stands."""

    kind: int
    count: int
    start: int

    def __repr__(self) -> str:  # as messages show the value of a key
        return f"a list of {self.count}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in the file; ``shape`` is outermost axis first, ``kind`` is ggml's name for its blocks."""

    file: Path
    shape: tuple[int, ...]
    kind: str
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A file's metadata, arrays by their places, and its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def array(self, key: str) -> list[Any]:
        """The elements of an array of the metadata; empty if there is no such key.

        Raises:
            CheckpointError: the key holds something else, or a string is not UTF-8.
        """
        place = self.fields.get(key)
        if place is None:
            return []
        if not isinstance(place, MetadataArray):
            raise CheckpointError(f"{self.path}: {key} is {place!r}; expected an array; {_FETCH}")
        with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            cursor = _Cursor(self.path, mapped, place.start)
            if place.kind == _STRING:
                return [cursor.string(key) for _ in range(place.count)]
            return list(struct.unpack_from(f"<{place.count}{_SCALARS[place.kind]}", mapped, place.start))

    def indices(self, key: str, texts: Collection[str]) -> list[int]:
        """Where one of the texts stands in an array of strings, ascending; empty if the key holds no such array. Six
        times as fast as ``array``, since few strings have such a length."""
        place, wanted = self.fields.get(key), {text.encode() for text in texts}
        if not isinstance(place, MetadataArray) or place.kind != _STRING:
            return []
        length, sizes, at, found = struct.Struct("<Q").unpack_from, {*map(len, wanted)}, place.start, list[int]()
        with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for index in range(place.count):
                size = length(mapped, at)[0]
                if size in sizes and mapped[at + 8 : at + 8 + size] in wanted:
                    found.append(index)
                at += 8 + size
        return found


def read_header(path: Path) -> Header:
    """A file's header.

    Raises:
        CheckpointError: the file is missing, or its header is no GGUF, contradicts itself or points outside the file.
    """
    try:
        with open_regular(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _header(_Cursor(path, mapped))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; expected a GGUF file") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: not readable as GGUF ({error}); {_FETCH}") from None


class _Cursor:
    """A place in a mapped file that moves with every read."""

    def __init__(self, path: Path, held: mmap.mmap, at: int = 0) -> None:
        self.path, self.held, self.at = path, held, at

    def fail(self, said: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {said}; {_FETCH}")

    @property
    def left(self) -> int:
        return len(self.held) - self.at

    def skip(self, size: int, what: str) -> int:
        """Moves on; returns where it was."""
        if size > self.left:
            self.fail(f"{what} takes {size} bytes at byte {self.at}; expected at most the {self.left} that are left")
        at, self.at = self.at, self.at + size
        return at

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.held, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str) -> bytes:
        size = self.number("Q", what)
        at = self.skip(size, what)
        return self.held[at : at + size]

    def string(self, what: str, longest: int | None = None) -> str:
        text = self.text(what)
        if longest is not None and len(text) > longest:
            self.fail(f"{what} has {len(text)} bytes; expected at most {longest}")
        try:
            return text.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} holds {text[:40]!r}; expected UTF-8")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            self.fail(f"{key} has a value of type {kind}; expected 0 to 12")
        return self.array(key)

    def array(self, key: str) -> MetadataArray:
        kind, count = self.number("I", key), self.number("Q", key)
        if kind not in _SCALARS and kind != _STRING:
            self.fail(f"{key} is an array of type {kind}; expected numbers or strings, not arrays of arrays")
        least = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS[kind]}")
        if count * least > self.left:
            self.fail(f"{key} has {count} elements at byte {self.at}; expected as many as {self.left} bytes hold")
        start = self.at
        if kind == _STRING:
            self.skip_strings(count, key)
        else:
            self.skip(count * least, key)
        return MetadataArray(kind, count, start)

    def skip_strings(self, count: int, key: str) -> None:
        """Moves on by their lengths alone; a vocabulary has a hundred thousand, and is passed several times a build."""
        length, content, at, end = struct.Struct("<Q").unpack_from, self.held, self.at, len(self.held)
        for _ in range(count):
            size = length(content, at)[0] if at + 8 <= end else end
            if at + 8 + size > end:
                break
            at += 8 + size
        else:
            self.at = at
            return
        self.at = at
        self.skip(self.number("Q", key), key)  # says which string ends beyond the file


def _header(cursor: _Cursor) -> Header:
    if cursor.held[:4] != b"GGUF":
        cursor.fail(f"begins with {cursor.held[:4]!r}; expected GGUF")
    cursor.skip(4, "the first word")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        cursor.fail(f"is of version {version}; expected {' or '.join(map(str, _VERSIONS))}, little-endian")
    tensors, fields = cursor.number("Q", "the number of tensors"), cursor.number("Q", "the number of metadata")
    for what, count, least in (("tensors", tensors, _LEAST_TENSOR), ("metadata", fields, _LEAST_FIELD)):
        if count * least > cursor.left:
            cursor.fail(f"names {count} {what}; expected as many as {cursor.left} bytes can hold")
    metadata = dict(_fields(cursor, fields))
    placed = list(_tensors(cursor, tensors))
    return Header(cursor.path, metadata, _laid_out(cursor, metadata, placed))


def _fields(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen = set[str]()
    for _ in range(count):
        key = cursor.string("a key of the metadata", _LONGEST_KEY)
        if key in seen:
            cursor.fail(f"has {key!r} twice in its metadata; expected it once")
        seen.add(key)
        yield key, cursor.value(cursor.number("I", key), key)


def _tensors(cursor: _Cursor, count: int) -> Iterator[tuple[str, tuple[int, ...], str, int, int]]:
    """Name, shape, blocks, offset and bytes of each."""
    for _ in range(count):
        name = cursor.string("the name of a tensor", _LONGEST_NAME)
        axes = cursor.number("I", name)
        if not 1 <= axes <= _MOST_AXES:
            cursor.fail(f"tensor {name} has {axes} axes; expected 1 to {_MOST_AXES}")
        shape = tuple(cursor.number("Q", name) for _ in range(axes))[::-1]
        kind, offset = cursor.number("I", name), cursor.number("Q", name)
        title, size = _size(cursor, name, shape, kind)
        yield name, shape, title, offset, size


def _size(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """ggml's name for the tensor's blocks, and their bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(each): each for each in GGMLQuantizationType}
    if kind not in known:
        cursor.fail(f"tensor {name} has blocks of type {kind}, which this package gguf does not know")
    block, size = GGML_QUANT_SIZES[known[kind]]
    if not all(shape) or shape[-1] % block:
        cursor.fail(
            f"tensor {name} has shape {list(shape)}; expected rows of a multiple of {block} for {known[kind].name}"
        )
    return known[kind].name, prod(shape) // block * size


def _laid_out(
    cursor: _Cursor, fields: Mapping[str, Any], placed: list[tuple[str, tuple[int, ...], str, int, int]]
) -> dict[str, StoredTensor]:
    """The tensors by name. None may overlap another or the end of the file."""
    alignment = fields.get("general.alignment", _ALIGNMENT)
    whole = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not whole or not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}; expected a power of two up to {_LARGEST_ALIGNMENT}")
    begin = -(-cursor.at // alignment) * alignment
    tensors, reached = dict[str, StoredTensor](), 0
    for name, shape, kind, offset, size in sorted(placed, key=lambda tensor: tensor[3]):
        if name in tensors:
            cursor.fail(f"has tensor {name} twice; expected it once")
        if offset % alignment or offset < reached:
            cursor.fail(f"tensor {name} begins at {offset}; expected a multiple of {alignment} from {reached} on")
        reached = offset + size
        if begin + reached > len(cursor.held):
            cursor.fail(f"tensor {name} ends at byte {begin + reached}; the file has {len(cursor.held)}")
        tensors[name] = StoredTensor(cursor.path, shape, kind, begin + offset, size)
    return tensors
