"""The choice of the engine that decodes from a bundle, and its opening."""

from __future__ import annotations

from msgspec.structs import replace

from draftwood.environment import npu_count
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.engine import Engine
from draftwood.runtime.engines.opening import USUAL, Opening
from draftwood.runtime.engines.registry import engine_kind
from draftwood.trees.topology import branches


def default_engine(bundle: Bundle) -> str:
    """The NPU's if machine and bundle have one, else the CPU's. A quantised teacher with branching trees gets the
    engine whose rows have the same bits in all trees: with int8, one last bit can become a whole step."""
    manifest = bundle.manifest
    if manifest.graph_set("ge") and npu_count():
        return "npu"
    branching = any(branches(tree.rows, tree.depth) for tree in manifest.trees)
    return "bitwise" if manifest.quantised and branching and engine_kind("bitwise").runs(manifest) else "cpu"


def host_engine(bundle: Bundle) -> str:
    """The engine of this machine's processor, without an NPU: its own engine, or eager PyTorch over the weights
    of graphs that are for an NPU alone."""
    name = default_engine(bundle) if bundle.manifest.graph_set("onnx") else "eager"
    return "cpu" if name == "npu" else name


def open_engine(bundle: Bundle, opening: Opening = USUAL) -> Engine:
    """The engine asked for, or the default one.

    Raises:
        RequestError: no such engine, or no such device.
        BundleError: the bundle holds no graphs for it.
    """
    name = opening.engine or default_engine(bundle)
    return engine_kind(name).open(bundle, replace(opening, engine=name))
