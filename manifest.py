"""The bundle's manifest: what the compiler writes and every runtime reads.

One JSON file, ``manifest.json``, at the top of the bundle. Readers refuse unknown fields and versions, so a
bundle is either understood in full or not opened. All paths are relative to the bundle, with ``/``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from draftwood.errors import BundleError
from draftwood.planning import Planning

SCHEMA_VERSION = 4
MANIFEST_FILE = "manifest.json"

GraphKind = Literal["prefill", "decode", "verify", "extend", "draft", "step"]
DrafterKind = Literal["medusa", "eagle3", "fasteagle"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TensorSignature(_Struct, frozen=True):
    """One input or output; a string in ``shape`` is a size chosen at run time."""

    name: str
    dtype: Literal["int64", "int32", "bool", "float32", "float16", "bfloat16"]
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

    @property
    def caches(self) -> list[str]:
        """Inputs that are written in place, in call order (``aliases`` itself has none: JSON sorts it)."""
        written = set(self.aliases.values())
        return [spec.name for spec in self.inputs if spec.name in written]

    @property
    def results(self) -> list[str]:
        """Outputs that are not written into an input, in call order."""
        return [spec.name for spec in self.outputs if spec.name not in self.aliases]


class Tree(_Struct, frozen=True):
    """A draft tree: ``file`` holds its rank paths and the tensorized buffers.

    A budget tree has no file, for the drafter chooses its shape at every step: M = ``rows`` - 1 nodes, of at most
    ``depth``, grown by ``width`` candidates a node.
    """

    name: str
    file: str | None
    rows: int
    depth: int
    width: int


class Gear(_Struct, frozen=True):
    """One static shape to decode with: a tree at a KV length.

    ``draft`` names the graph that drafts for it, None for plain decoding. Where that graph has a cache and a KV
    length, ``-kv{slots}`` stands behind the name. Where confidence classes were planned, ``tree`` is that of the
    lowest, and ``class_trees`` those of the others, ascending, all of equally many rows.
    """

    name: str
    tree: str
    slots: int
    graph: str
    draft: str | None
    class_trees: tuple[str, ...] = ()


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

    kind: DrafterKind
    digest: str
    levels: int
    candidates: int
    # Width of the teacher's output per token that drafts are made from.
    features: int
    # Its caches of accepted text, key and value of each of ``layers``; none for Medusa.
    layers: int
    kv_heads: int
    head_dim: int
    # The compiler's description of its network, field by field: what the eager reference is rebuilt from.
    config: dict[str, Any]


class NpuTarget(_Struct, frozen=True):
    """What was lowered for an NPU: one ``.air`` file a graph, beside its text, and ``atc.sh``.

    Graphs have the names of their ONNX siblings; a decode graph may have more rows than one. ``index`` says where
    each weight lies; ``weights`` is there only once it is among the manifest's ``files``.
    """

    dtype: Literal["float16", "bfloat16"]
    soc: str
    index: str
    weights: str
    graphs: tuple[GraphSignature, ...]


class Manifest(_Struct, frozen=True):
    """Everything a runtime needs to know; ``files`` gives the SHA-256 of every other file of the bundle.

    ``graphs`` are those that onnxruntime runs, over ``weights``; both are empty where only an NPU is served.
    """

    schema_version: int
    dims: Dims
    teacher: Teacher
    drafter: Drafter | None
    trees: tuple[Tree, ...]
    gears: tuple[Gear, ...]
    graphs: tuple[GraphSignature, ...]
    weights: str | None
    npu: NpuTarget | None
    # True if tokenizer/ holds what turns text into ids.
    tokenizer: bool
    # Versions of the packages that built the bundle.
    provenance: dict[str, str]
    files: dict[str, str]
    # Of a bundle that was built from a plan: what the runtime's policy knows beforehand.
    planning: Planning | None = None


def cache_names(layers: int) -> list[str]:
    """Names of the cache inputs in call order, key then value of every layer; an output adds ``.out``."""
    return [f"{side}_cache.{i}" for i in range(layers) for side in ("key", "value")]


def draft_cache_names(layers: int) -> list[str]:
    """The same of the drafter's own caches."""
    return [f"draft_{name}" for name in cache_names(layers)]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex, as ``files`` lists it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode(manifest: Manifest) -> bytes:
    """Canonical bytes: sorted keys, two-space indent, so that equal manifests are equal files."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone; BundleError where it is missing, malformed or of another version."""
    path = folder / MANIFEST_FILE
    try:
        data = path.read_bytes()
    except OSError:
        raise BundleError(f"{folder}: no {MANIFEST_FILE}; expected a folder made by draftwood build") from None
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path}: schema version {version}, expected {SCHEMA_VERSION}; build the bundle again with this version"
            )
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{path}: damaged ({error}); build the bundle again") from error


class _Version(msgspec.Struct):
    schema_version: int
