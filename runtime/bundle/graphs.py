"""Whether an ONNX file has the manifest's inputs and outputs, read from the file without building anything of it.

Field numbers are those of onnx.proto (ModelProto, GraphProto, ValueInfoProto, TensorProto); all else is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from draftwood.errors import BundleError
from draftwood.files import read_regular
from draftwood.manifest import GraphSignature
from draftwood.runtime.bundle.sessions import check_ends

_GRAPH, _INITIALIZER, _INPUT, _OUTPUT = 7, 5, 11, 12
_EXTERNAL_DATA = 13
_TYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
# Weights lie outside; the rest is structure and small constants.
_MOST_BYTES = 1 << 28
_PAGE = 4096


def check_graph(folder: Path, signature: GraphSignature, weights: str | None, bytes_to: Mapping[int, int]) -> None:
    """Inputs and outputs of a graph's file against its signature; its weights lie in ``weights`` and nowhere else.

    ``bytes_to`` are the first bytes of the weights' tensors of bytes by their ends. onnxruntime reads a matrix's layout
    by the graph's word for its length. So each has to be one of these from its first page's border on.

    Raises:
        BundleError: they differ, or the file is no ONNX model.
    """
    path = folder / signature.file
    try:
        data = read_regular(path, _MOST_BYTES)
        model = memoryview(data)
        graph = bytes_of(_one(model, _GRAPH) or 0)
        parts = [(number, value) for number, value in fields(graph) if number in (_INITIALIZER, _INPUT, _OUTPUT)]
        real = {of: dict(_end(bytes_of(v)) for number, v in parts if number == of) for of in (_INPUT, _OUTPUT)}
        outside = [_outside(bytes_of(value)) for number, value in parts if number == _INITIALIZER]
        # Those of nodes, of inner graphs or of a second graph would not be looked at.
        if data.count(b"location") != sum("location" in entries for entries in outside):
            raise ValueError("tensors that lie outside, besides the graph's own")
        layouts = [span for entries in outside for span in _layouts(entries)]
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: no ONNX model ({error}); build the bundle again") from error
    check_ends(signature, path, real[_INPUT], real[_OUTPUT])
    for place in (entries["location"] for entries in outside if "location" in entries):
        if (PurePosixPath(signature.file).parent / place).as_posix() != weights:
            raise BundleError(f"{path}: reads weights from {place!r}; expected {weights}; build the bundle again")
    for begin, end in layouts:
        if begin % _PAGE or not 0 <= begin - bytes_to.get(end, end) < _PAGE:
            raise BundleError(
                f"{path}: reads a layout from bytes {begin} to {end}; expected a tensor of {weights}; build the bundle"
                " again"
            )


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of a protobuf message; ValueError if it is none."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire, length = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        if wire == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, at = _varint(message, at)
        elif not length:
            raise ValueError(f"wire type {wire}")
        if at + length > len(message):
            raise ValueError("ends inside a field")
        yield tag >> 3, message[at : at + length]
        at += length


def bytes_of(value: int | memoryview) -> memoryview:
    """A field's value that has to be bytes."""
    if isinstance(value, int):
        raise ValueError("something else where a message belongs")
    return value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number without end")


def _one(message: memoryview, *path: int) -> int | memoryview | None:
    """The last field with this number, which is the one that counts; of messages within messages by their numbers."""
    last: int | memoryview | None = None
    for number, value in fields(message):
        if number == path[0]:
            last = value
    return _one(bytes_of(last), *path[1:]) if last is not None and len(path) > 1 else last


def _end(value_info: memoryview) -> tuple[str, tuple[str, list[int | str]]]:
    """Name, element type and shape."""
    kind, shape = _one(value_info, 2, 1, 1), _one(value_info, 2, 1, 2)
    sizes = [_size(bytes_of(v)) for number, v in fields(bytes_of(shape or memoryview(b""))) if number == 1]
    return _text(_one(value_info, 1)), (_TYPES.get(kind if isinstance(kind, int) else 0, f"type {kind!r}"), sizes)


def _size(dimension: memoryview) -> int | str:
    value = _one(dimension, 1)
    return value if isinstance(value, int) else _text(_one(dimension, 2))


def _outside(tensor: memoryview) -> dict[str, str]:
    """Where a stored tensor lies, and its layouts; nothing if it is part of the graph."""
    entries = (bytes_of(value) for number, value in fields(tensor) if number == _EXTERNAL_DATA)
    return {_text(_one(entry, 1)): _text(_one(entry, 2)) for entry in entries}


def _layouts(entries: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """First byte and end of every part of a tensor's layouts, each ``HASH|OFFSET;LENGTH;CHECKSUM|...``."""
    for key, value in entries.items():
        if key.startswith("prepacked"):
            for part in value.split("|")[1:]:
                begin, length, _ = map(int, part.split(";"))
                yield begin, begin + length


def _text(value: int | memoryview | None) -> str:
    return bytes(bytes_of(value if value is not None else memoryview(b""))).decode()
