"""The bundle's manifest: the compiler writes it and every runtime reads it.

One JSON file, ``manifest.json``, at the top of the bundle. Readers refuse unknown fields and versions, so a
bundle is either understood in full or not opened. All paths are relative to the bundle, with ``/``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from draftwood.errors import BundleError
from draftwood.files import open_regular, read_regular
from draftwood.planned import Count, FrozenFields, Name, Planning, Size
from draftwood.planned import Gear as Gear

SCHEMA_VERSION = 19
MANIFEST_FILE = "manifest.json"
# A text in which tokens are looked up besides each text's own, if one was given; 0.5 KB a token when opened.
CORPUS_FILE = "lookup/corpus.txt"
MOST_CORPUS_BYTES = 1 << 20
# How the names begin of tensors that are matrices once more, as the builder's kernels read them.
LAYOUTS = "layouts."
# A manifest of a hundred graphs of a model of eighty layers has some 5 MB.
MOST_BYTES = 64 << 20

# The errors that msgspec raises for bytes of another form.
DAMAGED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
# Inside the bundle: no root, no part that begins with a dot, no backslash, no control character.
BundlePath = Annotated[
    str,
    msgspec.Meta(pattern=r"^[^/\\.\x00-\x1f][^/\\\x00-\x1f]*(/[^/\\.\x00-\x1f][^/\\\x00-\x1f]*)*$", max_length=1024),
]

GraphKind = Literal[
    "prefill",
    "decode",
    "verify",
    "accept",
    "extend",
    "draft",
    "draft-texts",
    "whole",
    "step",
    "grouped",
    "batch",
    "texts",
    "accept-texts",
    "bitwise",
]

# Texts of one launch at most: a graph holds an attention of each.
MOST_TEXTS = 32

# Slots of a block of the caches that a graph of kind ``bitwise`` reads and writes.
BLOCK_SLOTS = 64
# Terms of a product of matrices that onnxruntime's kernels (MLAS) sum in one go. They are 256 open slots, for 64
# columns; 128 blocks of settled text; 128 dimensions of a head.
MOST_OPEN, MOST_BLOCKS, MOST_DIM = 256, 128, 128


# How a number is kept, as torch and numpy spell it.
ElementType = Literal["int64", "int32", "int8", "uint4", "bool", "float32", "float16", "bfloat16"]


class TensorSignature(FrozenFields, frozen=True):
    """One input or output; a string in ``shape`` is a size chosen at run time."""

    name: Name
    dtype: ElementType
    shape: tuple[Size | Name, ...]


class StepSignature(FrozenFields, frozen=True, kw_only=True):
    """Inputs and outputs of one step. ``aliases`` maps an output to the input whose buffer it is written into."""

    name: Name
    kind: GraphKind
    # Rows of the step (tree rows, prefill chunk); 0 if the graph takes any number.
    rows: Count
    # Cache slots C, the spare one counted; 0 if the graph takes any number or has no cache.
    slots: Count
    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    aliases: dict[Name, Name]
    # Texts that one launch serves.
    batch: Annotated[int, msgspec.Meta(ge=1, le=MOST_TEXTS)] = 1

    @property
    def static(self) -> bool:
        """Whether no size is chosen at run time."""
        return all(isinstance(size, int) for spec in (*self.inputs, *self.outputs) for size in spec.shape)

    @property
    def caches(self) -> list[str]:
        """Inputs that are written in place, in call order (``aliases`` itself has none: JSON sorts it)."""
        written = set(self.aliases.values())
        return [spec.name for spec in self.inputs if spec.name in written]

    @property
    def results(self) -> list[str]:
        """Outputs that are not written into an input, in call order."""
        return [spec.name for spec in self.outputs if spec.name not in self.aliases]

    def frozen_in(self, file: str) -> GraphSignature:
        """The graph that a target has made of the step, in a file of the bundle."""
        return GraphSignature(**{name: getattr(self, name) for name in StepSignature.__struct_fields__}, file=file)


class GraphSignature(StepSignature, frozen=True, kw_only=True):
    """One frozen graph."""

    file: BundlePath


class Tree(FrozenFields, frozen=True):
    """A draft tree: ``file`` holds its rank paths and the tensorized buffers.

    A budget tree has no file, since the drafter chooses its shape at every step. It has M = ``rows`` - 1 nodes, of at
    most ``depth``, grown by ``width`` candidates a node.
    """

    name: Name
    file: BundlePath | None
    rows: Size
    depth: Count
    width: Count


class Dims(FrozenFields, frozen=True):
    """Sizes that every graph of the bundle shares."""

    hidden: Size
    heads: Size
    vocabulary: Size
    # Rows of the branch buffer: the largest tree of the bundle.
    branch_rows: Size
    # Path slots of a commit: the deepest tree's depth + 1.
    path_rows: Size
    # Tokens of a text (prompt and answer) at most.
    context: Size


class TokenRows(FrozenFields, frozen=True):
    """A buffer that is kept of a sequence: a row for each of its tokens, of ``heads`` parts of ``width`` numbers each.

    A step writes its rows after the committed ones; committing a path keeps the rows of its tokens and drops the rest.
    With several ranks each keeps its part of the heads.
    """

    # Of a graph's input; ``.out`` is added to that of the output.
    name: Name
    heads: Size
    width: Size

    def elements(self, rows: int = 1) -> int:
        """Numbers of so many rows."""
        return rows * self.heads * self.width


class UsualSampling(FrozenFields, frozen=True, omit_defaults=True):
    """How the teacher's authors sample from it, by the names of generation_config.json; a server's defaults."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None


class Teacher(FrozenFields, frozen=True):
    """The model whose output is reproduced; ``digest`` is the SHA-256 over its configuration and weights."""

    digest: Digest
    bos: Count | None
    eos: tuple[Count, ...]
    # Its caches, in call order.
    buffers: tuple[TokenRows, ...]
    # The compiler's TeacherConfig, field by field: the eager reference is rebuilt from it.
    config: dict[str, Any]
    sampling: UsualSampling = UsualSampling()


class Drafter(FrozenFields, frozen=True):
    """A drafter proposes tokens: ``levels`` positions ahead, ``candidates`` ranked tokens at each."""

    # The compiler's name of it. The fields below and those next to the graphs say what a runtime needs to know of a
    # kind.
    kind: Name
    digest: Digest
    levels: Size
    candidates: Size
    # Width of the teacher's output per token that drafts are made from.
    features: Size
    # Its caches of accepted text, in call order, if it has any.
    buffers: tuple[TokenRows, ...]
    # The compiler's description of its network, field by field: the eager reference is rebuilt from it.
    config: dict[str, Any]


class Precision(FrozenFields, frozen=True):
    """How the numbers of a graph set are kept; whole numbers keep their own types.

    ``weights`` int8 are those of the teacher's quantised layers, uint4 those of its packed ones, four or eight bits
    each. All other weights are as ``activations``.
    """

    name: str
    weights: ElementType
    activations: ElementType
    caches: ElementType


class GraphSet(FrozenFields, frozen=True):
    """The graphs of one target and rank, over one file of weights.

    All ranks of a target have the same graphs; a rank's weights alone say which part of the model it computes.

    onnxruntime runs ``onnx``. ``ge`` is for an Ascend NPU: one ``.air`` file a graph, next to its text, and ``atc.sh``.
    Graphs of one name are siblings in all sets; a decode graph of ``ge`` may have more rows than one.
    """

    target: Name
    # Which of ``ranks`` devices it is for, from 0.
    rank: Count
    ranks: Size
    precision: Precision
    # There only once it is among the manifest's ``files``.
    weights: BundlePath
    # Says where in ``weights`` each weight lies, if the file itself does not.
    index: BundlePath | None
    # The chip that it was lowered for, if that matters.
    soc: str | None
    graphs: tuple[GraphSignature, ...]
    # Package -> the least release of it that the graphs need; empty if any will do.
    needs: dict[Name, str] = msgspec.field(default_factory=dict)


class File(FrozenFields, frozen=True):
    """A file that the manifest vouches for."""

    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    sha256: Digest


class Manifest(FrozenFields, frozen=True):
    """Everything a runtime needs to know; ``files`` gives size and SHA-256 of every other file of the bundle."""

    schema_version: int
    dims: Dims
    teacher: Teacher
    drafter: Drafter | None
    trees: tuple[Tree, ...]
    gears: tuple[Gear, ...]
    # One of each target and rank.
    graph_sets: tuple[GraphSet, ...]
    # True if tokenizer/ holds a tokenizer of text.
    tokenizer: bool
    # Versions of the packages that built the bundle.
    provenance: dict[str, str]
    files: dict[BundlePath, File]
    # If the bundle was built from a plan: the knowledge that the runtime's policy begins with.
    planning: Planning | None = None

    @property
    def quantised(self) -> bool:
        """Whether the teacher's linear layers have weights of whole numbers, and their rows are rounded to int8."""
        return self.packed or any(graphs.precision.weights == "int8" for graphs in self.graph_sets)

    @property
    def packed(self) -> bool:
        """Whether these weights are packed in blocks, of four or eight bits."""
        return any(graphs.precision.weights == "uint4" for graphs in self.graph_sets)

    @property
    def int8(self) -> bool:
        """Whether any linear layer, the drafter's included, is computed so."""
        return self.quantised or bool(self.drafter and self.drafter.config.get("quantised"))

    def graph_set(self, target: str, rank: int = 0) -> GraphSet | None:
        """The graph set of a target and rank, if it was lowered."""
        return next((graphs for graphs in self.graph_sets if (graphs.target, graphs.rank) == (target, rank)), None)

    def rank_sets(self, target: str) -> tuple[GraphSet, ...]:
        """The graph sets of all ranks of a target, in order; none if nothing was lowered for it."""
        sets = (graphs for graphs in self.graph_sets if graphs.target == target)
        return tuple(sorted(sets, key=lambda graphs: graphs.rank))

    def graphs_of(self, target: str, rank: int = 0) -> tuple[GraphSignature, ...]:
        """The graphs of a target and rank; none if nothing was lowered for it."""
        graphs = self.graph_set(target, rank)
        return graphs.graphs if graphs else ()


def heads_of_rank(heads: int, ranks: int) -> int:
    """Key/value heads that each of ``ranks`` devices has; fewer heads than devices are held by several of them."""
    return max(heads // ranks, 1) if heads else 0


def of_rank(buffers: Iterable[TokenRows], ranks: int) -> tuple[TokenRows, ...]:
    """The part of the buffers that each of ``ranks`` devices keeps."""
    return tuple(msgspec.structs.replace(buffer, heads=heads_of_rank(buffer.heads, ranks)) for buffer in buffers)


def past_bitwise(slots: int, rows: int, width: int) -> str:
    """The size, of the longest text, the largest trees and a cache's rows, for which a graph of kind ``bitwise`` sums
    in another order in a tree; empty if there is none."""
    for what, got, most in (
        ("KV length", slots, MOST_BLOCKS * BLOCK_SLOTS),
        ("rows and depth of the largest trees", rows, MOST_OPEN - BLOCK_SLOTS),
        ("width of a cache's rows", width, MOST_DIM),
    ):
        if got > most:
            return f"{what} {got}; expected at most {most}, or sums are cut elsewhere in a tree"
    return ""


def settled_name(cache: str) -> str:
    """Name of the settled blocks of a cache, which a graph of kind ``bitwise`` reads besides the open ones."""
    return f"settled_{cache}"


def text_name(text: int | str, name: str) -> str:
    """Name of an input or output of one text of a graph that serves several; the bare name if ``text`` is empty."""
    return f"text{text}.{name}" if text != "" else name


def texts_name(texts: int, rows: int, slots: int) -> str:
    """Name of the static graph that verifies ``rows`` rows of each of ``texts`` texts."""
    return f"verify-b{texts}-t{rows}-kv{slots}"


def texts_accept_name(draws: str, texts: int, rows: int) -> str:
    """Name of the graph that accepts rows which such a graph has verified, ``draws`` being greedy or sampled."""
    return f"accept-{draws}-b{texts}-t{rows}"


def whole_name(gear: str, draws: str) -> str:
    """Name of the graph that does a whole step of a gear, ``draws`` being greedy or sampled."""
    return f"whole-{draws}-{gear}"


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file, in hex, as ``files`` lists it."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_file(path: Path) -> File:
    """The entry of a file in ``files``."""
    return File(bytes=path.stat().st_size, sha256=file_digest(path))


def encode(manifest: Manifest) -> bytes:
    """Canonical bytes: sorted keys, two-space indent, so that equal manifests are equal files."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone; BundleError if it is missing, malformed, of another version, or where no engine opens it."""
    path = folder / MANIFEST_FILE
    try:
        data = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise BundleError(f"{folder}: {_no_bundle(folder, error)}") from None
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise BundleError(
            f"{folder}: the path is not UTF-8, and onnxruntime opens no such files; rename the folder, or, if it is"
            " UTF-8, set a locale that is"
        ) from None
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise BundleError(
                f"{path}: schema version {version}, expected {SCHEMA_VERSION}; build the bundle again with this version"
            )
        return msgspec.json.decode(data, type=Manifest)
    except DAMAGED as error:
        raise BundleError(f"{path}: damaged ({error}); build the bundle again") from error


def _no_bundle(folder: Path, error: OSError) -> str:
    """The reason why a folder has no manifest, and the way out: people often name the model itself."""
    reason = f"no readable {MANIFEST_FILE} ({error.strerror})"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if folder.suffix == ".gguf" or (folder / "config.json").is_file():
            return f"no bundle but a model; expected what draftwood make {folder} --out BUNDLE writes"
        reason = reason if folder.exists() else "no such folder"
    return f"{reason}; expected a bundle, as draftwood make or draftwood build writes it"


class _Version(msgspec.Struct):
    schema_version: int
