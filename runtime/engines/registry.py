"""The engines by name: the graphs that each runs, its needs, and the place of its class.

An engine is registered here and nowhere else. Help, refusals, extras, the doctor, proofs, ``inspect``, ``check`` and
Ray read it before an engine is loaded. ``./draft`` reads it before anything is installed. So it imports nothing but
Python's own library. Another package registers its `EngineKind` as an entry point of the group ``draftwood.engines``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from draftwood.manifest import Manifest
    from draftwood.runtime.bundle import Bundle
    from draftwood.runtime.engines.engine import Engine
    from draftwood.runtime.engines.opening import Opening

GROUP = "draftwood.engines"


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """An engine, before anything of it is loaded."""

    # Its name in command lines, files and messages.
    name: str
    # Its description; ``--help`` shows it after its name.
    help: str
    # The class or function that makes the engine from a bundle and an `Opening`, or its place as "module:name".
    source: str | Callable[[Bundle, Opening], Engine]
    # The platform whose graphs it runs; "" if it runs none.
    target: Literal["onnx", "ge", ""] = "onnx"
    # The kind of ONNX graph that it cannot do without.
    graph: str = "decode"
    # Numbers of ranks that it takes.
    ranks: range = range(1, 2)
    # Packages that it needs besides the runtime's own, and the extra that brings them.
    packages: tuple[str, ...] = ()
    extra: str = ""
    # The doctor's words for the ability of a machine that has all its needs; engines may share them. "" has no line
    # there.
    ability: str = ""
    # Whether it takes an Ascend NPU, with CANN.
    npu: bool = False
    # Its device, as OpenVINO calls it.
    device: str = ""
    # Whether it opens in less than a second and on the processor alone: its proof then has a process of its own.
    quick: bool = False
    # Whether ``check`` compares it if no engine is named.
    compared: bool = False
    # "module:name" of a function of a bundle: whether its device is here and the bundle is ready for it.
    ready: str = ""

    def open(self, bundle: Bundle, opening: Opening) -> Engine:
        """The engine on a bundle."""
        engine: Engine = _named(self.source)(bundle, opening)
        return engine

    def runs(self, manifest: Manifest) -> bool:
        """Whether it runs a bundle's graphs, here or on a machine that has its device."""
        if self.target == "onnx":
            return any(graph.kind == self.graph for graph in manifest.graphs_of("onnx"))
        return self.target == "ge" and len(manifest.rank_sets("ge")) in self.ranks

    def is_ready(self, bundle: Bundle) -> bool:
        """Whether its device is here, and the bundle ready for it."""
        return not self.ready or bool(_named(self.ready)(bundle))


def _named(source: Any) -> Any:
    if not isinstance(source, str):
        return source
    module, name = source.split(":")
    return getattr(import_module(module), name)


_HERE = "draftwood.runtime.engines"
_REFERENCE = "draftwood.tools.reference"
_MANY = range(1, sys.maxsize)
_openvino = partial(
    EngineKind,
    source=f"{_HERE}.openvino:OpenVinoEngine",
    packages=("openvino",),
    extra="openvino",
    ability="run with OpenVINO",
)
_torch_npu = partial(
    EngineKind,
    target="ge",
    packages=("torch_npu", "torch", "safetensors", "protobuf"),
    extra="npu",
    ability="run on an NPU (npu)",
    npu=True,
)

ENGINES = (
    EngineKind(
        name="cpu",
        help="onnxruntime",
        source=f"{_HERE}.cpu:CpuEngine",
        graph="step",
        quick=True,
        compared=True,
    ),
    EngineKind(
        name="bitwise",
        help="the same, and every row of every tree has the bits of plain decoding, of a bundle built with --bitwise",
        source=f"{_HERE}.bitwise:BitwiseEngine",
        graph="bitwise",
        quick=True,
        compared=True,
    ),
    EngineKind(
        name="static",
        help="onnxruntime with graphs of fixed sizes, to compare with",
        source=f"{_HERE}.static:OnnxStaticEngine",
        quick=True,
        compared=True,
    ),
    _openvino(name="openvino", help="OpenVINO on an Intel CPU", device="CPU"),
    _openvino(name="openvino-gpu", help="on an Intel GPU", device="GPU"),
    _openvino(name="openvino-npu", help="on an Intel NPU", device="NPU"),
    EngineKind(
        name="qnn",
        help="Qualcomm's HTP, or its emulator, slow",
        source=f"{_HERE}.qnn:HtpEngine",
        packages=("onnxruntime_qnn",),
        extra="qnn",
        ability="run for an HTP",
    ),
    EngineKind(
        name="ge",
        help="the NPU's graphs, interpreted, slow",
        source=f"{_REFERENCE}.ge:GeEngine",
        target="ge",
        ranks=_MANY,
        packages=("torch",),
        extra="npu",
        compared=True,
    ),
    _torch_npu(
        name="npu",
        help="an Ascend NPU",
        source=f"{_HERE}.npu:NpuEngine",
        compared=True,
        ready="draftwood.runtime.engines.npu:is_ready",
    ),
    _torch_npu(
        name="npu-captured",
        help="the same, its launches captured and not compiled",
        source=f"{_HERE}.npu:CapturedEngine",
    ),
    EngineKind(
        name="acl",
        help="an Ascend NPU with CANN alone, of a bundle that ATC has compiled",
        source=f"{_HERE}.acl:AclEngine",
        target="ge",
        ability="run on an NPU (acl)",
        npu=True,
        compared=True,
        ready=f"{_HERE}.acl:is_ready",
    ),
    EngineKind(
        name="ranks",
        help="several NPUs, under torchrun",
        source=f"{_REFERENCE}.torchrun:RanksEngine",
        target="ge",
        ranks=_MANY[1:],
        packages=("torch",),
        extra="npu",
    ),
    EngineKind(
        name="eager",
        help="PyTorch without graphs, to compare with",
        source=f"{_REFERENCE}.eager:EagerEngine",
        target="",
        packages=("torch",),
        extra="build",
    ),
)

_registered: dict[str, EngineKind] = {}
_OURS = {kind.name: kind for kind in ENGINES}


def register(kind: EngineKind) -> None:
    """Makes an engine known to this process; a later one of the same name replaces it."""
    _registered[kind.name] = kind


def is_registered(name: str) -> bool:
    """Whether this process has registered the engine: no other one knows it, nor what was proved of it."""
    return name in _registered


def engines() -> dict[str, EngineKind]:
    """All engines by name: ours in the order of this file, then those of other packages.

    Raises:
        RequestError: a package's entry point is no `EngineKind`.
    """
    from importlib.metadata import entry_points  # reads every installed package, which opening a bundle need not

    kinds = dict(_OURS)
    for entry in entry_points(group=GROUP):
        if entry.name not in kinds:
            kinds[entry.name] = kind = entry.load()
            if not isinstance(kind, EngineKind):
                _refuse(f"engine {entry.name}: {entry.value} is no EngineKind; mend or remove the package")
    return kinds | _registered


def engine_kind(name: str) -> EngineKind:
    """The engine of a name; RequestError if there is none. Other packages are asked for a name that is not ours."""
    known = _OURS | _registered
    if name not in known:
        known = engines()
    if name not in known:
        _refuse(f"--engine {name}: not known; expected one of {', '.join(sorted(known))}")
    return known[name]


def _refuse(message: str) -> None:
    from draftwood.errors import RequestError  # ./draft reads this file without the package

    raise RequestError(message)
