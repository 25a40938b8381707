"""Engines that decode from a bundle, one file each, and the one place where an engine is chosen.

Engines are known by name. Those of the installed packages are entry points of the group ``draftwood.engines``, so one
that needs the compiler lives above the runtime and registers like any other; ``register`` adds one to this process.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from draftwood.environment import npu_count
from draftwood.errors import RequestError
from draftwood.runtime.bundle import Bundle
from draftwood.runtime.engines.engine import Engine
from draftwood.trees.topology import branches

GROUP = "draftwood.engines"

# Opens an engine: a bundle, and the processors to use (None means all).
Opener = Callable[[Bundle, int | None], Engine]

_registered: dict[str, Opener] = {}


def register(name: str, opener: Opener) -> None:
    """Makes an engine known to this process under a name; the last to register a name has it."""
    _registered[name] = opener


def engine_names() -> list[str]:
    """The names of all engines, in alphabetical order."""
    return sorted({*_registered, *(entry.name for entry in entry_points(group=GROUP))})


def default_engine(bundle: Bundle) -> str:
    """The NPU's where machine and bundle have one, else the CPU's; of a quantised teacher with trees that branch the
    one whose rows have the same bits in all of them, since a last bit can become a step of int8 there."""
    manifest = bundle.manifest
    if manifest.graph_set("ge") and npu_count():
        return "npu"
    branching = any(branches(tree.rows, tree.depth) for tree in manifest.trees)
    has_bitwise = any(graph.name == "bitwise" for graph in manifest.graphs_of("onnx"))
    return "bitwise" if manifest.quantised and branching and has_bitwise else "cpu"


def host_engine(bundle: Bundle) -> str:
    """The engine of this machine's processor, without an NPU: its own engine, or eager PyTorch over the weights
    of graphs that are for an NPU alone."""
    name = default_engine(bundle) if bundle.manifest.graph_set("onnx") else "eager"
    return "cpu" if name == "npu" else name


def open_engine(bundle: Bundle, name: str | None = None, threads: int | None = None) -> Engine:
    """The engine asked for, or the default one.

    Raises:
        RequestError: no such engine, or no such device.
        BundleError: the bundle holds no graphs for it.
    """
    name = name or default_engine(bundle)
    if name not in _registered:
        points = list(entry_points(group=GROUP, name=name))
        if not points:
            raise RequestError(f"--engine {name}: not known; expected one of {', '.join(engine_names())}")
        return points[0].load()(bundle, threads)
    return _registered[name](bundle, threads)


__all__ = [
    "Engine",
    "Opener",
    "default_engine",
    "engine_names",
    "host_engine",
    "open_engine",
    "register",
]
