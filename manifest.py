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

SCHEMA_VERSION = 5
MANIFEST_FILE = "manifest.json"

GraphKind = Literal["prefill", "decode", "verify", "extend", "draft", "step"]
DrafterKind = Literal["medusa", "eagle3", "fasteagle"]


# How a number is kept, as torch and numpy spell it.
ElementType = Literal["int64", "int32", "bool", "float32", "float16", "bfloat16"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class TensorSignature(_Struct, frozen=True):
    """One input or output; a string in ``shape`` is a size chosen at run time."""

    name: str
    dtype: ElementType
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
    # Texts that one launch serves.
    batch: int = 1

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
    length, ``-kv{slots}`` stands behind the name.
    """

    name: str
    tree: str
    slots: int
    graph: str
    draft: str | None


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


class Precision(_Struct, frozen=True):
    """How the numbers of a graph set are kept; whole numbers keep their own types."""

    name: str
    weights: ElementType
    activations: ElementType
    caches: ElementType


class GraphSet(_Struct, frozen=True):
    """What was lowered for one target: the graphs of one rank of it, over one file of weights.

    ``onnx`` is what onnxruntime runs. ``ge`` is for an Ascend NPU: one ``.air`` file a graph, beside its text, and
    ``atc.sh``. Graphs of one name are siblings in all sets; a decode graph of ``ge`` may have more rows than one.
    """

    target: str
    # Which of ``ranks`` devices it is for, from 0.
    rank: int
    ranks: int
    precision: Precision
    # There only once it is among the manifest's ``files``.
    weights: str
    # Says where in ``weights`` each weight lies, where the file itself does not.
    index: str | None
    # The chip that it was lowered for, where that matters.
    soc: str | None
    graphs: tuple[GraphSignature, ...]


class Manifest(_Struct, frozen=True):
    """Everything a runtime needs to know; ``files`` gives the SHA-256 of every other file of the bundle."""

    schema_version: int
    dims: Dims
    teacher: Teacher
    drafter: Drafter | None
    trees: tuple[Tree, ...]
    gears: tuple[Gear, ...]
    # One of each target and rank.
    graph_sets: tuple[GraphSet, ...]
    # True if tokenizer/ holds what turns text into ids.
    tokenizer: bool
    # Versions of the packages that built the bundle.
    provenance: dict[str, str]
    files: dict[str, str]

    def graph_set(self, target: str, rank: int = 0) -> GraphSet | None:
        """What was lowered for a target and rank, if anything was."""
        return next((one for one in self.graph_sets if (one.target, one.rank) == (target, rank)), None)

    def graphs_of(self, target: str, rank: int = 0) -> tuple[GraphSignature, ...]:
        """The graphs of a target and rank; none where nothing was lowered for it."""
        found = self.graph_set(target, rank)
        return found.graphs if found else ()


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
