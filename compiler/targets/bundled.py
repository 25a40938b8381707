"""From a bundle on disk back to eager PyTorch: the networks over the bundle's own weights, and its draft steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from draftwood.compiler.checkpoints.safetensors_file import map_tensors
from draftwood.compiler.drafters.model import Modules
from draftwood.compiler.drafters.registry import drafter_of
from draftwood.compiler.ge.weights import bundle_npu_weights
from draftwood.compiler.ranks.plan import cut, join, layer_of, split_of
from draftwood.compiler.ranks.share import Share
from draftwood.compiler.steps.step import Step
from draftwood.compiler.targets.modules import load_modules, make_modules
from draftwood.compiler.targets.steps import rebuild_drafts, rebuild_wholes
from draftwood.compiler.teachers.registry import described_config, family_of
from draftwood.errors import BundleError
from draftwood.manifest import GraphSet, Manifest
from draftwood.trees import Topology
from draftwood.trees.frozen import thaw


def bundle_modules(manifest: Manifest, weights: Mapping[str, Tensor], ranks: int = 1) -> Modules:
    """Teacher and drafter as the manifest describes them, over weights by name, those of any one of ``ranks``."""
    drafter = drafter_of(manifest.drafter) if manifest.drafter else None
    return load_modules(weights, described_config(manifest.teacher.config), drafter, ranks)


def with_own_tables(manifest: Manifest, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with rotary tables of the manifest's configuration in place of the file's, as long and of their type:
    graphs that read wrong ones are then told apart."""
    config = described_config(manifest.teacher.config)
    tables = family_of(config).tables(config, len(weights["rope_cos"]))
    own = {name: torch.from_numpy(table).to(weights[name].dtype) for name, table in tables.items()}
    return {**weights, **own}


def whole_npu_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The weights of the NPU's graphs by name, joined if they are split over ranks.

    Raises:
        BundleError: they are not there, or the ranks' are not parts of one model.
    """
    sets = manifest.rank_sets("ge")
    parts = [bundle_npu_weights(folder, graphs) for graphs in sets]
    if len(parts) == 1:
        return parts[0]
    config = described_config(manifest.teacher.config)
    drafter = drafter_of(manifest.drafter) if manifest.drafter else None
    block, teacher_parts = drafter.block(config) if drafter else config, family_of(config).parts(config)
    with torch.device("meta"):
        modules = make_modules(config, drafter, len(parts[0]["rope_cos"]))
    whole = {}
    for name, value in (item for module in modules if module is not None for item in module.state_dict().items()):
        of_ranks, sizes = [part[name] for part in parts], config if name in teacher_parts else block
        joined = join(name, of_ranks, sizes, value.shape) if split_of(layer_of(name)[0]) else of_ranks[0]
        for rank, part in enumerate(of_ranks):
            # What several ranks have, such as a norm, and the zeros of padded rows.
            if not torch.equal(cut(name, joined, sizes, Share(rank, len(parts))), part):
                raise BundleError(
                    f"{folder / sets[rank].weights}: {name} is not rank {rank}'s part of what all ranks have together;"
                    " expected weights of one checkpoint; build the bundle again"
                )
        whole[name] = joined
    return whole


def bundle_drafts(folder: Path, manifest: Manifest, graphs: GraphSet, modules: Modules) -> dict[str, Step]:
    """The drafter's steps of a graph set by name, on modules that hold the bundle's weights."""
    return rebuild_drafts(manifest, graphs, _topologies(folder, manifest), modules)


def bundle_wholes(folder: Path, manifest: Manifest, graphs: GraphSet, modules: Modules) -> dict[str, Step]:
    """The bundle's whole steps by name, if the graph set has any."""
    return rebuild_wholes(manifest, graphs, _topologies(folder, manifest), modules)


def _topologies(folder: Path, manifest: Manifest) -> dict[str, Topology]:
    files = {tree.name: folder / tree.file for tree in manifest.trees if tree.file}
    return {name: thaw(path.read_text(), str(path))[0] for name, path in files.items()}


def required_set(folder: Path, manifest: Manifest, target: str, rank: int = 0) -> GraphSet:
    """The graphs of a target and rank; BundleError if the bundle has none."""
    graphs = manifest.graph_set(target, rank)
    if graphs is None:
        raise BundleError(f"{folder}: holds no {target} graphs; build it with --target onnx,ge")
    return graphs


def onnx_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Views of the weights of the ONNX graphs; BundleError if the bundle has none."""
    return map_tensors(folder / required_set(folder, manifest, "onnx").weights)
