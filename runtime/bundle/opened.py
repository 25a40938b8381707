"""An opened bundle: everything is verified before anything is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from draftwood.errors import BundleError, RequestError, TreeError
from draftwood.files import read_text
from draftwood.manifest import (
    CORPUS_FILE,
    MOST_CORPUS_BYTES,
    Gear,
    GraphSet,
    GraphSignature,
    Manifest,
    Tree,
    read_manifest,
)
from draftwood.runtime.bundle import files, graphs, references, weights
from draftwood.runtime.bundle.remembered import Files
from draftwood.runtime.text.grammar import Grammars
from draftwood.runtime.text.tokenizer import Tokenizer
from draftwood.trees import Topology, TreeBuffers
from draftwood.trees.frozen import thaw

# full: every byte is hashed and every weight looked at; fast: all that can be said without reading the large files.
Verify = Literal["full", "fast"]

# The weight that maps a smaller draft vocabulary to the teacher's ids.
DRAFT_IDS = "teacher_ids"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. ``trees`` maps a tree's name to its topology and buffers; a budget tree has neither.

    ``files`` are the file system's facts, by which a proof of the bundle can be remembered; ``verified`` says how
    thoroughly this opening looked.
    """

    folder: Path
    manifest: Manifest
    trees: dict[str, tuple[Topology, TreeBuffers]]
    files: Files
    verified: Verify

    @classmethod
    def open(cls, folder: Path, verify: Verify | None = None) -> Bundle:
        """Reads the manifest and refuses contradictions.

        Args:
            verify: full also hashes every file, reads every graph's inputs and outputs, and looks for NaN and infinity
                in the weights. None does so once on this machine for files that have not changed since.

        Raises:
            BundleError: the folder is no bundle, or one of another schema version. A file is missing, altered, of a
                special kind or outside the bundle. References or sizes contradict each other. A tree breaks an
                invariant, weights are not finite, or token ids are none.
        """
        manifest = read_manifest(folder)
        references.check_references(manifest, str(folder))
        files.check_files(folder, manifest.files)
        present = _files(folder, manifest)
        if verify is None:
            verify = "fast" if present.proved("files") else "full"
        if verify == "full":
            files.check_digests(folder, manifest.files)
        _check_weights(folder, manifest, verify)
        trees = _trees(folder, manifest)
        if verify == "full":
            present.remember("files")
        return cls(folder, manifest, trees, present, verify)

    @cached_property
    def draft_ids(self) -> NDArray[np.int64] | None:
        """The teacher's ids of a smaller draft vocabulary, int64 [U]; None if a drafter proposes any token.

        Raises:
            BundleError: they are damaged.
        """
        for path, tensors in _headers(self.folder, self.manifest).items():
            if DRAFT_IDS in tensors:
                ids_U = weights.read_ids(path, tensors[DRAFT_IDS])
                if ids_U.min(initial=0) < 0 or ids_U.max(initial=0) >= self.manifest.dims.vocabulary:
                    raise BundleError(f"{path}: {DRAFT_IDS} holds ids that are none; build the bundle again")
                return ids_U
        return None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the checkpoint had none: prompts are then given as ids.

        Raises:
            BundleError: it is damaged.
        """
        if not self.manifest.tokenizer:
            return None
        known = self.verified == "fast" and self.files.proved("templates")
        tokenizer = Tokenizer.load(self.folder / "tokenizer", known)
        if not known:
            self.files.remember("templates")
        return tokenizer

    @cached_property
    def corpus(self) -> list[int]:
        """Tokens of the text besides every other in which tokens are looked up; none if the bundle has no such text.

        Raises:
            BundleError: it cannot be read.
        """
        if CORPUS_FILE not in self.manifest.files or self.tokenizer is None:
            return []
        try:
            text = read_text(self.folder / CORPUS_FILE, MOST_CORPUS_BYTES)
        except OSError as error:
            raise BundleError(f"{self.folder / CORPUS_FILE}: {error.strerror}; build the bundle again") from error
        return self.tokenizer.encode(text)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars that texts can be held to; RequestError if they cannot."""
        if self.tokenizer is None:
            raise RequestError(f"grammar: {self.folder} has no tokenizer, which says what its tokens spell")
        return Grammars(self.tokenizer.to_json(), self.manifest.dims.vocabulary, self.manifest.teacher.eos)

    def graph(self, name: str) -> GraphSignature:
        """A graph for onnxruntime by its name; BundleError if the bundle holds none."""
        for graph in self.manifest.graphs_of("onnx"):
            if graph.name == name:
                return graph
        others = "take --engine ge or another one for an NPU's graphs, or " if self.manifest.graph_set("ge") else ""
        raise BundleError(
            f"{self.folder}: has no graph {name!r} for a CPU; {others}build it with --target onnx or onnx,ge"
        )

    def npu_graphs(self) -> GraphSet:
        """The graphs for an NPU, of the first rank; BundleError if the bundle holds none."""
        graphs = self.manifest.graph_set("ge")
        if graphs is None:
            raise BundleError(f"{self.folder}: holds no NPU graphs; build it with --target onnx,ge")
        return graphs

    @cached_property
    def rows(self) -> dict[Gear, int]:
        """The gears, with the rows of their trees."""
        rows = {tree.name: tree.rows for tree in self.manifest.trees}
        return {gear: rows[gear.tree] for gear in self.manifest.gears}

    def gear(self, name: str) -> Gear:
        """A gear by its name; RequestError lists the bundle's gears."""
        for gear in self.manifest.gears:
            if gear.name == name:
                return gear
        names = ", ".join(gear.name for gear in self.manifest.gears)
        raise RequestError(
            f"gear {name!r}: not in {self.folder}; it holds {names}; other policies are adaptive and plain"
        )


def _files(folder: Path, manifest: Manifest) -> Files:
    try:
        return Files.of(folder, manifest.files)
    except OSError as error:
        raise BundleError(f"{folder}: changed while it was opened ({error}); open it again") from error


def _check_graphs(folder: Path, manifest: Manifest, headers: Mapping[Path, Mapping[str, weights.Tensor]]) -> None:
    """The ends of onnxruntime's graphs, and where they read weights."""
    for lowered in manifest.graph_sets:
        if lowered.target == "onnx":
            tensors = headers[folder / lowered.weights].values()
            bytes_to = {end: begin for kind, _, (begin, end) in map(astuple, tensors) if kind == "U8"}
            for graph in lowered.graphs:
                graphs.check_graph(folder, graph, lowered.weights, bytes_to)


def _check_weights(folder: Path, manifest: Manifest, verify: Verify) -> None:
    """Headers and sizes of all weights; in full, every number of them, and what graphs read."""
    headers = _headers(folder, manifest)
    for path, tensors in headers.items():
        _check_positions(path, tensors, max(gear.slots for gear in manifest.gears))
    if verify == "full":
        for path, tensors in headers.items():
            weights.check_values(path, tensors, manifest.dims.vocabulary)
        _check_graphs(folder, manifest, headers)


def _headers(folder: Path, manifest: Manifest) -> dict[Path, dict[str, weights.Tensor]]:
    """The tensors of all files of weights, as far as their form is known here."""
    headers: dict[Path, dict[str, weights.Tensor]] = {}
    for lowered in manifest.graph_sets:
        path = folder / lowered.weights
        if lowered.index is not None:
            headers |= weights.read_index(folder / lowered.index, path) if lowered.weights in manifest.files else {}
        elif (
            lowered.target == "onnx" or path.suffix == ".safetensors"
        ):  # another target's own form is its engine's to read
            headers[path] = weights.read_header(path)
    return headers


def _check_positions(path: Path, tensors: dict[str, weights.Tensor], longest: int) -> None:
    positions = tensors.get("rope_cos")
    if positions is not None and positions.shape[:1] < (longest,):
        raise BundleError(
            f"{path}: rope_cos has shape {list(positions.shape)}; expected {longest} positions or more, the largest"
            " KV length; build the bundle again"
        )


def _trees(folder: Path, manifest: Manifest) -> dict[str, tuple[Topology, TreeBuffers]]:
    return {tree.name: _tree(folder / tree.file, tree) for tree in manifest.trees if tree.file}


def _tree(path: Path, tree: Tree) -> tuple[Topology, TreeBuffers]:
    try:
        topology, buffers = thaw(read_text(path), str(path))
    except (OSError, TreeError) as error:
        raise BundleError(str(error)) from error
    sizes, got = (tree.rows, tree.depth, tree.width), (topology.rows, topology.depth, topology.width)
    if got != sizes:
        raise BundleError(
            f"{path}: rows, depth and width {got}; the manifest says {sizes} of tree {tree.name}; build it again"
        )
    return topology, buffers
