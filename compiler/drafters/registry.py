"""The registry: which kinds of drafter there are, and which of them a folder or a manifest's entry holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from draftwood import manifest as m
from draftwood.compiler.checkpoints.fields import read_json
from draftwood.compiler.drafters.kind import SHIPPED, Kind
from draftwood.errors import BundleError, CheckpointError, RequestError, TreeError
from draftwood.trees import Topology
from draftwood.trees.spec import Budget

if TYPE_CHECKING:
    from draftwood.compiler.drafters.model import DraftModel, OpenedDrafter
    from draftwood.compiler.teachers.checkpoint import Checkpoint
    from draftwood.compiler.teachers.config import TeacherConfig

_kinds: dict[str, Kind] = {kind.name: kind for kind in SHIPPED}


def register(kind: Kind) -> None:
    """Adds a kind; if several recognise a folder, the kind registered first gets it.

    Raises:
        ValueError: another kind has its name, or gives another meaning to the flag of one of its options.
    """
    if kind.name in _kinds:
        raise ValueError(f"{kind.name}: there is a kind of that name already")
    for name, option in kind.options.items():
        for other in _kinds.values():
            same = other.options.get(name, option)
            if (same.read, same.count) != (option.read, option.count):
                raise ValueError(f"{kind.name}: --{name} does not read what --{name} of {other.name} reads")
    _kinds[kind.name] = kind


def kinds() -> tuple[Kind, ...]:
    """Every kind, as registered."""
    return tuple(_kinds.values())


def names() -> tuple[str, ...]:
    """Their names."""
    return tuple(_kinds)


def kind_named(name: str) -> Kind:
    """The kind of a name; RequestError lists them."""
    if name not in _kinds:
        raise RequestError(f"{name}: no kind of drafter; expected {', '.join(_kinds)}")
    return _kinds[name]


def kind_of(path: Path) -> Kind:
    """The kind that recognises a folder or file; CheckpointError if none does."""
    fields = _fields(path if path.is_dir() else path.parent)
    for kind in _kinds.values():
        if kind.model.recognises(path, fields):
            return kind
    raise CheckpointError(f"{path}: no drafter; expected {', or '.join(kind.layout for kind in _kinds.values())}")


def _fields(folder: Path) -> dict[str, Any]:
    config = folder / "config.json"
    return read_json(config) if config.is_file() else {}


def open_drafter(path: Path, teacher: Checkpoint) -> OpenedDrafter:
    """Opens a folder or file of any kind; CheckpointError if it is none or does not fit the teacher."""
    from draftwood.compiler.checkpoints.scheme import states_rotated  # torch, which the command line does without

    if states_rotated(teacher.path):
        warnings.warn(
            f"{teacher.path}: the teacher's states are rotated (QuaRot); a drafter that reads those of the original"
            " proposes next to nothing; train one for this folder, or quantise without the rotation",
            stacklevel=2,
        )
    return kind_of(path).model.open(path, teacher)


def describe_drafter(path: Path, teacher: Checkpoint) -> OpenedDrafter:
    """The drafter that config.json describes, without its weights, which may be absent.

    For a kind whose network depends on its tensors, and of a file or a folder without config.json, the tensors' headers
    and the map of the vocabulary are read.

    Raises:
        CheckpointError: there is no drafter, or it does not fit the teacher.
    """
    fields = _fields(path)
    for kind in _kinds.values():
        if kind.model.described_by in fields:
            return kind.model.describe(path, teacher)
    return open_drafter(path, teacher)


def drafter_of(entry: m.Drafter) -> DraftModel:
    """The draft model that a manifest describes.

    Raises:
        BundleError: no kind has its name, or the kind cannot read its sizes.
    """
    if entry.kind not in _kinds:
        raise BundleError(f"drafter of kind {entry.kind!r}; expected {', '.join(_kinds)}")
    try:
        return _kinds[entry.kind].model.of_manifest(entry.config)
    except msgspec.ValidationError as error:
        raise BundleError(f"drafter: no sizes of {entry.kind} ({error}); build the bundle again") from error


def check_tree(model: DraftModel, name: str, tree: Topology | Budget, teacher: TeacherConfig) -> None:
    """Raises TreeError if the drafter cannot draft this tree."""
    if isinstance(tree, Budget) and not model.follows_nodes:
        able = " or ".join(kind.title for kind in _kinds.values() if kind.model.follows_nodes)
        raise TreeError(
            f"tree {name}: a budget tree follows candidates that depend on the node above them; it needs {able}"
        )
    model.check_tree(name, tree, teacher)
