"""Opens a bundle: everything is verified before anything is used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from draftwood.errors import BundleError, RequestError, TreeError
from draftwood.manifest import Gear, GraphSignature, Manifest, file_digest, read_manifest
from draftwood.runtime.tokenizer import Tokenizer
from draftwood.trees import Topology, TreeBuffers
from draftwood.trees.frozen import thaw


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. ``trees`` maps a tree's name to its topology and buffers; a budget tree has neither."""

    folder: Path
    manifest: Manifest
    trees: dict[str, tuple[Topology, TreeBuffers]]

    @classmethod
    def open(cls, folder: Path) -> Bundle:
        """Reads the manifest, checks the SHA-256 of every file and the invariants of every tree.

        Raises:
            BundleError: not a bundle, of another schema version, or a file is missing or altered.
        """
        manifest = read_manifest(folder)
        _check_names(folder, manifest)
        for name, digest in manifest.files.items():
            _verify(folder, name, digest)
        try:
            trees = {
                tree.name: thaw((folder / tree.file).read_text(), str(folder / tree.file))
                for tree in manifest.trees
                if tree.file
            }
        except TreeError as error:
            raise BundleError(str(error)) from error
        return cls(folder, manifest, trees)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where the checkpoint had none: prompts are then given as ids."""
        return Tokenizer.load(self.folder / "tokenizer") if self.manifest.tokenizer else None

    def graph(self, name: str) -> GraphSignature:
        """A graph for onnxruntime by its name; BundleError where the bundle holds none."""
        for graph in self.manifest.graphs:
            if graph.name == name:
                return graph
        raise BundleError(f"{self.folder}: has no graph {name!r} for a CPU; build it with --target onnx or onnx,ge")

    def gear(self, name: str) -> Gear:
        """A gear by its name; RequestError lists what the bundle holds."""
        for gear in self.manifest.gears:
            if gear.name == name:
                return gear
        names = ", ".join(gear.name for gear in self.manifest.gears)
        raise RequestError(f"gear {name!r}: not in {self.folder}; it holds {names}")


def _check_names(folder: Path, manifest: Manifest) -> None:
    """Everything that the manifest refers to must be among what it vouches for and describes."""
    lowered = (*manifest.graphs, *(manifest.npu.graphs if manifest.npu else ()))
    files = [*(graph.file for graph in lowered), *(tree.file for tree in manifest.trees if tree.file)]
    files += [manifest.weights] if manifest.weights else []
    files += [manifest.npu.index] if manifest.npu else []
    trees, graphs = ({part.name for part in parts} for parts in (manifest.trees, lowered))
    unknown = [name for name in files if name not in manifest.files]
    unknown += [gear.name for gear in manifest.gears if gear.tree not in trees or gear.graph not in graphs]
    unknown += [name for gear in manifest.gears for name in gear.class_trees if name not in trees]
    drafts = {graph.name for graph in lowered if graph.kind == "draft"}
    for gear in manifest.gears:
        if gear.draft is not None and not drafts & {gear.draft, f"{gear.draft}-kv{gear.slots}"}:
            unknown.append(gear.draft)
    if unknown or "plain" not in trees:
        raise BundleError(f"{folder}: the manifest refers to {(unknown or ['plain'])[0]}, which it does not describe")
    _check_classes(folder, manifest)


def _check_classes(folder: Path, manifest: Manifest) -> None:
    """The trees of a gear's confidence classes must be as many as the plan has classes, of equally many rows."""
    rows = {tree.name: tree.rows if tree.file else 0 for tree in manifest.trees}
    classes = len(manifest.planning.bounds) + 1 if manifest.planning else 1
    for gear in manifest.gears:
        names = (gear.tree, *gear.class_trees)
        equal = len({rows[name] for name in names}) == 1 and rows[gear.tree]
        if gear.class_trees and not (equal and len(names) == classes):
            raise BundleError(
                f"{folder}: gear {gear.name}: expected {classes} trees of equal rows, one for each confidence class,"
                f" got {', '.join(names)}; build the bundle again"
            )


def _verify(folder: Path, name: str, digest: str) -> None:
    path = folder / name
    try:
        got = file_digest(path)
    except OSError:
        raise BundleError(f"{path}: missing; the manifest lists it; copy the whole bundle again") from None
    if got != digest:
        raise BundleError(
            f"{path}: altered or truncated (SHA-256 {got[:12]}..., expected {digest[:12]}...); copy the bundle again"
        )
