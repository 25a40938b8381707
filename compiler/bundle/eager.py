"""From a bundle on disk back to eager PyTorch: the networks over the bundle's own weights, and its steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from draftwood.compiler.bundle.build import load_modules, rebuild_drafts
from draftwood.compiler.bundle.weights import map_weights
from draftwood.compiler.drafters.kinds import Modules, drafter_of
from draftwood.compiler.ge.weights import map_npu_weights, read_index
from draftwood.compiler.steps.teacher import Step
from draftwood.compiler.teachers.config import TeacherConfig
from draftwood.errors import BundleError
from draftwood.manifest import Manifest
from draftwood.trees.frozen import thaw


def bundle_modules(manifest: Manifest, weights: Mapping[str, Tensor]) -> Modules:
    """Teacher and drafter as the manifest describes them, over weights by name."""
    config = msgspec.convert(manifest.teacher.config, TeacherConfig)
    drafter = drafter_of(manifest.drafter) if manifest.drafter else None
    return load_modules(weights, config, drafter)


def bundle_drafts(folder: Path, manifest: Manifest, modules: Modules, npu: bool) -> dict[str, Step]:
    """The drafter's steps by name, on modules that hold the bundle's weights; those of its NPU if ``npu``."""
    files = {tree.name: folder / tree.file for tree in manifest.trees if tree.file}
    topologies = {name: thaw(path.read_text(), str(path))[0] for name, path in files.items()}
    return rebuild_drafts(manifest, topologies, modules, npu)


def onnx_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Views of the fp32 weights of the ONNX graphs; BundleError where the bundle has none."""
    if manifest.weights is None:
        raise BundleError(f"{folder}: holds no ONNX graphs and no fp32 weights; build it with --target onnx,ge")
    return map_weights(folder / manifest.weights)


def npu_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Views of the weights of the NPU's graphs; BundleError where the bundle has no such graphs or no weights."""
    if manifest.npu is None:
        raise BundleError(f"{folder}: holds no NPU graphs; build it with --target onnx,ge")
    index = folder / manifest.npu.index
    return map_npu_weights(index.parent, read_index(index))
