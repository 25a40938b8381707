"""The bundle's manifest: what the compiler writes and every runtime reads.

One JSON file, ``manifest.json``, at the top of the bundle. Readers refuse unknown fields and versions, so a
bundle is either understood in full or not opened. All paths are relative to the bundle, with ``/``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"

GraphKind = Literal["prefill", "decode", "verify", "draft", "step"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TensorSignature(_Struct, frozen=True):
    """One input or output; a string in ``shape`` is a size chosen at run time."""

    name: str
    dtype: Literal["int64", "int32", "bool", "float32"]
    shape: tuple[int | str, ...]


class GraphSignature(_Struct, frozen=True):
    """One frozen graph. ``aliases`` maps an output to the input whose buffer it is written into."""

    name: str
    kind: GraphKind
    file: str
    # Rows of the step (tree rows, prefill chunk); 0 where the graph takes any number.
    rows: int
    # Cache slots C, the spare one counted; 0 where the graph takes any number or has no cache.
    slots: int
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    aliases: dict[str, str]


class Tree(_Struct, frozen=True):
    """A draft tree: ``file`` holds its rank paths and the tensorized buffers."""

    name: str
    file: str
    rows: int
    depth: int
    width: int


class Gear(_Struct, frozen=True):
    """One static shape to decode with: a tree at a KV length."""

    name: str
    tree: str
    slots: int
    graph: str


class Dims(_Struct, frozen=True):
    """Sizes that every graph of the bundle shares."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    # Rows of the branch buffer: the largest tree of the bundle.
    branch_rows: int
    # Path slots of a commit: the deepest tree's depth + 1.
    path_rows: int
    # Tokens of a text (prompt and answer) at most.
    context: int


class Teacher(_Struct, frozen=True):
    """Whose output is reproduced; ``digest`` is the SHA-256 over its configuration and weights."""

    digest: str
    bos: int | None
    eos: tuple[int, ...]
    # The compiler's TeacherConfig, field by field: what the eager reference is rebuilt from.
    config: dict[str, Any]


class Drafter(_Struct, frozen=True):
    """What proposes tokens: ``levels`` positions ahead, ``candidates`` ranked tokens at each."""

    kind: Literal["medusa"]
    digest: str
    levels: int
    candidates: int
    # What the eager reference is rebuilt from: residual blocks a head, whether heads use the teacher's output.
    blocks: int
    tied: bool


class Manifest(_Struct, frozen=True):
    """Everything a runtime needs to know; ``files`` gives the SHA-256 of every other file of the bundle."""

    schema_version: int
    dims: Dims
    teacher: Teacher
    drafter: Drafter | None
    trees: tuple[Tree, ...]
    gears: tuple[Gear, ...]
    graphs: tuple[GraphSignature, ...]
    weights: str
    # True if tokenizer/ holds what turns text into ids.
    tokenizer: bool
    # Versions of the packages that built the bundle.
    provenance: dict[str, str]
    files: dict[str, str]


def cache_names(layers: int) -> list[str]:
    """Names of the cache inputs in call order, key then value of every layer; an output adds ``.out``."""
    return [f"{side}_cache.{i}" for i in range(layers) for side in ("key", "value")]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex, as ``files`` lists it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Canonical bytes: sorted keys, two-space indent, so that equal manifests are equal files."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"
